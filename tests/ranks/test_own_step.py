"""Training steps of a user's own on every strategy: the losses, logged values and weights of one process, or an error.

What a strategy cannot do is refused by name, before the first step or in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.core.errors import RankFailedError, TaskError
from distributed.testing import run_ranks
from tests.own_steps import (
    Run,
    Talking,
    assert_same,
    by_hand,
    in_parts,
    observed,
    penalized,
    talking_by_hand,
    train,
    twice,
)

SAMPLES, GLOBAL_BATCH = 21, 8  # a last step of five: one rank of two has a sample more
STEPS: dict[str, Any] = {"observed": observed, "twice": twice, "in_parts": in_parts, "talking": Talking}
BY_HAND = {**STEPS, "talking": talking_by_hand}
BITWISE = {"reproducible": "bitwise", "virtual_ranks": 2}


@dataclass(frozen=True)
class Way:
    """A strategy: its settings, on how many ranks, and which steps it can take."""

    settings: dict[str, Any] = field(default_factory=dict)
    ranks: int = 2
    steps: tuple[str, ...] = ("observed", "twice", "talking")
    data_ranks: int | None = None
    low: torch.dtype | None = None  # what the plain loop computes in, too
    marks: tuple[Any, ...] = ()


ALL = ("observed", "twice", "in_parts", "talking")
WAYS = {
    "ddp": Way(steps=ALL),
    "ddp_accumulated": Way({"gradient_accumulation_steps": 2}, steps=("twice", "talking")),
    "static_graph": Way({"static_graph": True}, steps=("twice",)),
    "unused": Way({"find_unused_parameters": True}, steps=("in_parts",)),
    "zero1": Way({"zero_stage": 1}, steps=ALL),
    "fsdp": Way({"backend": "fsdp"}, steps=ALL),
    "fsdp_grad_op": Way({"sharding": "grad_op", "gradient_accumulation_steps": 2}, steps=("twice", "in_parts")),
    "fsdp_recomputed": Way({"backend": "fsdp", "activation_checkpointing": True}, steps=("twice",)),
    "tensor": Way({"tensor_parallel": 2}, data_ranks=1, steps=ALL),
    "sequence": Way({"tensor_parallel": 2, "sequence_parallel": True}, data_ranks=1, steps=("twice",)),
    "context": Way({"context_parallel": 2}, data_ranks=1, steps=ALL),
    "pipeline": Way({"pipeline_parallel": 2}, data_ranks=1, steps=("observed", "in_parts", "talking")),
    "bitwise": Way(BITWISE, steps=ALL),
    "deepspeed1": Way({"backend": "deepspeed", "zero_stage": 1}, steps=("observed", "in_parts")),
    "deepspeed2": Way({"backend": "deepspeed", "zero_stage": 2}, steps=("talking",)),
    "deepspeed3": Way({"backend": "deepspeed", "zero_stage": 3}, steps=("observed", "twice", "in_parts", "talking")),
    "horovod": Way({"backend": "horovod"}, steps=("observed", "in_parts", "talking")),
    "bf16": Way({"mixed_precision": "bf16"}, steps=("twice",), low=torch.bfloat16),
    "fp16": Way({"mixed_precision": "fp16", "scaler_init_scale": 1024}, steps=("twice",), low=torch.float16),
    "fsdp_bf16": Way({"backend": "fsdp", "mixed_precision": "bf16"}, steps=("in_parts",), low=torch.bfloat16),
    "ddp3": Way(ranks=3, steps=("observed", "in_parts", "talking")),
    "hybrid": Way({"sharding": "hybrid", "shard_groups": 2}, ranks=4, steps=("in_parts",)),
    "tensor_replicated": Way({"tensor_parallel": 2}, ranks=4, data_ranks=2, steps=("twice",)),
    "pipeline_replicated": Way({"pipeline_parallel": 2}, ranks=4, data_ranks=2, steps=("talking",)),
    "3d": Way(
        {"pipeline_parallel": 2, "tensor_parallel": 2, "backend": "fsdp"},
        ranks=8,
        data_ranks=2,
        steps=("talking",),
        marks=(pytest.mark.soak,),
    ),
}
CASES = [
    pytest.param(way, step, marks=one.marks, id=f"{way}-{step}") for way, one in WAYS.items() for step in one.steps
]


def train_all(ranks: int, folder: str) -> dict[tuple[str, str], Run]:
    """Every way with so many ranks, each in the world that is there."""
    found = {}
    for name, way in WAYS.items():
        if way.ranks != ranks:
            continue
        accumulation = way.settings.get("gradient_accumulation_steps", 1)
        batch = -(-GLOBAL_BATCH // (way.data_ranks or ranks) // accumulation)
        for step in way.steps:
            run = train(STEPS[step], f"{folder}/{name}-{step}", SAMPLES, batch_size=batch, **way.settings)
            found[name, step] = run
    return found


class Trained:
    """What the ways come to; those with one number of ranks share a world."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found: dict[int, dict[tuple[str, str], Run]] = {}

    def of(self, way: str, step: str) -> Run:
        ranks = WAYS[way].ranks
        if ranks not in self._found:
            self._found[ranks] = run_ranks(train_all, ranks, ranks, str(self._folder))[0]
        return self._found[ranks][way, step]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("own"))


@pytest.mark.parametrize(("way", "step"), CASES)
def test_own_step_matches_one_process_on_every_strategy(way: str, step: str, trained: Trained) -> None:
    one = WAYS[way]
    batch = -(-GLOBAL_BATCH // (one.data_ranks or one.ranks)) * (one.data_ranks or one.ranks)
    wanted = by_hand(BY_HAND[step], samples=SAMPLES, batch=batch, low=one.low)
    assert_same(trained.of(way, step), wanted, 2e-6 if one.low is None else 2e-2)


REFUSED = {
    "fsdp": ({"backend": "fsdp"}, "outside of a forward of the model.s layers, with sharded parameters"),
    "tensor": ({"tensor_parallel": 2}, "outside of a forward of the model.s layers, with tensor_parallel=2"),
    "deepspeed": ({"backend": "deepspeed", "zero_stage": 3}, "outside of a forward of the model.s layers, with zero_"),
}


def refused_in_turn(folder: str) -> dict[str, str]:
    """All ranks are refused alike, so that the world stays whole for the next."""
    told = {}
    for name, (settings, _) in REFUSED.items():
        try:
            train(penalized, f"{folder}/{name}", SAMPLES, batch_size=4, **settings)
        except TaskError as refused:
            told[name] = str(refused)
    return told


def test_penalty_on_parts_of_parameters_is_refused(tmp_path: Path) -> None:
    told = run_ranks(refused_in_turn, 2, str(tmp_path))
    for name, (_, wanted) in REFUSED.items():
        for rank in told:
            with pytest.raises(TaskError, match=wanted):
                raise TaskError(rank[name])


@pytest.mark.parametrize(
    ("step", "told"),
    [(twice, "the step calls the model twice, with pipeline_parallel=2"), (penalized, "with pipeline_parallel=2")],
    ids=["twice", "penalized"],
)
def test_step_that_a_pipeline_cannot_take_is_refused(step: Any, told: str, tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match=told):
        train(step, str(tmp_path), SAMPLES, num_gpus=2, batch_size=8, pipeline_parallel=2)
