"""Where a run stands, and how that goes into a checkpoint and comes back."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from distributed.checkpoint.rng import restore_rng, rng_state
from distributed.checkpoint.store import find_checkpoint, load_part, read_manifest, save_checkpoint
from distributed.core.errors import CheckpointError
from distributed.core.history import EpochRecord
from distributed.core.plan import Plan
from distributed.runtime.session import Session
from distributed.strategies.base import Strategy
from distributed.train.schedule import Schedule


@dataclass
class Progress:
    """How far training has come; a position in an epoch is a number of samples, so any number of ranks can go on."""

    epoch: int = 0
    step: int = 0  # optimizer steps of the whole run
    samples_in_epoch: int = 0


@dataclass(frozen=True)
class Restored:
    """What was read from a checkpoint."""

    path: Path
    progress: Progress
    epochs: tuple[EpochRecord, ...]
    has_rng: bool


def save_state(
    directory: str,
    progress: Progress,
    epochs: list[EpochRecord],
    strategy: Strategy,
    schedule: Schedule,
    session: Session,
) -> Path:
    """Every rank calls it after the same step."""
    shared: dict[str, Any] = {}
    if session.is_main:
        shared = strategy.state() | {
            "schedule": schedule.state(),
            "progress": asdict(progress),
            "epochs": [asdict(record) for record in epochs],
        }
    return save_checkpoint(directory, progress.step, shared, {"rng": rng_state(session.device)}, session)


def restore_state(plan: Plan, strategy: Strategy, schedule: Schedule, session: Session) -> Restored | None:
    """Load the checkpoint that the plan names, or nothing when it says True and there is none."""
    path = find_checkpoint(plan.checkpoint.dir, plan.checkpoint.resume)
    if path is None:
        return None
    manifest = read_manifest(path)
    shared = load_part(path, "shared")
    if shared is None:
        raise CheckpointError(f"the checkpoint {path} has no shared part", do="use an older one")
    check_same_model(shared["model"], strategy.state()["model"], path)
    strategy.load_state(shared)
    progress = Progress(**shared["progress"])
    schedule.load_state(shared["schedule"], progress.step)
    if progress.samples_in_epoch % plan.batch.global_batch:
        raise CheckpointError(
            f"the checkpoint {path} stands {progress.samples_in_epoch} samples into an epoch, "
            f"which is no multiple of the global batch {plan.batch.global_batch}",
            why="samples would be repeated or left out",
            do="keep batch_size × ranks × gradient_accumulation_steps as it was in the first run",
        )
    own = load_part(path, f"rank-{session.rank}") if manifest["world_size"] == session.world_size else None
    if own is not None:
        restore_rng(own["rng"], session.device)
    epochs = tuple(EpochRecord(**record) for record in shared["epochs"])
    return Restored(path, progress, epochs, own is not None)


def check_same_model(saved: dict[str, torch.Tensor], own: dict[str, torch.Tensor], path: Path) -> None:
    """Names and shapes must agree; the first that do not are told."""
    differing = [f"{name} is only in the checkpoint" for name in saved if name not in own]
    differing += [f"{name} is only in this model" for name in own if name not in saved]
    differing += [
        f"{name} is {tuple(saved[name].shape)} in the checkpoint and {tuple(own[name].shape)} in this model"
        for name in own
        if name in saved and saved[name].shape != own[name].shape
    ]
    if differing:
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise CheckpointError(
            f"the checkpoint {path} is of another model",
            why="; ".join(differing[:3]) + more,
            do="pass the model that was trained, or another checkpoint_dir",
        )
