"""The identity of a launch among others in its folder, and what its later worlds must know of the first."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

from distributed.core.atomic import make_private, write_private
from distributed.core.env import WorkerEnv
from distributed.core.locks import LockFile, Owner
from distributed.core.run_dir import RunDir


def launch_id(run_dir: str, env: WorkerEnv) -> str:
    """The same in all worlds of a launch: the token of its lock, or what the first of them makes up, also for a later
    fit that only a restarted world has come to. For the rank that decides."""
    known = str(recall_launch(run_dir).get("id", "")) if env.restarts else ""
    text = LockFile(Path(run_dir)).read()
    owner = Owner.parse(text) if text is not None else None
    if known and (owner is None or owner.token == known):  # else it is of an earlier launch
        return known
    name = owner.token if owner is not None else uuid.uuid4().hex
    make_private(run_dir)
    write_private(RunDir(run_dir).launch, json.dumps({"id": name}) + "\n")
    return name


def recall_launch(run_dir: str) -> dict[str, Any]:
    """What this launch has written down of itself, or the one before it."""
    try:
        return dict(json.loads(RunDir(run_dir).launch.read_text()))
    except FileNotFoundError:
        return {}


def note_launch(run_dir: str, **more: str) -> None:
    """Write down what the later worlds of this launch must know."""
    write_private(RunDir(run_dir).launch, json.dumps(recall_launch(run_dir) | more) + "\n")
