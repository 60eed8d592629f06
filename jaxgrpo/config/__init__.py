"""Reading and checking a run's configuration."""
