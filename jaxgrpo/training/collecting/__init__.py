"""Where the rollouts of a step come from: sampled, grown, repeated from earlier steps, or saved."""
