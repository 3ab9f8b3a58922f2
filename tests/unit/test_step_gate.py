"""A step behind an aborted collective changes nothing, and what the host had counted for it is taken back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from distributed.core.env import WorkerEnv
from distributed.core.plan import BatchPlan, Plan, SchedulePlan, SpeedPlan
from distributed.data.loading.loader import Microbatch
from distributed.runtime.session import Session
from distributed.runtime.step_gate import StepGate
from distributed.strategies.replicated import Replicated
from distributed.strategies.speed.fused import fuse, is_fused
from distributed.train.resume.proven import Proven
from distributed.train.schedule import make_schedule
from distributed.train.task import Task

KINDS: dict[str, Any] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=0.1, amsgrad=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "nesterov": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
}


def model_and_optimizer(kind: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer = KINDS[kind](model.parameters())
    fuse(optimizer)
    assert is_fused(optimizer)
    return model, optimizer


def take_step(model: nn.Module, optimizer: Any, gate: StepGate | None, *, gradient: float | None = None) -> None:
    model(torch.ones(3, 4)).square().sum().backward()
    if gradient is not None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.fill_(gradient)
    if gate is not None:
        gate.latch()
    optimizer.step()
    optimizer.zero_grad()


def everything(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    held = [value for state in optimizer.state.values() for value in state.values()]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *held) if isinstance(tensor, torch.Tensor)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("garbage", [float("nan"), 1e30, 0.0])
def test_closed_gate_changes_no_parameter_or_state(kind: str, garbage: float) -> None:
    model, optimizer = model_and_optimizer(kind)
    gate = StepGate(torch.device("cpu"))
    optimizer.found_inf = gate.latch_tensor
    for _ in range(3):
        take_step(model, optimizer, gate)
    before = everything(model, optimizer)
    gate.close()
    for _ in range(2):
        take_step(model, optimizer, gate, gradient=garbage)
    after = everything(model, optimizer)
    assert len(before) == len(after)
    assert all(map(torch.equal, before, after))
    assert gate.steps() == 3


@pytest.mark.parametrize("kind", KINDS)
def test_open_gate_takes_the_same_steps_as_no_gate(kind: str) -> None:
    model, optimizer = model_and_optimizer(kind)
    plain, plain_optimizer = model_and_optimizer(kind)
    gate = StepGate(torch.device("cpu"))
    optimizer.found_inf = gate.latch_tensor
    for _ in range(4):
        take_step(model, optimizer, gate)
        take_step(plain, plain_optimizer, None)
    assert all(map(torch.equal, everything(model, optimizer), everything(plain, plain_optimizer)))


def test_gate_closed_after_latch_still_takes_the_step() -> None:
    """All kernels of one step must find the same."""
    model, optimizer = model_and_optimizer("adamw")
    gate = StepGate(torch.device("cpu"))
    optimizer.found_inf = gate.latch_tensor
    before = everything(model, optimizer)
    gate.latch()
    gate.close()
    model(torch.ones(3, 4)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(before[0], everything(model, optimizer)[0])
    assert gate.steps() == 1


@pytest.mark.parametrize("taken", [0, 1, 4])
@pytest.mark.parametrize(
    "scheduler",
    [
        None,
        lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=20),
    ],
)
def test_schedule_rewinds_to_the_step_of_the_device(taken: int, scheduler: Any) -> None:
    def begin() -> tuple[Any, Any]:
        _, optimizer = model_and_optimizer("momentum")
        plan = SchedulePlan(kind="cosine") if scheduler is None else SchedulePlan(interval="step")
        return optimizer, make_schedule(scheduler, plan, optimizer, 20, 20)

    def options(optimizer: Any) -> list[dict[str, Any]]:
        return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]

    optimizer, schedule = begin()
    gate = StepGate(torch.device("cpu"))
    proven = Proven(gate, schedule, optimizer)
    for step in range(1, 4):
        schedule.step_ended(step)
    proven.mark(3)
    for step in range(4, 8):
        if step > 3 + taken:
            gate.close()
        gate.latch()
        schedule.step_ended(step)
    assert proven.steps_behind(7) == 4 - taken
    proven.go_back(3 + taken)

    expected_optimizer, expected = begin()
    for step in range(1, 4 + taken):
        expected.step_ended(step)
    assert options(optimizer) == options(expected_optimizer)
    assert schedule.state() == expected.state()


def test_device_ahead_of_the_host_is_not_rewound() -> None:
    optimizer = model_and_optimizer("adamw")[1]
    gate = StepGate(torch.device("cpu"))
    proven = Proven(gate, make_schedule(None, SchedulePlan(), optimizer, 5, 5), optimizer)
    proven.mark(0)
    gate.latch()
    assert proven.steps_behind(0) is None


class Averaging(nn.Module):
    """Keeps an average of what it has seen, in place or in a new tensor."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.layer, self.in_place = nn.Linear(4, 1), in_place
        self.register_buffer("average", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        average = 0.5 * self.average + x.detach().mean()
        if self.in_place:
            self.average.copy_(average)
        else:
            self.average = average
        return self.layer(x).squeeze(1)


class Counting(Averaging):
    """Counts its calls in Python."""

    def get_extra_state(self) -> int:
        return 1

    def set_extra_state(self, state: int) -> None:
        pass


def gated(module: nn.Module, optimizer: Any, loss: nn.Module | None = None) -> tuple[Replicated, StepGate]:
    """A strategy in a world that it survives; on a CPU, the device is never behind the host's last call."""
    session = Session.open(WorkerEnv(), device="cpu", collectives="gloo", timeout_s=60)
    session.gate = gate = StepGate(session.device)
    session.can_regroup = True
    strategy = Replicated(Plan(run_dir="", batch=BatchPlan(4), speed=SpeedPlan(fused_optimizer=True)))
    strategy.setup(Task(module, optimizer=optimizer, loss_fn=loss or nn.MSELoss()), session)
    return strategy, gate


def step_on(strategy: Replicated, steps: int, first: int = 0) -> None:
    for number in range(first, first + steps):
        strategy.train_step([Microbatch((torch.full((4, 4), float(number)), torch.ones(4)), 1.0, 4)])


@pytest.mark.parametrize(
    ("in_place", "behind", "is_held"), [(True, 1, True), (True, 4, True), (False, 1, True), (False, 2, False)]
)
def test_buffers_of_steps_not_taken_are_not_held(in_place: bool, behind: int, is_held: bool) -> None:
    module = Averaging(in_place=in_place)
    strategy, gate = gated(module, torch.optim.AdamW(module.parameters()))
    step_on(strategy, 3)
    average = module.average.clone()
    gate.close()
    step_on(strategy, behind, first=3)
    assert gate.find_behind(3 + behind) == behind
    held = strategy.held_state()
    assert (held is not None) is is_held
    if held is not None:
        assert torch.equal(held["model"]["average"], average)


def test_extra_state_of_steps_not_taken_is_not_held() -> None:
    module = Counting(in_place=True)
    strategy, gate = gated(module, torch.optim.AdamW(module.parameters()))
    step_on(strategy, 2)
    gate.find_behind(2)
    assert strategy.held_state() is not None
    gate.close()
    step_on(strategy, 1)
    gate.find_behind(3)
    assert strategy.held_state() is None


class CountingLoss(nn.MSELoss):
    """Counts its calls in Python, and saves the count."""

    def get_extra_state(self) -> int:
        return 1

    def set_extra_state(self, state: int) -> None:
        pass


@pytest.mark.parametrize("counts", ["model", "loss"])
def test_extra_state_of_an_interrupted_call_is_not_held(counts: str) -> None:
    module = Counting(in_place=True) if counts == "model" else Averaging(in_place=True)
    loss = CountingLoss() if counts == "loss" else nn.MSELoss()
    strategy, gate = gated(module, torch.optim.AdamW(module.parameters()), loss)
    step_on(strategy, 2)
    gate.find_behind(2)
    assert strategy.held_state() is not None
    strategy._begin_step()
    assert strategy.held_state() is None
    step_on(strategy, 1)
    gate.find_behind(3)
    assert strategy.held_state() is not None
    strategy.train(False)
    assert strategy.held_state() is None


def hook_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.register_step_post_hook(lambda *_: None)


def hook_parameter(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    next(module.parameters()).register_hook(lambda gradient: gradient.clamp(-1, 1))


@pytest.mark.parametrize("hook", [hook_optimizer, hook_parameter])
def test_state_is_not_held_where_hooks_may_change_it(hook: Any) -> None:
    module = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
    optimizer = torch.optim.AdamW(module.parameters())
    hook(module, optimizer)
    strategy, _ = gated(module, optimizer)
    step_on(strategy, 1)
    assert strategy.held_state() is None


@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_first_step_not_taken_leaves_no_arbitrary_momentum(dampening: float) -> None:
    module = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, dampening=dampening, fused=True)
    strategy, gate = gated(module, optimizer)
    gate.close()
    step_on(strategy, 1)
    gate.find_behind(1)
    held = strategy.held_state()
    if dampening:
        assert held is None
    else:
        assert not any(state["momentum_buffer"].any() for state in optimizer.state.values())


def test_buffers_of_a_skipped_step_that_raises_are_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an abort left of its targets was refused, so that the host has not counted it."""
    module = Averaging(in_place=True)
    strategy, gate = gated(module, torch.optim.AdamW(module.parameters()))
    step_on(strategy, 3)
    average = module.average.clone()
    gate.close()

    def refuse() -> None:
        raise ValueError("a target is out of range")

    monkeypatch.setattr(strategy._task, "check_targets", refuse)
    with pytest.raises(ValueError, match="target"):
        strategy.train_step([Microbatch((torch.ones(4, 4), torch.ones(4)), 1.0, 4)], measure=True)
    assert gate.find_behind(3) == 0
    held = strategy.held_state()
    assert held is not None
    assert torch.equal(held["model"]["average"], average)
