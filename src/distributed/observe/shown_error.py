"""An error of ours as a person should see it: without the traceback of our code."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.text import Text

from distributed.core.errors import DistributedError, RankFailedError


def show_error(error: DistributedError) -> None:
    """The error last, where the eye is; above it the one traceback of a failed rank."""
    sys.stdout.flush()
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    if isinstance(error, RankFailedError) and error.traceback:
        console.print(Text(error.traceback.rstrip()))
    console.print(Text(f"{type(error).__name__}: {error}", style="red"))
    if isinstance(error, RankFailedError) and error.log_path:
        console.print(Text(f"log of rank {error.rank}: {error.log_path}"))
