"""Free host memory, as the kernel counts it before it kills: the machine's, or what a container or a job may take."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

_CONTROL_GROUPS, _OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")  # the limit, what is used, and of that files
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def free_host_memory(control_groups: Path = _CONTROL_GROUPS, own_groups: Path = _OWN_GROUPS) -> int:
    """Bytes that this process can take before one is killed for them; swap does not count."""
    return min([psutil.virtual_memory().available, *_left_of_limits(control_groups, own_groups)])


def _left_of_limits(root: Path, own: Path) -> Iterator[int]:
    """Of this process's control groups and those above them, as far as they are shown here."""
    lines = own.read_text(encoding="utf-8").splitlines() if own.exists() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, files = (root / "memory", _VERSION_1) if controllers else (root, _VERSION_2)
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            yield from _left_of_one(folder, *files)
            if folder == base:
                break


def _left_of_one(folder: Path, limit: str, used: str, reclaimable: str) -> Iterator[int]:
    """What the kernel kept of files that were read or written is given back where it is needed."""
    try:
        most, now = (folder / limit).read_text(encoding="ascii").strip(), int((folder / used).read_text("ascii"))
        counts = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
    except (OSError, ValueError):  # not there, or not shown to this process
        return
    if most.isdigit():
        yield max(0, int(most) - now + int(counts.get(reclaimable, 0)))
