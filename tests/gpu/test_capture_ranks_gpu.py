"""Steps of several ranks as CUDA graphs with NCCL inside: the bytes of eager steps, on all ranks or on none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, default_collate

from distributed import Trainer
from distributed.testing import run_ranks
from tests.gpu.test_capture_gpu import CAPTURED, mlp, normed, rows, sgd

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SAMPLES = 1003  # the last step of an epoch is short, and its shares are not alike


def rank() -> int:
    return torch.distributed.get_rank()


class OnOneRank(nn.Module):
    """What a graph cannot hold, on rank 1 alone."""

    def __init__(self, does: str) -> None:
        super().__init__()
        self.inner, self.does, self.count = mlp(), does, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.does == "waits" and rank() == 1 and x.sum().item() > 1e9:
            x = x * 2
        if self.does == "stops" and rank() == 1:
            torch.cuda.synchronize()
        if self.does == "counts" and rank() == 1:
            self.count += 1
        return self.inner(x)


class Masked(nn.Module):
    """Has a buffer that is no statistic, so that rank 0's is sent in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.register_buffer("mask", torch.ones(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x * self.mask)


class AnyWidth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.last = nn.Linear(1, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x.mean(1, keepdim=True))


def narrow_once() -> Any:
    """Batches of one shape but for one, which one rank gets when graphs are replayed."""
    samples = [(*rows(2048)[n], n) for n in range(2048)]

    def collate(given: list[Any]) -> Any:
        x, y, number = default_collate(given)
        return (x[:, :20] if 64 * 18 + 40 in number.tolist() else x), y  # in the 19th step, of rank 1

    return DataLoader(samples, batch_size=32, collate_fn=collate)


Case = tuple[Callable[[], nn.Module], dict[str, Any], str]

EQUAL: dict[str, Case] = {
    "sgd": (mlp, {"optimizer": sgd}, CAPTURED),
    "adamw_with_a_schedule": (mlp, {"lr_schedule": "cosine", "warmup_steps": 5, "learning_rate": 0.01}, CAPTURED),
    "accumulated_and_clipped": (
        mlp,
        {"optimizer": sgd, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5, "batch_size": 16},
        CAPTURED,
    ),
    "targets": (mlp, {"optimizer": sgd, "loss_weighting": "targets"}, CAPTURED),
    "dropout": (lambda: mlp(0.3), {"optimizer": sgd}, CAPTURED),
    "batchnorm_of_images": (normed, {"optimizer": sgd}, CAPTURED),
    "buffers": (Masked, {"optimizer": sgd}, CAPTURED),
    "bf16": (mlp, {"optimizer": sgd, "mixed_precision": "bf16"}, CAPTURED),
    "fp16": (mlp, {"optimizer": sgd, "mixed_precision": "fp16", "gradient_clipping": 1.0}, CAPTURED),
    "compiled": (mlp, {"optimizer": sgd, "compile": "whole"}, CAPTURED),
    "bf16_parameters": (mlp, {"optimizer": sgd, "bf16_parameters": True}, CAPTURED),
}
REFUSED: dict[str, Case] = {
    "waits": (lambda: OnOneRank("waits"), {"optimizer": sgd}, "not captured: on rank 1, it waits for the device at "),
    "stops": (lambda: OnOneRank("stops"), {"optimizer": sgd}, "not captured: on rank 1, CUDA refused it"),
    "counts": (lambda: OnOneRank("counts"), {"optimizer": sgd}, "not captured: on rank 1, it counts in Python"),
    "unused": (mlp, {"optimizer": sgd, "find_unused_parameters": True}, "find_unused_parameters=True looks"),
    "narrow": (
        AnyWidth,
        {"optimizer": sgd, "data": narrow_once},
        "not captured: on rank 1, batches of the same size have different shapes",
    ),
}


def train(case: Case, capture: bool) -> dict[str, Any]:
    make, settings, _ = case
    given = {"batch_size": 32, "epochs": 3, "log_every_n_steps": 5, "share_gpus": True, "device": "cuda"} | settings
    parts = {name: given.pop(name) for name in ("optimizer",) if name in given}
    data = given.pop("data", lambda: DataLoader(rows(SAMPLES), shuffle=True, batch_size=32))
    model = make()
    trainer = Trainer(model, loss_fn=nn.CrossEntropyLoss(), capture=capture, progress=False, **parts, **given)
    events = Path(trainer.fit(data()).run_dir, "events.jsonl")  # which rank 0 alone has
    lines = [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else []
    said = [line["message"] for line in lines if line["event"] == "Warned"]
    losses = [line["loss"] for line in lines if line["event"] == "StepEnded"]
    weights = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    return {"weights": weights, "said": said, "losses": losses}


def train_all(cases: dict[str, Case]) -> dict[str, dict[bool, dict[str, Any]]]:
    """Every case both ways, in one world."""
    return {name: {capture: train(case, capture) for capture in (False, True)} for name, case in cases.items()}


def check(cases: dict[str, Case], ranks: list[dict[str, dict[bool, dict[str, Any]]]]) -> None:
    problems = []
    for name, (_, _, expected) in cases.items():
        eager, captured = ranks[0][name][False], ranks[0][name][True]
        if not any(expected in line for line in captured["said"]):
            problems.append(f"{name}: {captured['said']}")
        if eager["losses"] != captured["losses"]:
            problems.append(f"{name}: losses {eager['losses']} and {captured['losses']}")
        for weight, value in eager["weights"].items():
            for number, other in enumerate(ranks):
                if not torch.equal(other[name][True]["weights"][weight], value):
                    off = (other[name][True]["weights"][weight].float() - value.float()).abs().max().item()
                    problems.append(f"{name}: {weight} of rank {number} is off by {off}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("size", [2, 4])
def test_captured_ranks_have_the_bytes_of_eager_ones(size: int) -> None:
    cases = EQUAL if size == 2 else {name: EQUAL[name] for name in ("sgd", "accumulated_and_clipped", "dropout")}
    check(cases, run_ranks(train_all, size, cases, device="cuda"))


def test_step_uncapturable_on_one_rank_is_captured_on_none() -> None:
    check(REFUSED, run_ranks(train_all, 2, REFUSED, device="cuda"))
