"""The commands by which a node starts its processes."""

from __future__ import annotations

import os
from collections.abc import Sequence

ENTRY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "entry.py")
_TITLE_ROOM = " " * 1024  # a forked rank's own command line is written over that of the warm parent


def rank_argv(python: str, command: Sequence[str]) -> tuple[str, ...]:
    """A rank that runs a script with its arguments, or `-m module …`."""
    return (python, ENTRY, "rank", *command)


def command_of(argv: Sequence[str]) -> tuple[str, ...]:
    """What a rank runs.

    >>> command_of(rank_argv("python", ["train.py", "--lr", "1"]))
    ('train.py', '--lr', '1')
    """
    assert tuple(argv[1:3]) == (ENTRY, "rank"), argv
    return tuple(argv[3:])


def warm_argv(python: str, line: int, launcher: int, modules: Sequence[str]) -> tuple[str, ...]:
    """A warm parent, which has the descriptor of its connection and its launcher's process id."""
    return (python, "-u", ENTRY, "warm", str(line), str(launcher), *modules, _TITLE_ROOM)
