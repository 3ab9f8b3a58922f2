"""What tells one launch of a run from others in the same folder."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

from distributed.core.env import WorkerEnv
from distributed.core.run_files import LAUNCH


def launch_id(run_dir: str, env: WorkerEnv) -> str:
    """The same in all worlds of a launch: the first of them makes it up, also for a later fit that only a restarted
    world has come to. For the rank that decides."""
    path = Path(run_dir) / LAUNCH
    if env.restarts and path.exists():
        return str(json.loads(path.read_text())["id"])
    name = uuid.uuid4().hex
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"id": name}) + "\n")
    return name
