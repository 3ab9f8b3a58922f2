"""What the driver of a run on a Ray cluster and its ranks call the things that they share."""

from __future__ import annotations

NAMESPACE = "distributed"  # of the keys in Ray's own store
RESUMED = "resumed.json"  # in the folder of an attempt: the state that it goes on from
ENDED = "ended.json"  # the fault that an attempt ended with


def stop_key(run: str) -> str:
    """Where the driver asks the ranks to stop: the number of a signal."""
    return f"{run}/stop"


def node_key(run: str, attempt: int, node: int | str) -> str:
    """Where the ranks of an attempt count their nodes."""
    return f"{run}/{attempt}/{node}"


def place_name(rank: int) -> str:
    """The file, in the folder of an attempt, in which a rank says where it runs."""
    return f"place-{rank}.json"
