"""Survivor state: ranks that lost a peer still hold the run in memory, and send it to the ranks that join them.

Of those that hold it, the one that came furthest is the source: a step that it has finished was finished with the
gradients of all, so no rank's work is lost. Where no rank holds it, the run resumes from the checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from distributed.runtime.session import Session
from distributed.train.resume.sharing import send_tree


@dataclass(frozen=True)
class SurvivorState:
    """What a rank held when its world broke: the state after `step` steps, as a checkpoint would have it."""

    step: int
    tree: dict[str, Any]


@dataclass(frozen=True)
class HandedOver:
    """The state that all ranks of a new world begin with, and whose it was."""

    step: int
    rank: int
    tree: dict[str, Any]


def hand_over(session: Session, held: SurvivorState | None) -> HandedOver | None:
    """Every rank of a new world comes here, with what it holds. None when that is nothing."""
    steps = torch.zeros(session.world_size, dtype=torch.int64, device=session.device)
    steps[session.rank] = -1 if held is None else held.step
    found = session.sum("what the ranks hold", steps).tolist()
    session.check()
    newest = max(found)
    if newest < 0:
        return None
    source = found.index(newest)
    mine = held.tree if held is not None and source == session.rank else None
    handed_over = HandedOver(newest, source, send_tree(session, "survivor state", source, mine))
    if session.gate is not None:
        torch.cuda.synchronize(session.device)
        session.check()
    return handed_over


def take_model(model: nn.Module, state: dict[str, Any]) -> None:
    """The weights and buffers of the same model on another rank, where it may have made or enlarged buffers since."""
    for name, value in state.items():
        path, _, own_name = name.rpartition(".")
        owner = model.get_submodule(path)
        if not isinstance(value, torch.Tensor) or own_name in owner._parameters or own_name == "_extra_state":
            continue
        if own_name not in owner._buffers:
            owner.register_buffer(own_name, value.clone())
        elif (known := owner._buffers[own_name]) is None or known.shape != value.shape:
            owner._buffers[own_name] = value.clone()
    model.load_state_dict(state)
