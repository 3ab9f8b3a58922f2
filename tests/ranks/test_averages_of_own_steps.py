"""SWA of steps of the user's own: BatchNorm's statistics by their passes, which train nothing and leave no trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from distributed import Task, Trainer
from distributed.callbacks import SWA, Freeze
from distributed.core.errors import TaskError
from distributed.testing import run_ranks

SAMPLES, BATCH, EPOCHS = 29, 12, 3
State = dict[str, torch.Tensor]


def problem() -> TensorDataset:
    drawn = torch.Generator().manual_seed(1)
    return TensorDataset(*(torch.randn(SAMPLES, 3, generator=drawn, dtype=torch.float64) for _ in range(2)))


def networks() -> nn.ModuleDict:
    torch.manual_seed(3)
    generator = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    critic = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    return nn.ModuleDict({"generator": generator.double(), "critic": critic.double()})


def optimizers(model: Any) -> dict[str, torch.optim.Optimizer]:
    return {name: torch.optim.SGD(model[name].parameters(), lr=0.1) for name in ("critic", "generator")}


def loss_of(model: Any, batch: Any, name: str) -> torch.Tensor:
    real, noise = batch
    judged = model["critic"](model["generator"](noise))
    return F.softplus(-judged).mean() if name == "generator" else (judged - model["critic"](real)).tanh().mean()


class Alternating(Task):
    def training_step(self, model: nn.Module, batch: Any, optimizer: str) -> torch.Tensor:
        return loss_of(model, batch, optimizer)

    def configure_optimizers(self, model: nn.Module) -> Any:
        return optimizers(model)


class Manual(Task):
    manual_optimization = True
    configure_optimizers = Alternating.configure_optimizers

    def training_step(self, model: nn.Module, batch: Any) -> None:
        for name in ("critic", "generator"):
            self.zero_grad()
            self.backward(loss_of(model, batch, name))
            self.step(name)


class Penalized(Task):
    """With a penalty on the gradient, and a state that each of its steps changes."""

    taken = 0

    def training_step(self, model: nn.Module, batch: Any) -> Any:
        self.taken += 1
        return penalized(model, batch, self.taken), len(batch[0])

    def validation_step(self, model: nn.Module, batch: Any) -> Any:
        return loss_of(model, batch, "critic")

    def configure_optimizers(self, model: nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def state(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state(self, state: dict[str, Any]) -> None:
        self.taken = state["taken"]


def penalized(model: Any, batch: Any, taken: int) -> torch.Tensor:
    noise = batch[1].clone().requires_grad_()
    loss = F.softplus(model["critic"](model["generator"](noise))).mean() / taken
    (gradient,) = torch.autograd.grad(loss * len(noise), noise, create_graph=True)
    return loss + gradient.square().sum(1).mean()


# ---- by hand


def batches() -> Iterator[tuple[torch.Tensor, ...]]:
    for start in range(0, SAMPLES, BATCH):
        yield tuple(tensor[start : start + BATCH] for tensor in problem().tensors)


def alternate(model: Any, made: dict[str, torch.optim.Optimizer], batch: Any, number: int) -> None:
    for name, optimizer in made.items():
        model.zero_grad()
        loss_of(model, batch, name).backward()
        optimizer.step()


def penalize(model: Any, made: dict[str, torch.optim.Optimizer], batch: Any, number: int) -> None:
    model.zero_grad()
    penalized(model, batch, number).backward()
    for optimizer in made.values():
        optimizer.step()


def by_hand(step: Callable[..., None], passes: Callable[[Any, Any], None]) -> tuple[State, State]:
    """The weights of a plain loop, and the mean of those after its last two epochs with statistics of its own."""
    model = networks()
    made, means, number = optimizers(model), list[State](), 0
    for epoch in range(EPOCHS):
        for batch in batches():
            number += 1
            step(model, made, batch, number)
        if epoch:
            means.append({name: value.detach().clone() for name, value in model.named_parameters()})
    averaged = networks()
    averaged.load_state_dict({name: (means[0][name] + means[1][name]) / 2 for name in means[0]}, strict=False)
    for layer in averaged.modules():
        if isinstance(layer, nn.BatchNorm1d):
            layer.reset_running_stats()
            layer.momentum = None
    for batch in batches():
        passes(averaged, batch)
    return model.state_dict(), averaged.state_dict()


def both(model: Any, batch: Any) -> None:
    for name in ("critic", "generator"):
        loss_of(model, batch, name)


CASES: dict[str, tuple[type[Task], Callable[..., None], Callable[[Any, Any], None]]] = {
    "alternating": (Alternating, alternate, both),
    "manual": (Manual, alternate, both),
    "penalized": (Penalized, penalize, lambda model, batch: penalized(model, batch, 1)),
}


def fit(folder: str, ranks: int) -> dict[str, tuple[State, State]]:
    found = {}
    for name, (kind, _, _) in CASES.items():
        options: dict[str, Any] = {"epochs": EPOCHS, "progress": False, "run_dir": f"{folder}/{name}"}
        swa = SWA(start_epoch=1, evaluates=name == "penalized")
        trainer = Trainer(kind(networks()), callbacks=[swa], batch_size=BATCH // ranks, num_gpus=ranks, **options)
        trainer.fit(problem(), problem() if name == "penalized" else None)
        found[name] = trainer.model.state_dict(), trainer.averaged_model().state_dict()
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_statistics_of_own_steps_are_those_of_their_passes(ranks: int, tmp_path: Path) -> None:
    wanted = {name: by_hand(step, passes) for name, (_, step, passes) in CASES.items()}
    for found in run_ranks(fit, ranks, str(tmp_path), ranks):
        for name, pair in found.items():
            for mine, theirs in zip(pair, wanted[name], strict=True):
                for tensor, value in theirs.items():
                    torch.testing.assert_close(mine[tensor], value, rtol=0, atol=1e-9, msg=f"{name}: {tensor}")


@pytest.mark.parametrize("kind", [Alternating, Manual])
def test_freezing_of_own_optimization_is_refused_at_the_start(kind: type[Task], tmp_path: Path) -> None:
    trainer = Trainer(kind(networks()), callbacks=[Freeze("critic.*", until_epoch=2)], epochs=3, batch_size=BATCH)
    with pytest.raises(TaskError, match=r"Freeze\('critic.\*'\) in a run with"):
        trainer.fit(problem(), run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
