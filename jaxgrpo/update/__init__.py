"""From judged rollouts to new parameters."""
