"""Tasks with steps and optimizers of their own: what they may return, what is refused, and what is put together."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from distributed import DistributedError, OptimizerSetup, Task, Trainer
from distributed.core.plan import BatchPlan, Plan
from distributed.core.registry import load_target
from distributed.strategies.joint_optimizer import JointOptimizer
from distributed.strategies.replicated import Replicated
from distributed.train.checks.reachable import changes, look
from distributed.train.schedule import make_schedule

DATA = TensorDataset(torch.randn(8, 3), torch.randn(8, 2))


def make() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {"one": nn.Linear(3, 3), "two": nn.Linear(3, 2)}


def both(model: Any, batch: Any) -> torch.Tensor:
    return F.mse_loss(model["two"](model["one"](batch[0])), batch[1])


def each(model: Any, batch: Any, optimizer: str) -> torch.Tensor:
    return both(model, batch)


def sgd(part: nn.Module, **options: Any) -> OptimizerSetup:
    return OptimizerSetup(torch.optim.SGD(part.parameters(), lr=0.1), **options)


def all_of(**options: Any) -> Callable[[Any], dict[str, Any]]:
    return lambda model: {"one": sgd(model["one"], **options), "two": sgd(model["two"])}


def fit(folder: Path, task: Any = None, validates: bool = False, **given: Any) -> Any:
    settings = {"num_gpus": 1, "batch_size": 4, "progress": False, "run_dir": str(folder), "device": "cpu"}
    trainer = Trainer(make() if task is None else task, **settings | given)
    return trainer.fit(DATA, DATA if validates else None)


def returning(value: Any) -> Callable[[Any, Any], Any]:
    return lambda model, batch: value(both(model, batch)) if callable(value) else value


@pytest.mark.parametrize(
    ("step", "told"),
    [
        (returning(None), "returned a NoneType"),
        (returning("0.5"), "returned a str"),
        (returning(lambda loss: torch.stack([loss, loss])), r"returned a tensor of shape \[2\]"),
        (returning(lambda loss: {"logits": loss}), "returned a dict with logits"),
        (returning(lambda loss: (loss, loss, loss)), "returned a tuple"),
        (returning(lambda loss: loss.detach()), "the loss that <lambda> returned has no gradient"),
        (returning(0.5), "the loss that <lambda> returned has no gradient"),
        (returning(lambda loss: {"loss": loss, "big": [1, 2]}), r"log\('big', …\) got a list"),
        (returning(lambda loss: {"loss": loss, "val_x": 1}), "a logged value cannot be called 'val_x'"),
    ],
)
def test_wrong_return_of_a_step_is_refused(step: Any, told: str, tmp_path: Path) -> None:
    with pytest.raises(DistributedError, match=told):
        fit(tmp_path, training_step=step)


def shared(model: Any) -> dict[str, Any]:
    return {"one": sgd(model), "two": sgd(model["two"])}


def frozen(model: Any) -> dict[str, Any]:
    model["two"].requires_grad_(False)
    return all_of()(model)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "shared": ({"configure_optimizers": shared}, "'one' and 'two' share 2 parameters"),
    "left": ({"configure_optimizers": lambda model: {"one": sgd(model["one"])}}, "in no optimizer: two.weight, two.bi"),
    "frozen": ({"configure_optimizers": frozen}, "'two' has no parameter that requires a gradient"),
    "foreign": ({"configure_optimizers": lambda model: {"one": sgd(nn.Linear(1, 1))}}, "not over this model's param"),
    "list": ({"configure_optimizers": lambda model: [sgd(model)]}, "configure_optimizers returned a list"),
    "nothing": ({"configure_optimizers": lambda model: {}}, "configure_optimizers returned a dict"),
    "kind": ({"configure_optimizers": lambda model: {"one": "adam"}}, "under 'one', returned a str"),
    "name": ({"configure_optimizers": lambda model: {"a b": sgd(model)}}, "cannot be called 'a b'"),
    "every": ({"configure_optimizers": all_of(every=0)}, "every=0 of 'one'"),
    "clipping": ({"configure_optimizers": all_of(gradient_clipping=-1.0)}, "gradient_clipping=-1.0 of 'one'"),
    "interval": ({"configure_optimizers": all_of(scheduler_interval="day")}, "scheduler_interval='day' of 'one'"),
    "unnamed": ({"configure_optimizers": lambda model: torch.optim.SGD(model.parameters())}, "one without a name"),
    "schedulers": (
        {"configure_optimizers": all_of(), "scheduler": lambda o: torch.optim.lr_scheduler.StepLR(o, 1)},
        "there are several optimizers",
    ),
    "two_schedules": (
        {
            "configure_optimizers": all_of(scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1)),
            "lr_schedule": "cosine",
        },
        "lr_schedule/warmup settings are given",
    ),
    "none": ({}, "there is no configure_optimizers"),
    "dict": ({"optimizer": {"one": 1}}, "optimizer is a dict of 1"),
    "twice": ({"configure_optimizers": all_of(), "optimizer": torch.optim.SGD}, "both optimizer and configure_opt"),
    "zero1": ({"configure_optimizers": all_of(), "zero_stage": 1, "num_gpus": 2}, "several optimizers with zero_stage"),
    "bitwise": (
        {"configure_optimizers": all_of(), "reproducible": "bitwise"},
        "several optimizers with reproducible='bitwise'",
    ),
    "tensor": (
        {"configure_optimizers": all_of(), "tensor_parallel": 2, "num_gpus": 2},
        "several optimizers with tensor",
    ),
    "horovod": ({"configure_optimizers": all_of(), "backend": "horovod"}, "with backend='horovod'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_that_do_not_fit_are_refused(name: str, tmp_path: Path) -> None:
    given, told = REFUSED[name]
    with pytest.raises(DistributedError, match=told):
        fit(tmp_path, training_step=each, **given)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"every": 2}, "every=2 of 'one', which has no phase"),
        ({"gradient_clipping": 1.0}, "gradient is that of one loss"),
    ],
)
def test_options_of_a_phase_without_phases_are_refused(options: Any, told: str, tmp_path: Path) -> None:
    with pytest.raises(DistributedError, match=told):
        fit(tmp_path, training_step=both, configure_optimizers=all_of(**options))


def test_phase_without_a_gradient_is_refused_by_its_name(tmp_path: Path) -> None:
    def step(model: Any, batch: Any, optimizer: str) -> torch.Tensor:
        return F.mse_loss(model["two"](batch[0]), batch[1])

    with pytest.raises(DistributedError, match=r"step\(…, 'one'\) returned has no gradient"):
        fit(tmp_path, training_step=step, configure_optimizers=all_of())


class Manual(Task):
    manual_optimization = True
    calls: tuple[Any, ...] = ()

    def configure_optimizers(self, model: Any) -> Any:
        return all_of()(model)

    def training_step(self, model: Any, batch: Any) -> Any:
        loss = both(model, batch)
        given = {"loss": loss, "detached": loss.detach(), "vector": torch.stack([loss, loss])}
        for name, *more in self.calls:
            getattr(self, name)(*(given.get(one, one) for one in more))

    def state(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(
    ("calls", "told"),
    [
        ([("backward", "loss"), ("step", "three")], r"self.step\('three'\), and there is no optimizer of this name"),
        ([("zero_grad", "three")], r"self.zero_grad\('three'\)"),
        ([("step", "one")], r"self.step\('one'\), and none of its parameters has a gradient"),
        ([("backward", "detached")], "that requires no gradient"),
        ([("backward", "vector")], r"self.backward got a tensor of shape \[2\]"),
        ([("backward", "loss"), ("step", "one")], r"self.step\('one'\) without self.zero_grad\('one'\) in this batch"),
    ],
)
def test_wrong_call_in_a_manual_step_is_refused(calls: Any, told: str, tmp_path: Path) -> None:
    task = Manual(make())
    task.calls = tuple(calls)
    with pytest.raises(DistributedError, match=told):
        fit(tmp_path, task)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"gradient_accumulation_steps": 2}, "manual_optimization with gradient_accumulation_steps=2"),
        ({"gradient_accumulation_steps": {0: 1, 1: 3}}, "manual_optimization with gradient_accumulation_steps=3"),
        ({"mixed_precision": "fp16"}, "manual_optimization with mixed_precision='fp16'"),
        ({"zero_stage": 3, "num_gpus": 2}, "manual_optimization with sharded parameters"),
        ({"static_graph": True}, "manual_optimization with static_graph=True"),
        ({"reproducible": "bitwise", "virtual_ranks": 2}, "set reproducible='off'"),
        ({"backend": "deepspeed"}, "manual_optimization of Manual with backend='deepspeed'"),
        ({"validates": True}, "Manual has no validation_step, and there is validation data"),
    ],
)
def test_manual_step_with_a_setting_it_cannot_keep_is_refused(settings: Any, told: str, tmp_path: Path) -> None:
    with pytest.raises(DistributedError, match=told):
        fit(tmp_path, Manual(make()), **settings)


class Twice(Manual):
    """Two steps a batch of one optimizer, which needs no name."""

    def configure_optimizers(self, model: Any) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        return OptimizerSetup(optimizer, scheduler=schedule, scheduler_interval="step", gradient_clipping=0.3)

    def training_step(self, model: Any, batch: Any) -> Any:
        for _ in range(2):
            self.zero_grad()
            self.backward(both(model, batch))
            self.step()


def test_setup_of_a_single_optimizer_holds_in_a_manual_step(tmp_path: Path) -> None:
    task = Twice(make())
    settings: dict[str, Any] = {"num_gpus": 1, "batch_size": 4, "progress": False, "device": "cpu", "epochs": 2}
    Trainer(task, run_dir=str(tmp_path), **settings).fit(DataLoader(DATA))
    model = nn.ModuleDict(make())
    setup = Twice(model).configure_optimizers(model)
    for batch in [tuple(t[at : at + 4] for t in DATA.tensors) for _ in range(2) for at in (0, 4)]:
        for _ in range(2):
            setup.optimizer.zero_grad()
            both(model, batch).backward()
            nn.utils.clip_grad_norm_(model.parameters(), setup.gradient_clipping)
            setup.optimizer.step()
        for _ in range(2):
            setup.scheduler.step()
    for name, value in model.state_dict().items():
        assert torch.allclose(value, task.model.state_dict()[name], atol=1e-6), name


def test_call_of_backward_in_an_automatic_step_is_refused(tmp_path: Path) -> None:
    class Automatic(Manual):
        manual_optimization = False

    task = Automatic(make())
    task.calls = (("backward", "loss"),)
    with pytest.raises(DistributedError, match=r"Automatic calls self.*, and no manual step runs"):
        fit(tmp_path, task)


def test_task_without_init_of_its_base_is_refused() -> None:
    class Unready(Task):
        def __init__(self, model: nn.Module) -> None:
            self.model = model

    with pytest.raises(DistributedError, match=r"Unready\.__init__ does not call that of Task"):
        Trainer(Unready(nn.Linear(1, 1)))


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ({"a": 1}, "a.* is a int"),
        ({"a.b": nn.Linear(1, 1)}, "cannot be called a.b"),
        (make(), "parts, and no training_step"),
    ],
)
def test_model_in_parts_that_cannot_be_trained_is_refused(model: Any, told: str, tmp_path: Path) -> None:
    with pytest.raises(DistributedError, match=told):
        Trainer(model, num_gpus=1, batch_size=4, run_dir=str(tmp_path)).fit(DATA)


class Counting(Task):
    steps = 0

    def training_step(self, model: Any, batch: Any) -> torch.Tensor:
        self.steps += 1
        return F.mse_loss(model(batch[0]), batch[1])


class Lazy(Task):
    scale: torch.Tensor | None = None

    def training_step(self, model: Any, batch: Any) -> torch.Tensor:
        if self.scale is None:
            self.scale = torch.ones(2)
        return F.mse_loss(model(batch[0]) * self.scale, batch[1])


def test_task_that_counts_without_a_state_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DistributedError, match=r"what the task keeps between steps: .*task\['steps'\] changes"):
        fit(tmp_path, Counting(nn.Linear(3, 2)))


def test_task_that_makes_something_once_is_trained(tmp_path: Path) -> None:
    assert fit(tmp_path, Lazy(nn.Linear(3, 2))).steps == 2


def test_counting_task_is_seen_as_changing_for_a_capture() -> None:
    """What a CUDA graph would repeat as it was: the attributes of a task, and what its functions read."""
    task = Counting(nn.Linear(3, 2))
    task.steps = 1
    strategy = Replicated(Plan("run", BatchPlan(4)))
    strategy._task, strategy.module = task, task.model
    before = look(strategy.parts())
    task.training_step(task.model, DATA[:4])
    assert changes(before, look(strategy.parts())) == ["it counts in Python: task['steps'] changes"]


def joint(**options: Any) -> tuple[JointOptimizer, nn.ModuleDict]:
    model = nn.ModuleDict(make())
    adam = torch.optim.Adam(model["one"].parameters(), lr=0.1)
    return JointOptimizer({"one": OptimizerSetup(adam, **options), "two": sgd(model["two"], every=2)}), model


def step(optimizer: JointOptimizer, model: nn.ModuleDict) -> None:
    both(model, DATA[:4]).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_joint_optimizer_loads_the_state_of_its_members() -> None:
    """A loaded one goes on as the saved one does: groups and state stay those of the members."""
    (saved, model), (loaded, other) = joint(), joint()
    for _ in range(2):
        step(saved, model)
    loaded.load_state_dict(copy.deepcopy(saved.state_dict()))
    other.load_state_dict(model.state_dict())
    for name, member in loaded.members.items():
        assert member.state is loaded.state
        assert all(any(group is one for one in loaded.param_groups) for group in member.param_groups), name
    for optimizer, one in ((saved, model), (loaded, other)):
        step(optimizer, one)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())


def test_schedulers_follow_the_steps_of_their_own_optimizers() -> None:
    def halved(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    optimizer, model = joint(scheduler=halved, scheduler_interval="step")
    schedule = make_schedule(None, Plan("run", BatchPlan(4)).schedule, optimizer, None, None)
    for number, due in enumerate([("one", "two"), ("two",), ("one",)], 1):
        optimizer.due = due
        step(optimizer, model)
        schedule.step_ended(number)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.025, 0.1])
    other, _ = joint(scheduler=halved, scheduler_interval="step")
    again = make_schedule(None, Plan("run", BatchPlan(4)).schedule, other, None, None)
    again.load_state(schedule.state(), 3)
    assert again.state() == schedule.state()


def test_public_names_are_those_of_the_package() -> None:
    assert load_target("distributed:OptimizerSetup") is OptimizerSetup


class Gpt(nn.Module):
    """As nanoGPT's: with targets it returns its loss, without them the logits of the last position alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        hidden = self.tokens(ids)
        if targets is None:
            return self.head(hidden[:, [-1]]), None
        logits = self.head(hidden)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


def test_model_with_an_argument_for_targets_gets_those_of_a_pair() -> None:
    model, ids = Gpt(), torch.arange(12).view(2, 6) % 9
    targets = torch.where(ids == 3, -1, ids)
    task = Task(model)
    outcome = task.run(model, (ids, targets))
    assert torch.equal(outcome.loss, model(ids, targets)[1])
    assert outcome.outputs.shape == (2, 6, 9)
    assert task.predict(model, (ids, targets)).shape == (2, 1, 9), "a prediction has no targets"
    with pytest.raises(RuntimeError, match="target size"):  # of a loss_fn targets are its matter: the model gets none
        Task(model, loss_fn=lambda outputs, target: F.cross_entropy(outputs[0], target)).run(model, (ids, targets))
