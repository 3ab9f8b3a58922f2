"""LARS and LAMB step by norms of whole parameters: a reference in float64 on one process, and every mesh after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from distributed import Trainer
from distributed.checkpoint.restore.reading import load
from distributed.core.config import DistributedConfig
from distributed.core.errors import PlanError, TaskError
from distributed.optimizers import LAMB, LARS
from distributed.planner.hardware import Hardware
from distributed.planner.planning import JobProfile, make_plan
from distributed.strategies.checks.elementwise import why_not_cut
from distributed.testing import run_ranks

SAMPLES, GLOBAL_BATCH = 24, 8
LAMB_OPTIONS: dict[str, Any] = {"lr": 0.02, "betas": (0.8, 0.95), "weight_decay": 0.1}
LARS_OPTIONS: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.05, "trust": 1.0}


class Reference:
    """The formulas of both papers, for one parameter after the other."""

    def __init__(self, kind: str, parameters: Iterable[nn.Parameter], **options: Any) -> None:
        self.kind, self.parameters = kind, list(parameters)
        self.options = {"eps": 1e-6, "nesterov": False, "skip_vectors": True} | options
        self.state: dict[int, dict[str, torch.Tensor]] = {}
        self.steps = 0

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.copy_(self.stepped(parameter.double(), parameter.grad.double(), id(parameter)))

    def stepped(self, w: torch.Tensor, g: torch.Tensor, key: int) -> torch.Tensor:
        o, held = self.options, self.state.setdefault(key, {})
        is_adapted = w.dim() > 1 or not o["skip_vectors"]
        decay = o["weight_decay"] if is_adapted else 0.0
        if self.kind == "lars":
            rate = 1.0
            if is_adapted and float(w.norm()) and float(g.norm()):
                rate = float(o["trust"] * w.norm() / (g.norm() + decay * w.norm() + 1e-8))
            d = rate * (g + decay * w)
            held["v"] = o["momentum"] * held.get("v", torch.zeros_like(w)) + d
            return w - o["lr"] * (d + o["momentum"] * held["v"] if o["nesterov"] else held["v"])
        (b1, b2), t = o["betas"], self.steps
        held["m"] = b1 * held.get("m", torch.zeros_like(w)) + (1 - b1) * g
        held["s"] = b2 * held.get("s", torch.zeros_like(w)) + (1 - b2) * g * g
        u = held["m"] / (1 - b1**t) / ((held["s"] / (1 - b2**t)).sqrt() + o["eps"]) + decay * w
        ratio = float(w.norm() / u.norm()) if is_adapted and float(w.norm()) and float(u.norm()) else 1.0
        return w - o["lr"] * ratio * u


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(5, 6), nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.relu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(5), FeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class Net(nn.Module):
    """With rows that two ranks do not share evenly, fewer rows than ranks, and a layer of zeros."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.entry, self.blocks, self.head = nn.Linear(3, 5), nn.ModuleList([Block(), Block()]), nn.Linear(5, 1)
        nn.init.zeros_(self.head.weight)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(SAMPLES, width, generator=generator, dtype=torch.float64) for width in (3, 1))
    return TensorDataset(x, y)


def by_hand(make: Callable[[nn.Module], Any], *, batch: int = GLOBAL_BATCH, epochs: int = 2) -> dict[str, torch.Tensor]:
    model, (x, y) = Net(), make_data().tensors
    optimizer = make(model)
    for at in [*range(0, SAMPLES, batch)] * epochs:
        model.zero_grad()
        nn.functional.mse_loss(model(x[at : at + batch]), y[at : at + batch]).backward()
        optimizer.step()
    return model.state_dict()


def references(kind: str, **options: Any) -> Callable[[nn.Module], Any]:
    return lambda model: Reference(kind, model.parameters(), **options)


def differ(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


@pytest.mark.parametrize(
    ("kind", "make", "options"),
    [
        ("lamb", LAMB, LAMB_OPTIONS),
        ("lamb", LAMB, LAMB_OPTIONS | {"skip_vectors": False, "weight_decay": 0.0}),
        ("lars", LARS, LARS_OPTIONS),
        ("lars", LARS, LARS_OPTIONS | {"nesterov": True, "skip_vectors": False}),
        ("lars", LARS, LARS_OPTIONS | {"momentum": 0.0}),
    ],
)
def test_optimizer_follows_the_formulas_of_its_paper(kind: str, make: Any, options: dict[str, Any]) -> None:
    expected = by_hand(references(kind, **options))
    assert differ(by_hand(lambda model: make(model.parameters(), **options)), expected) < 1e-14
    groups = by_hand(lambda model: make([{"params": [p]} for p in model.parameters()], **options))
    assert differ(groups, expected) < 1e-14


MESHES: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "ddp": {},
        "accumulated": {"gradient_accumulation_steps": 2},
        "fsdp": {"backend": "fsdp"},
        "grad_op": {"backend": "fsdp", "sharding": "grad_op"},
        "zero1": {"zero_stage": 1},
        "tp": {"tensor_parallel": 2},
        "pp": {"pipeline_parallel": 2},
        "bitwise": {"reproducible": "bitwise", "virtual_ranks": 2},
        "horovod": {"backend": "horovod"},
    },
    3: {"fsdp": {"backend": "fsdp"}, "zero1": {"zero_stage": 1}},  # in global batches of six
    4: {
        "hybrid": {"sharding": "hybrid", "shard_groups": 2},
        "fsdp_tp": {"backend": "fsdp", "tensor_parallel": 2},
        "zero1_tp": {"zero_stage": 1, "tensor_parallel": 2},
        "pp_tp": {"pipeline_parallel": 2, "tensor_parallel": 2},
    },
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "lamb": lambda parameters: LAMB(parameters, **LAMB_OPTIONS),
    "lars": lambda parameters: LARS(parameters, **LARS_OPTIONS),
}


def train(kind: str, ranks: int, settings: dict[str, Any], folder: str, **more: Any) -> str:
    shared = settings.get("tensor_parallel", 1) * settings.get("pipeline_parallel", 1)
    size = GLOBAL_BATCH * shared // ranks // settings.get("gradient_accumulation_steps", 1)
    how = {"num_gpus": ranks, "batch_size": size, "epochs": 2, "progress": False, "device": "cpu", "run_dir": folder}
    trainer = Trainer(Net(), loss_fn=nn.MSELoss(), optimizer=OPTIMIZERS[kind], **how | settings | more)
    return trainer.fit(make_data()).checkpoint


# LARS and LAMB get their norms from the same sums, so each mesh trains one of them, and the simplest both.
OF_LARS = ("ddp", "fsdp", "tp", "zero1", "hybrid", "zero1_tp")
OF_LAMB = ("ddp", "fsdp", "accumulated", "grad_op", "pp", "bitwise", "horovod", "fsdp_tp", "pp_tp")


def train_all(ranks: int, folder: str) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    for kind, names in (("lars", OF_LARS), ("lamb", OF_LAMB)):
        for name, settings in MESHES[ranks].items():
            if name not in names:
                continue
            path = train(kind, ranks, settings, f"{folder}/{kind}-{name}")
            found[f"{kind} {name}"] = load(path, ranks=()).shared["model"]
    if ranks == 2:  # another mesh goes on in the middle
        for kind in OPTIMIZERS:
            place = {"checkpoint_dir": f"{folder}/{kind}-saved"}
            train(kind, ranks, MESHES[2]["fsdp"], f"{folder}/{kind}-stopped", max_steps=4, **place)
            path = train(kind, ranks, MESHES[2]["tp"], f"{folder}/{kind}-again", resume_from_checkpoint=True, **place)
            found[f"{kind} again"] = load(path, ranks=()).shared["model"]
    return found


@pytest.mark.parametrize("ranks", MESHES)
def test_norms_are_of_whole_parameters_on_every_mesh(ranks: int, tmp_path: Path) -> None:
    options = {"lamb": LAMB_OPTIONS, "lars": LARS_OPTIONS}
    batch = GLOBAL_BATCH // ranks * ranks
    expected = {kind: by_hand(references(kind, **options[kind]), batch=batch) for kind in options}
    for found in run_ranks(train_all, ranks, ranks, str(tmp_path)):
        for name, weights in found.items():
            assert differ(weights, expected[name.split()[0]]) < 1e-12, name


def test_cut_parameters_are_allowed_where_sums_are_given() -> None:
    for optimizer in (LAMB(Net().parameters()), LARS(Net().parameters())):
        assert why_not_cut(optimizer, ["rows", "columns", "parameters"]) == ""
        assert "range of the parameters' numbers" in why_not_cut(optimizer, ["flat"])


def test_engine_that_steps_flat_ranges_refuses_by_name() -> None:
    config = DistributedConfig(backend="deepspeed", optimizer="lamb", num_gpus=2, batch_size=4)
    with pytest.raises(PlanError, match="optimizer='lamb' with backend='deepspeed'"):
        make_plan(config, JobProfile(samples=64), Hardware(cpu_cores=2), run_dir="run")


def test_sparse_gradient_is_refused_before_a_step() -> None:
    layer = nn.Embedding(4, 2, sparse=True)
    layer(torch.tensor([1])).sum().backward()
    with pytest.raises(TaskError, match="LAMB was given a sparse gradient"):
        LAMB(layer.parameters()).step()


def test_setting_makes_the_optimizer_with_its_options(tmp_path: Path) -> None:
    trainer = Trainer(
        Net(), loss_fn=nn.MSELoss(), optimizer="lars", learning_rate=0.5, momentum=0.8, weight_decay=0.05, num_gpus=1,
        batch_size=8, run_dir=tmp_path / "run", progress=False, device="cpu",
    )  # fmt: skip
    path = trainer.fit(make_data()).checkpoint
    made = references("lars", lr=0.5, momentum=0.8, weight_decay=0.05, trust=0.001)
    assert differ(load(path, ranks=()).shared["model"], by_hand(made, epochs=1)) < 1e-14
