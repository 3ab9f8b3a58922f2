"""Fused optimizers: the same steps, whoever made the optimizer, and the user's own as it was afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from distributed.core.env import WorkerEnv
from distributed.core.plan import BatchPlan, OptimizerPlan, Plan, SpeedPlan
from distributed.data.loading.loader import Microbatch
from distributed.runtime.session import Session
from distributed.strategies.replicated import Replicated
from distributed.strategies.speed.fused import fuse, why_not_fused
from distributed.train.task import Task

MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, nesterov=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
}


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def take_steps(module: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        nn.functional.cross_entropy(module(torch.randn(4, 8)), torch.tensor([0, 1, 2, 0])).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", MAKERS)
def test_fused_steps_match_also_from_an_existing_state(kind: str) -> None:
    plain, fused = model(), model()
    ours, theirs = MAKERS[kind](fused.parameters()), MAKERS[kind](plain.parameters())
    take_steps(plain, theirs, range(6))
    take_steps(fused, ours, range(2))
    assert why_not_fused(ours, fused) == ""
    undo = fuse(ours)
    take_steps(fused, ours, range(2, 4))
    undo()
    assert all(group["fused"] is None for group in ours.param_groups)
    assert not hasattr(ours, "_step_supports_amp_scaling")
    take_steps(fused, ours, range(4, 6))
    for a, b in zip(fused.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


class Own(torch.optim.AdamW):
    """It may step in a way of its own."""


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda parameters: torch.optim.RMSprop(parameters), "torch has no fused RMSprop"),
        (lambda parameters: torch.optim.AdamW(parameters, foreach=True), "foreach=True"),
        (lambda parameters: torch.optim.AdamW(parameters, foreach=False), "foreach=False"),
        (lambda parameters: torch.optim.AdamW(parameters, fused=False), "fused=False"),
        (lambda parameters: torch.optim.SGD(parameters, differentiable=True), "differentiable=True"),
        (lambda parameters: torch.optim.AdamW(parameters, capturable=True), "capturable=True"),
        (
            lambda ps: torch.optim.AdamW([{"params": ps[:1]}, {"params": ps[1:], "capturable": True}]),
            "capturable=True",
        ),
        (lambda parameters: torch.optim.SGD(parameters, momentum=0.9, dampening=0.1), "dampening"),
        (lambda parameters: Own(parameters), "torch has no fused Own"),
    ],
)
def test_unfusable_optimizer_is_kept_with_a_reason(make: Callable[[Any], Any], why: str) -> None:
    module = model()
    optimizer = make(list(module.parameters()))
    before = [dict(group) for group in optimizer.param_groups]
    strategy = begun(module, optimizer)
    assert [dict(group) for group in optimizer.param_groups] == before
    (decision,) = strategy.decisions
    assert decision.choice == f"{type(optimizer).__name__} not fused"
    assert why in decision.reason
    strategy.close()


def test_optimizer_fused_by_the_user_stays_fused() -> None:
    module = model()
    strategy = begun(module, torch.optim.AdamW(module.parameters(), fused=True))
    assert not strategy.decisions
    strategy.close()
    assert all(group["fused"] for group in strategy.optimizer.param_groups)


def test_optimizer_with_sparse_gradients_is_not_fused() -> None:
    module = nn.Embedding(4, 2, sparse=True)
    assert "sparse" in why_not_fused(torch.optim.SGD(module.parameters(), lr=0.1), module)


def begun(module: nn.Module, optimizer: Any) -> Replicated:
    session = Session.open(WorkerEnv(), device="cpu", collectives="gloo", timeout_s=60)
    plan = Plan(
        run_dir="", batch=BatchPlan(4), optimizer=OptimizerPlan(clip_norm=1.0), speed=SpeedPlan(fused_optimizer=True)
    )
    strategy = Replicated(plan)
    strategy.setup(Task(module, optimizer=optimizer), session)
    return strategy


@pytest.mark.parametrize("whose", ["ours", "factory", "instance"])
def test_any_optimizer_is_fused_for_the_run_and_restored(whose: str) -> None:
    module = model()
    given = {"ours": None, "factory": MAKERS["adamw"], "instance": MAKERS["adamw"](module.parameters())}[whose]
    strategy = begun(module, given)
    assert not strategy.decisions
    micro = Microbatch((torch.randn(4, 8), torch.tensor([0, 1, 2, 0])), 1.0, 4)
    first, *_, last = [float(strategy.train_step([micro]).loss) for _ in range(20)]
    assert last < first
    assert all(group["fused"] for group in strategy.optimizer.param_groups)
    strategy.load_state(strategy.state())
    assert all(group["fused"] for group in strategy.optimizer.param_groups)
    strategy.close()
    assert all(group["fused"] is None for group in strategy.optimizer.param_groups)


@pytest.mark.parametrize("overflow", [0, 2])  # in the first step there is no momentum yet
@pytest.mark.parametrize("kind", MAKERS)
def test_fused_kernel_unscales_and_skips_overflow_steps(kind: str, overflow: int) -> None:
    """A GradScaler then leaves to the kernel both the division and the steps that are left out after an overflow."""
    module, plain = model(), model()
    ours, theirs = MAKERS[kind](module.parameters()), MAKERS[kind](plain.parameters())
    fuse(ours)
    x, y = torch.randn(4, 8), torch.tensor([0, 1, 2, 0])
    for each, optimizer in ((module, ours), (plain, theirs)):
        scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
        for step in range(4):
            scale = float("inf") if step == overflow else 1.0
            scaler.scale(nn.functional.cross_entropy(each(x), y) * scale).backward()
            if step == 1:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(each.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    for a, b in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        assert a.isfinite().all()
