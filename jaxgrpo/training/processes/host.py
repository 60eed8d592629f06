"""The memory of this host, as far as its processes may use it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

GROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
"""Linux: where control groups are, and the file that says in which of them this process is."""

STATUS = Path("/proc/self/status")


def memory_bytes(groups: Path = GROUPS, membership: Path = MEMBERSHIP) -> int:
    """Bytes of memory that this process may use: those of the machine, or what a control group
    allows where that is less, as in a container or in a job that a scheduler has started. A process
    that takes more is killed."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *_limits(groups, membership)])


def most_taken() -> int | None:
    """The most bytes that this process has taken so far; None where the system does not tell."""
    text = STATUS.read_text() if STATUS.exists() else ""
    match = re.search(r"VmHWM:\s+(\d+) kB", text)  # not of every kernel that has the file
    return 1024 * int(match[1]) if match else None


def _limits(groups: Path, membership: Path) -> Iterator[int]:
    """The limits of the groups of this process, and of those above them, where they have any.

    In the second version of control groups one tree limits all, in the first one has its own for
    memory.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:  # another system
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            tree, name = groups, "memory.max"
        elif "memory" in controllers.split(","):
            tree, name = groups / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = PurePosixPath(path.lstrip("/"))
        for place in (group, *group.parents):
            if (limit := _limit(tree / place / name)) is not None:
                yield limit


def _limit(file: Path) -> int | None:
    """What a file says; None: it is not there, as of a group that a container does not see, or says
    "max"."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
