"""`jaxgrpo compare`: arms x learning rates x seeds from one base, and what they say."""

from jaxgrpo.experiments.compare.command import compare

__all__ = ["compare"]
