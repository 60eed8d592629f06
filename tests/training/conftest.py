"""A folder of checkpoints, for the tests of how they are read and of what damages them."""

from checkpointed import saved as saved
