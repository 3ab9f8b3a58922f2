"""Our trainers beside others: `python -m benchmarks.suite` in the root of the repository."""

from __future__ import annotations

import os
from pathlib import Path


def importable() -> dict[str, str]:
    """The variable by which processes in other folders import this suite."""
    known = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *([known] if known else [])])}
