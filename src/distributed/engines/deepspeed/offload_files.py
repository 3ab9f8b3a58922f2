"""Where a run keeps state that it puts into files."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def files_of(folder: str, run_dir: str) -> Path:
    """A run's own place in a folder that others may use too; the same when it is started again."""
    return Path(folder) / f"deepspeed-{hashlib.sha256(os.path.abspath(run_dir).encode()).hexdigest()[:12]}"
