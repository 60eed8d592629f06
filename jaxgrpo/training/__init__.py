"""A run: set-up, the loop, checkpoints, logs and reports."""
