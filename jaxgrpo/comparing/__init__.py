"""`jaxgrpo compare`: arms x learning rates x seeds from one base, and what they say."""

from jaxgrpo.comparing.command import compare

__all__ = ["compare"]
