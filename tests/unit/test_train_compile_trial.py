"""Compiled or as written: what is tried when, what comes of it, and that a checkpoint holds it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from distributed.core.env import WorkerEnv
from distributed.data.loading.loader import Microbatch
from distributed.runtime.session import Session
from distributed.strategies.base import StepOutput
from distributed.strategies.model.compiled_call import AS_WRITTEN, COMPILED, CompiledCall
from distributed.train.capture.compile_trial import CompileTrial

LAST = 44  # the step after which it is decided


class Run:
    """Steps that sleep, by the length of their batch, for longer in one of the two ways."""

    def __init__(self, slow: str, begins_at: int = 0, choice: str = "", module: nn.Module | None = None) -> None:
        self.module = module or nn.ReLU()
        self.module.compile(backend="eager")
        self.compiled = self.module._compiled_call_impl
        self.call = CompiledCall(self.module, least=2)
        self.slow, self.done, self.ways, self.told, self.settled = slow, begins_at, [], [], 0  # type: ignore[var-annotated]
        if choice:
            self.call.choose(choice)
        session = Session.open(WorkerEnv(), device="cpu", collectives="gloo", timeout_s=60)
        self.trial = CompileTrial(
            self.call,
            session,
            train_step=self.step,
            then=self.then,
            steps_done=lambda: self.done,
            tell=self.told.append,
        )

    def then(self) -> Callable[..., StepOutput]:
        self.settled = self.done
        return self.step

    def step(self, microbatches: Sequence[Microbatch], *, measure: bool) -> StepOutput:
        way = COMPILED if self.module._compiled_call_impl is self.compiled else AS_WRITTEN
        self.ways.append(way)
        self.module(microbatches[0].batch[0])
        if self.settled == 0 and self.done >= 16:
            time.sleep((3 if way == self.slow else 1) * len(microbatches[0].batch[0]) / 2000)
        return StepOutput(0.0, None, None)

    def take(self, steps: int, lengths: int = 24) -> None:
        for _ in range(steps):
            length = 2 + self.done * 7 % lengths
            self.trial.train_step([Microbatch((torch.zeros(length),), 1.0, 2)], measure=False)
            self.done += 1


@pytest.mark.parametrize(("slow", "chosen"), [(COMPILED, AS_WRITTEN), (AS_WRITTEN, COMPILED)])
def test_faster_of_compiled_and_eager_is_kept_and_reported(slow: str, chosen: str) -> None:
    run = Run(slow)
    run.take(LAST + 4)
    assert run.call.choice == chosen
    assert set(run.ways[LAST:]) == {chosen}
    assert set(run.ways[:16]) == {COMPILED}
    assert run.settled == LAST
    assert len(run.told) == 1
    assert "[compile]" in run.told[0]


def test_few_shapes_start_no_compile_trial() -> None:
    run = Run(COMPILED)
    run.take(20, lengths=3)
    assert run.call.choice == ""
    assert set(run.ways) == {COMPILED}
    assert not run.told


def test_resumed_run_keeps_the_compile_choice_per_step() -> None:
    whole = Run(COMPILED)
    whole.take(30)
    resumed = Run(COMPILED, begins_at=30, choice=whole.call.choice)
    whole.take(20)
    resumed.take(20)
    assert resumed.ways == whole.ways[30:]
    later = Run(AS_WRITTEN, begins_at=50, choice=whole.call.choice)
    later.take(3)
    assert set(later.ways) == {AS_WRITTEN}


class Special(nn.Module):
    """A size of it ends in Python, which torch can only compile for one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * {length: 1.0 + length for length in range(64)}[len(x)]


def test_model_recompiled_for_each_shape_falls_back_to_eager() -> None:
    run = Run(COMPILED, module=Special())
    run.take(20)
    assert run.call.choice == AS_WRITTEN
    assert run.ways == [COMPILED] * 4 + [AS_WRITTEN] * 16
    assert "for each of them" in run.told[0]
