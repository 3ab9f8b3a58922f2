"""Steps of a user's own and the plain loops that they are compared with: what the tests of such steps share."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from distributed import Task, Trainer
from tests.meshes import make_data, make_model

RATE = 0.1
Step = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True)
class Run:
    """What a run came to: the loss and the logged values of each step, the last validation, and the weights."""

    losses: list[float]
    logged: list[Mapping[str, float]]
    validation: Mapping[str, float]
    weights: Mapping[str, torch.Tensor] = field(repr=False)
    certificate: str = ""  # of a run that resumed


def run_of(history: Any, model: nn.Module) -> Run:
    lines = Path(history.run_dir, "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    steps = [event for event in events if event["event"] == "StepEnded"]
    certificates = [event["text"] for event in events if event["event"] == "ResumeCompared"]
    weights = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
    return Run(
        [step["loss"] for step in steps],
        [step["metrics"] for step in steps],
        history.epochs[-1].metrics,
        weights,
        *certificates,
    )


def assert_same(found: Run, wanted: Run, tolerance: float = 1e-6) -> None:
    """Losses, logged values and weights; an accuracy that the trainer measures by itself may be there too."""
    torch.testing.assert_close(found.losses, wanted.losses, rtol=tolerance, atol=tolerance)
    assert len(found.logged) == len(wanted.logged)
    for mine, theirs in zip(found.logged, wanted.logged, strict=True):
        assert mine.keys() - {"accuracy"} == theirs.keys() - {"accuracy"}
    for mine, theirs in [*zip(found.logged, wanted.logged, strict=True), (found.validation, wanted.validation)]:
        named = {name: mine[name] for name in theirs}
        torch.testing.assert_close(named, dict(theirs), rtol=tolerance, atol=tolerance)
    assert found.weights.keys() == wanted.weights.keys()
    for name, value in wanted.weights.items():
        torch.testing.assert_close(found.weights[name], value, rtol=tolerance, atol=tolerance, msg=name)


# ---- on the transformer of tests/meshes.py: each target counts, so a loss is a mean over the targets


def observed(model: nn.Module, batch: Any) -> dict[str, Any]:
    """Its loss is a cross entropy that is known by its value; what it logs beside it is a mean over the samples."""
    ids, target = batch
    logits = model(ids)
    loss = F.cross_entropy(logits, target)
    return {"loss": loss, "outputs": logits.transpose(1, 2), "target": target, "size": logits.square().mean()}


def twice(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    """Two calls of the model in a step, one of them on words that the other does not see."""
    ids, target = batch
    loss = F.cross_entropy(model(ids), target) + 0.3 * F.cross_entropy(model(ids.flip(1)), target.flip(1))
    return loss, target.numel()


def in_parts(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    """The model's parts, and never its forward."""
    ids, target = batch
    x = model.tokens(ids) + model.positions(torch.arange(ids.size(1), device=ids.device))
    for block in model.blocks:
        x = block(x)
    return F.cross_entropy(model.head(model.norm(x)).transpose(1, 2), target), target.numel()


def penalized(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    """With a penalty on all weights, which a rank with a part of them cannot compute."""
    loss, weight = twice(model, batch) if not model.training else (observed(model, batch)["loss"], batch[1].numel())
    return loss + 0.01 * sum(p.square().sum() for p in model.parameters()), weight


class Talking(Task):
    """Logs values of different weights from inside of its steps, and has a validation step of its own."""

    def training_step(self, model: nn.Module, batch: Any) -> Any:
        return self._loss(model, batch)

    def validation_step(self, model: nn.Module, batch: Any) -> Any:
        return self._loss(model, batch)

    def _loss(self, model: nn.Module, batch: Any) -> Any:
        ids, target = batch
        logits = model(ids)
        even = target % 2 == 0
        losses = F.cross_entropy(logits, target, reduction="none")
        self.log("even", losses[even].mean().nan_to_num(), weight=even.sum())
        self.log("length", float(ids.shape[1]))
        return {"loss": losses.mean(), "outputs": logits.transpose(1, 2), "target": target}


def talking_by_hand(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    ids, target = batch
    losses = F.cross_entropy(model(ids), target, reduction="none")
    return {"loss": losses.mean(), "even": losses[target % 2 == 0].mean(), "length": torch.tensor(float(ids.shape[1]))}


def by_hand(
    step: Step, *, samples: int, batch: int, model: nn.Module | None = None, low: torch.dtype | None = None
) -> Run:
    """One process and one epoch, without the library. The validation is of the first 13 samples."""
    model = model or make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    ids, target = make_data(samples).tensors
    losses, logged = [], []
    scope = torch.autocast("cpu", low) if low is not None else nullcontext()
    for start in range(0, samples, batch):
        optimizer.zero_grad()
        with scope:
            found = _named(step(model, (ids[start : start + batch], target[start : start + batch])))
        found["loss"].backward()
        optimizer.step()
        losses.append(found.pop("loss").item())
        logged.append({name: value.item() for name, value in found.items()})
    model.eval()
    with torch.no_grad(), scope:
        found = _named(step(model, make_data(13).tensors))
    validation = {f"val_{name}": value.item() for name, value in found.items()}
    return Run(losses, logged, validation, model.state_dict())


def _named(result: Any) -> dict[str, torch.Tensor]:
    if isinstance(result, dict):
        return {name: value for name, value in result.items() if name not in ("outputs", "target", "weight")}
    return {"loss": result[0] if isinstance(result, tuple) else result}


def train(step: Step | type[Task], folder: str, samples: int, **settings: Any) -> Run:
    """The same by the library, as one of the ranks of a world."""
    model = make_model()
    given = {} if isinstance(step, type) else {"training_step": step, "optimizer": plain_sgd}
    task = step(model, optimizer=plain_sgd) if isinstance(step, type) else model
    trainer = Trainer(
        task,
        **given,
        epochs=1,
        progress=False,
        log_every_n_steps=1,
        whole_model_on="all",
        certificate_steps=0,
        run_dir=folder,
        checkpoint_dir=f"{folder}/checkpoints",
        **settings,
    )
    history = trainer.fit(make_data(samples), TensorDataset(*make_data(13).tensors))
    return run_of(history, model)


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE)
