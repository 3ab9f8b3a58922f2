"""What a container or the system keeps from this process: shared memory, locked memory, open files, its cgroup's."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path

from distributed.planner.network.machine import ProcessLimits
from distributed.planner.network.system_file import text_of

_MARKS = (".dockerenv", "run/.containerenv", "var/run/secrets/kubernetes.io")


def read_limits(root: Path = Path("/")) -> ProcessLimits:
    """Of this process. `root`: where its file system begins."""
    shm = root / "dev" / "shm"
    cgroup = root / "sys" / "fs" / "cgroup"
    return ProcessLimits(
        shm_bytes=shutil.disk_usage(shm).total if shm.is_dir() else None,
        memlock_bytes=_soft_limit("RLIMIT_MEMLOCK"),
        open_files=_soft_limit("RLIMIT_NOFILE"),
        memory_bytes=_number(text_of(cgroup / "memory.max") or text_of(cgroup / "memory" / "memory.limit_in_bytes")),
        cpus=_cpus(cgroup),
        is_container=any((root / mark).exists() for mark in _MARKS),
    )


def _soft_limit(name: str) -> int | None:
    if not hasattr(resource, name):
        return None
    soft = resource.getrlimit(getattr(resource, name))[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _cpus(cgroup: Path) -> float | None:
    """Of a quota of CPU time, by version 2 or 1 of cgroups."""
    quota, _, period = text_of(cgroup / "cpu.max").partition(" ")
    if not quota:
        quota, period = text_of(cgroup / "cpu" / "cpu.cfs_quota_us"), text_of(cgroup / "cpu" / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() and int(period) else None


def _number(text: str) -> int | None:
    """None: there is no limit, which version 1 says by a number near 2⁶³.

    >>> _number("max"), _number("1073741824"), _number("9223372036854771712")
    (None, 1073741824, None)
    """
    return int(text) if text.isdecimal() and int(text) < 2**60 else None
