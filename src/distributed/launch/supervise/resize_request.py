"""A resize request: the number of ranks that a user wants, as a file in the run directory."""

from __future__ import annotations

import json

from distributed.core.atomic import replace_file
from distributed.core.run_dir import RunDir


def ask_for_ranks(run_dir: str, ranks: int) -> None:
    """Request another number of ranks for a run on this machine; its launcher checks for this file regularly."""
    replace_file(RunDir(run_dir).resize, json.dumps({"ranks": ranks}) + "\n")  # its launcher may be another user's


def read_request(run_dir: str) -> int | None:
    """The requested number of ranks of a run; None without a request."""
    try:
        return int(json.loads(RunDir(run_dir).resize.read_text())["ranks"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
