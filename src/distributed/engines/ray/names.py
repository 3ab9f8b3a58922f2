"""What the driver of a run on a Ray cluster and its ranks call the things that they share."""

from __future__ import annotations

RAY_RUN = "DISTRIBUTED_RAY_RUN"  # the variable by which the ranks of a run find what it is called in Ray's store
NAMESPACE = "distributed"  # of the keys in Ray's own store
FOLDER = "ray"  # of a run directory: what Ray itself writes


def stop_key(run: str) -> str:
    """The key of the driver's request to stop: the number of a signal."""
    return f"{run}/stop"


def task_key(run: str, attempt: int, rank: int) -> str:
    """Where a rank says at which address it listens."""
    return f"{run}/task/{attempt}/{rank}"


def node_key(run: str, attempt: int, node: int | str) -> str:
    """Where the ranks of an attempt count their nodes."""
    return f"{run}/{attempt}/{node}"
