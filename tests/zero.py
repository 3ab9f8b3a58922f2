"""One rank under DeepSpeed or a strategy to compare it with: what the tests of that engine share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from distributed.core.config import DistributedConfig
from distributed.core.engines.engine import load_strategy
from distributed.core.env import WorkerEnv, worker_env
from distributed.core.plan import Plan
from distributed.data.loading.loader import TrainLoader
from distributed.data.source import read_source
from distributed.planner.hardware import Hardware
from distributed.planner.planning import JobProfile, make_plan
from distributed.runtime.session import Session
from distributed.train.schedule import make_schedule
from distributed.train.task import Task
from tests.meshes import load_state, save_state

GLOBAL_BATCH = 8
SAMPLES = 33  # so that the last batch of an epoch has one, and leaves a rank without any

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fsdp": {"backend": "fsdp"},
    "z1": {"backend": "deepspeed", "zero_stage": 1},
    "z2": {"backend": "deepspeed", "zero_stage": 2},
    "z3": {"backend": "deepspeed", "zero_stage": 3},
    "z1_cpu": {"backend": "deepspeed", "zero_stage": 1, "offload_optimizer": "cpu"},
    "z2_cpu": {"backend": "deepspeed", "zero_stage": 2, "offload_optimizer": "cpu"},
    "z3_cpu": {"backend": "deepspeed", "zero_stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"},
    "z2_bf16": {"backend": "deepspeed", "zero_stage": 2, "mixed_precision": "bf16"},
    "z3_bf16": {"backend": "deepspeed", "zero_stage": 3, "mixed_precision": "bf16"},
}


class Tied(nn.Module):
    """Odd sizes, so that no part of a rank ends where a parameter does; tied, frozen, and with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(13, 7)
        self.inner, self.fixed = nn.Linear(7, 11), nn.Linear(11, 7)
        self.norm, self.factor = nn.LayerNorm(7), nn.Parameter(torch.ones(1))
        self.head = nn.Linear(7, 13)
        self.head.weight = self.tokens.weight
        self.fixed.requires_grad_(False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("shift", torch.full((7,), 0.125))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        x = self.tokens(ids)
        x = x + self.fixed(torch.tanh(self.inner(x))) * self.factor
        return self.head(self.norm(x) + self.shift.to(x.dtype)).transpose(1, 2)


def make_tied() -> nn.Module:
    torch.manual_seed(11)
    return Tied()


def make_wide(width: int = 6000) -> nn.Module:
    """Large enough for DeepSpeed to move a rank's half of it to a disk, which it does with no less than 1 MiB."""
    torch.manual_seed(11)
    return nn.Sequential(nn.Embedding(13, 64), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 64), Turned(64))


def make_normed() -> nn.Module:
    torch.manual_seed(11)
    return nn.Sequential(nn.Embedding(13, 8), nn.Linear(8, 8, bias=False), Normed(8), nn.ReLU(), Turned(8))


class Normed(nn.Module):
    """BatchNorm over all positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Turned(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 13)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).transpose(1, 2)


def make_data(ignored: bool = False) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 13, (SAMPLES, 5), generator=generator)
    target = ids.roll(-1, 1)
    if ignored:  # unevenly
        target[torch.arange(5) >= torch.randint(1, 6, (SAMPLES, 1), generator=generator)] = -100
    return TensorDataset(ids, target)


class Rank:
    """One rank with a strategy over a fresh model, as the loop uses it."""

    def __init__(self, kind: str, model: nn.Module, ignored: bool = False, own: Any = None, **more: Any) -> None:
        env = worker_env() or WorkerEnv()
        self.session = Session.open(env, device="cpu", collectives="gloo", timeout_s=60)
        self.plan = plan_for(env, model, **KINDS[kind] | more)
        self.session.take_place(self.plan.mesh)
        task = Task(model, nn.CrossEntropyLoss(), optimizer=own, loss_weighting=self.plan.loss_weighting)
        self.strategy: Any = load_strategy(self.plan.strategy)(self.plan)
        self.strategy.check(task)
        self.strategy.setup(task, self.session)
        source = read_source(make_data(ignored), "data")
        self.loader = TrainLoader(source, self.plan.batch, self.session.data_rank, seed=0)
        total = self.plan.total_steps(self.loader.steps_per_epoch)
        self.schedule = make_schedule(
            None, self.plan.schedule, self.strategy.optimizer, self.loader.steps_per_epoch, total
        )
        self.done = 0

    def steps(self, count: int) -> list[tuple[float, float]]:
        """The next steps; of each the loss over all ranks and the norm of the gradient."""
        return [self._step(microbatches) for microbatches in self._batches(count)]

    def _step(self, microbatches: Any) -> tuple[float, float]:
        found = self.strategy.train_step(microbatches, measure=True)
        self.done += 1
        self.schedule.step_ended(self.done)
        total = self.session.sum("loss", torch.tensor([float(found.loss), 1.0]))
        return (total[0] / total[1]).item(), float(found.gradient_norm)

    def _batches(self, count: int) -> Iterator[Any]:
        per_epoch = self.loader.steps_per_epoch
        assert per_epoch is not None
        for number in range(self.done, self.done + count):
            epoch, at = divmod(number, per_epoch)
            yield next(iter(self.loader.epoch(epoch, at)))[0]

    def save(self, folder: str, step: int) -> None:
        save_state(self.strategy, self.session, folder, step)

    def load(self, folder: str) -> None:
        restored = load_state(self.strategy, self.session, folder)
        assert not restored.report.unexpected
        self.done = restored.step


def plan_for(env: WorkerEnv, model: nn.Module, **settings: Any) -> Plan:
    accumulation = settings.get("gradient_accumulation_steps", 1)
    options = {"num_gpus": env.world_size, "batch_size": GLOBAL_BATCH // env.world_size // accumulation, "epochs": 5}
    config = DistributedConfig(**options | {"learning_rate": 0.01} | settings)
    profile = JobProfile(
        samples=SAMPLES,
        parameters=sum(p.numel() for p in model.parameters()),
        has_batchnorm=any(isinstance(module, nn.BatchNorm1d) for module in model.modules()),
    )
    return make_plan(config, profile, Hardware(cpu_cores=2), run_dir="unused", world=env)


class WithUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.unused = make_tied(), nn.Parameter(torch.ones(5))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.inner(ids)


def train_unused(kind: str, folder: str, steps: int, source: str = "") -> None:
    """A model with a parameter that has no gradient, and an optimizer that has groups and no state."""

    def two_groups(parameters: Any) -> torch.optim.Optimizer:
        first, *rest = parameters
        return torch.optim.SGD([{"params": [first], "lr": 0.05}, {"params": rest}], lr=0.1)

    rank = Rank(kind, WithUnused(), own=two_groups)
    if source:
        rank.load(source)
    rank.steps(steps)
    rank.save(folder, rank.done)
    rank.strategy.close()
