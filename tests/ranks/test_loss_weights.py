"""Losses that are means over tokens, unevenly spread over ranks and micro-batches, add up to those of one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from distributed import Trainer
from distributed.core.errors import TaskError
from distributed.testing import run_ranks
from tests.meshes import ENGINES, LENGTH, MESHES, Transformer

SAMPLES, BATCH, STEPS = 32, 8, 4


class Own(Transformer):
    """With a loss of its own, as language models have it: each position foretells the next, and padding is left out."""

    def __init__(self, kind: str = "shifted") -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("scale", torch.ones(1))  # which the backward pass needs as the forward pass saw it

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:  # type: ignore[override]
        logits = super().forward(ids).mT
        if self.kind == "masked":  # over what no label tells
            each = F.cross_entropy(logits.mT, ids, reduction="none")
            return {"loss": (each * (ids > 3)).sum() / (ids > 3).sum()}
        if (
            self.kind == "in training" and not self.training
        ):  # by a mean over all targets it would be weighted otherwise
            return logits.mT
        if self.kind in ("unshifted", "in training"):
            return F.cross_entropy((logits * self.scale).flatten(0, 1), labels.flatten())
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}


def tokens_mean(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A function that torch's own is hidden in."""
    return F.cross_entropy(outputs, target)


def compares_samples(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    flat = F.normalize(outputs.flatten(1), dim=1)
    return F.cross_entropy(flat @ flat.T, torch.arange(len(flat), device=flat.device))


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 16, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(3))
    labels = ids.clone()
    for row in range(SAMPLES):
        labels[row, 2 + 3 * row % 11 :] = -100
    return ids, labels


def make(kind: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(5)
    return (Transformer() if kind == "function" else Own(kind)).to(dtype)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def by_hand(kind: str, epochs: int = 1) -> list[float]:
    model, (ids, labels) = make(kind), rows()
    optimizer, losses = sgd(model.parameters()), []
    for start in [*range(0, SAMPLES, BATCH)] * epochs:
        x, y = ids[start : start + BATCH], labels[start : start + BATCH]
        found = tokens_mean(model(x), y) if kind == "function" else model(x, y)
        loss = found["loss"] if isinstance(found, dict) else found
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def fit(kind: str, run_dir: Path, loss_fn: Callable[..., Any] | None = None, **settings: Any) -> list[float]:
    ids, labels = rows()
    data: Any = TensorDataset(ids, labels)
    if kind != "function":
        data = [{"ids": x, "labels": y} for x, y in zip(ids, labels, strict=True)]
    given = {"epochs": 1, "log_every_n_steps": 1, "progress": False, "run_dir": str(run_dir), "optimizer": sgd}
    dtype = torch.float32 if settings.get("backend") == "deepspeed" else torch.float64  # whose masters are fp32
    trainer = Trainer(make(kind, dtype), loss_fn=loss_fn, **given | settings)
    history = trainer.fit(DataLoader(data, batch_size=1))
    events = [json.loads(line) for line in (Path(history.run_dir) / "events.jsonl").read_text().splitlines()]
    return [event["loss"] for event in events if event["event"] == "StepEnded"]


TWO = {name: mesh.all_settings(2) for name, mesh in (MESHES | ENGINES).items() if mesh.ranks == 2}
BITWISE = {"num_gpus": 2, "batch_size": 4, "reproducible": "bitwise", "virtual_ranks": 4}
WAYS: dict[str, tuple[str, Callable[..., Any] | None, dict[str, Any]]] = {
    "ddp": ("shifted", None, TWO["ddp"]),
    "ddp/targets": ("shifted", None, TWO["ddp"] | {"loss_weighting": "targets"}),
    "ddp/function": ("function", tokens_mean, TWO["ddp"]),
    "fsdp": ("shifted", None, TWO["fsdp_grad_op"]),
    "fsdp/halves": ("unshifted", None, TWO["fsdp_grad_op"]),
    "tp": ("shifted", None, TWO["tp"]),
    "cp/function": ("function", tokens_mean, TWO["cp"]),
    "pp": ("shifted", None, TWO["pp"]),
    "pp/function": ("function", tokens_mean, TWO["pp"]),
    "bitwise": ("shifted", None, BITWISE),
    "deepspeed": ("shifted", None, TWO["deepspeed"]),
    "horovod": ("shifted", None, TWO["horovod"]),
}
REFUSED: dict[str, tuple[str, Callable[..., Any] | None, dict[str, Any], str]] = {
    "a mask": ("masked", None, TWO["ddp"], "is not the mean of the losses of its parts"),
    "a mask, fsdp": ("masked", None, TWO["fsdp_grad_op"], "is not the mean of the losses of its parts"),
    "a mask in parts": ("masked", None, TWO["tp"], "is not known"),
    "in training alone": ("in training", None, TWO["ddp"], "is not known"),
    "in training alone, fsdp": ("in training", None, TWO["fsdp_grad_op"], "is not known"),
    "samples compared": ("function", compares_samples, TWO["ddp"], "is not the mean of the losses of its parts"),
    "pp": ("function", compares_samples, TWO["pp"], "is not the mean of the losses of its parts"),
}


def train_all(folder: Path) -> tuple[dict[str, list[float]], dict[str, str]]:
    losses = {way: fit(kind, folder / way.replace("/", "-"), fn, **more) for way, (kind, fn, more) in WAYS.items()}
    refused = {}
    for way, (kind, fn, more, _) in REFUSED.items():
        try:
            fit(kind, folder / f"refused {way}", fn, **more)
        except TaskError as error:
            refused[way] = str(error)
    return losses, refused


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[float]], dict[str, str]]:
    found: tuple[dict[str, list[float]], dict[str, str]] = run_ranks(train_all, 2, tmp_path_factory.mktemp("runs"))[0]
    return found


@pytest.mark.parametrize("way", WAYS)
def test_token_weighted_loss_of_each_step_matches_one_process(way: str, trained: Any) -> None:
    found = trained[0][way]
    assert len(found) == STEPS
    assert found == pytest.approx(by_hand(WAYS[way][0]), rel=1e-5 if way == "deepspeed" else 1e-10)


@pytest.mark.parametrize("way", REFUSED)
def test_loss_that_does_not_add_up_over_ranks_is_refused(way: str, trained: Any) -> None:
    assert REFUSED[way][3] in trained[1][way]


def test_model_without_logits_matches_hand_written_loss(tmp_path: Path) -> None:
    settings = {"num_gpus": 1, "batch_size": 4, "gradient_accumulation_steps": 2}
    assert fit("unshifted", tmp_path, None, **settings) == pytest.approx(by_hand("unshifted"), rel=1e-10)
