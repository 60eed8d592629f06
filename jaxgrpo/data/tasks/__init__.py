"""Generated, verifiable tasks: rows to train and to test on, a scorer, a warm-start corpus.

Data are named "task:NAME:SPLIT" in a configuration; `load` gives their rows.
"""

from jaxgrpo.data.tasks.base import Task, Worked
from jaxgrpo.data.tasks.registry import PREFIX, find, load, tasks

__all__ = ["PREFIX", "Task", "Worked", "find", "load", "tasks"]
