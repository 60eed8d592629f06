"""Which prompts a step takes, sampling, and the rewards of samples."""
