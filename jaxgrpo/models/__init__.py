"""Decoders: Flax NNX to define, plain dicts of arrays to run."""
