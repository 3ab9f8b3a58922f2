"""Callbacks in runs whose steps are captured: averages, frozen parameters, rates, tensors that are replaced."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distributed import Callback, Trainer
from distributed.callbacks import EMA, SWA, Freeze, WeightAveraging

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CAPTURED = "one CUDA graph from here on"


def rows(samples: int = 1000) -> TensorDataset:
    x = torch.randn(samples, 32, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long())


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(32, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))


def fit(folder: Path, callbacks: list[Callback], **settings: Any) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The weights and the averages, and what was said."""
    options: dict[str, Any] = {"num_gpus": 1, "batch_size": 32, "epochs": 4, "log_every_n_steps": 10, "progress": False}
    trainer = Trainer(
        model(),
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
        callbacks=callbacks,
        **options | {"run_dir": folder} | settings,
    )
    trainer.fit(DataLoader(rows(), shuffle=True, batch_size=32), DataLoader(rows(100), batch_size=50))
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    found = {name: value.float().cpu() for name, value in trainer.model.state_dict().items()}
    if any(isinstance(callback, WeightAveraging) for callback in callbacks):
        averages = trainer.averaged_model().state_dict()
        found |= {f"averaged {name}": value.float().cpu() for name, value in averages.items()}
    return found, [event["message"] for event in events if event["event"] == "Warned"]


class Replaces(Callback):
    """Puts another tensor into the place of a parameter, in the middle of an epoch."""

    def on_step_end(self, run: Any) -> None:
        if run.step == 45:
            run.model[3].bias.data = run.model[3].bias.data + 1.0


class Rates(Callback):
    def on_step_end(self, run: Any) -> None:
        for group in run.optimizer.param_groups:
            group["lr"] = 0.05 / (1 + run.step // 10)


KINDS: dict[str, Callable[[], list[Callback]]] = {
    "ema": lambda: [EMA(0.9)],
    "swa": lambda: [SWA(1, learning_rate=0.01, anneal_epochs=2, evaluates=True)],
    "freeze by epochs": lambda: [Freeze("0.*", until_epoch=2)],
    "freeze by steps": lambda: [Freeze("1.*", until_step=45)],
    "rates": lambda: [Rates()],
    "another tensor": lambda: [Replaces()],
}


@pytest.mark.parametrize("kind", KINDS)
def test_captured_run_with_callbacks_ends_as_an_eager_one(kind: str, tmp_path: Path) -> None:
    eager, _ = fit(tmp_path / "eager", KINDS[kind](), capture=False)
    captured, said = fit(tmp_path / "captured", KINDS[kind](), capture=True)
    assert any(CAPTURED in line for line in said), said
    for name, value in eager.items():
        assert torch.allclose(captured[name], value, atol=1e-4, rtol=1e-4), name


@pytest.mark.parametrize("kind", ["ema", "freeze by epochs", "another tensor"])
def test_two_captured_ranks_with_callbacks_end_as_one_eager(kind: str, tmp_path: Path) -> None:
    one, _ = fit(tmp_path / "one", KINDS[kind](), capture=False)
    options = {"num_gpus": 2, "batch_size": 16, "share_gpus": torch.cuda.device_count() < 2}
    two, _ = fit(tmp_path / "two", KINDS[kind](), capture=True, **options)
    for name, value in one.items():
        assert torch.allclose(two[name], value, atol=1e-4, rtol=1e-4), name
