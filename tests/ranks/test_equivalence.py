"""N ranks train exactly what one process trains: against a hand-written loop in double precision.

Every world size has the same global batch of 12, so all of them must come to the same weights. The dataset lengths
leave a last batch that does not divide, down to a single sample, so that most ranks have an empty share of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distributed import PyTorchDDPTrainer
from distributed.data.order import shuffled_order
from distributed.testing import run_ranks

MICRO_BATCH, EPOCHS, RATE = 12, 2, 0.05


class Tokens(nn.Module):
    """A classifier of every position of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).transpose(1, 2)


class OwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.layer(x), y)}


@dataclass(frozen=True)
class Case:
    samples: int = 97  # one more than eight global batches
    model: str = "mlp"
    loss: nn.Module = field(default_factory=nn.CrossEntropyLoss)
    accumulation: int = 1
    clip: float | None = None
    precision: str = ""
    tolerance: float = 1e-10
    ignored: bool = False  # a fifth of the targets is to be ignored


CASES = {
    "plain": Case(),
    "tail_of_seven": Case(samples=103),
    "fewer_samples_than_ranks": Case(samples=3),
    "accumulation": Case(accumulation=3),
    "accumulation_short_micro_batch": Case(samples=101, accumulation=3),
    "clipping": Case(clip=0.05),
    "batchnorm": Case(model="batchnorm"),
    "batchnorm_accumulation": Case(samples=103, model="batchnorm", accumulation=2),
    "class_weights": Case(loss=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.1], dtype=torch.float64))),
    "tokens_with_padding": Case(model="tokens", loss=nn.CrossEntropyLoss(), accumulation=2),
    "ignored_targets": Case(ignored=True),
    "summed_loss": Case(loss=nn.CrossEntropyLoss(reduction="sum"), clip=1.0),
    "bf16": Case(precision="bf16", tolerance=2e-2),
    "fp16": Case(precision="fp16", tolerance=2e-2),
    "fp16_clipping": Case(precision="fp16", clip=0.1, tolerance=2e-2),
}


def make_model(kind: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(7)
    models: dict[str, Any] = {
        "mlp": lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)),
        "batchnorm": lambda: nn.Sequential(
            nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 4, 2), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)
        ),
        "tokens": Tokens,
    }
    return models[kind]().to(dtype)


def make_data(case: Case, dtype: torch.dtype) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    if case.model == "tokens":
        x = torch.randn(case.samples, 9, 6, generator=generator, dtype=dtype)
        y = torch.randint(0, 5, (case.samples, 9), generator=generator)
        lengths = torch.randint(1, 9, (case.samples, 1), generator=generator)
        y[torch.arange(9) >= lengths] = -100
        return TensorDataset(x, y)
    x = torch.randn(case.samples, 6, generator=generator, dtype=dtype)
    y = torch.randint(0, 3, (case.samples,), generator=generator)
    if case.ignored:
        y[2::5] = -100  # not the one sample of an epoch's last step: a mean over no target is no number
    return TensorDataset(x, y)


def dtype_of(case: Case) -> torch.dtype:
    return torch.float32 if case.precision else torch.float64


def train_by_hand(case: Case) -> dict[str, torch.Tensor]:
    """One process, no library."""
    dtype = dtype_of(case)
    model, data = make_model(case.model, dtype), make_data(case, dtype)
    x, y = data.tensors
    loss_fn = case.loss
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(case.precision)
    step_size = MICRO_BATCH * case.accumulation
    for epoch in range(EPOCHS):
        order = shuffled_order(case.samples, 5, epoch)
        for start in range(0, case.samples, step_size):
            step = order[start : start + step_size]
            divisor = float((y[step] != -100).sum()) if case.ignored or case.model == "tokens" else float(len(step))
            if loss_fn.weight is not None:
                divisor = float(loss_fn.weight[y[step]].sum())
            for first in range(0, len(step), MICRO_BATCH):
                micro = step[first : first + MICRO_BATCH]
                with torch.autocast("cpu", low, enabled=low is not None):
                    loss = loss_fn(model(x[micro]), y[micro])
                weight = (
                    float((y[micro] != -100).sum()) if case.ignored or case.model == "tokens" else float(len(micro))
                )
                if loss_fn.weight is not None:
                    weight = float(loss_fn.weight[y[micro]].sum())
                (loss if loss_fn.reduction == "sum" else loss * (weight / divisor)).backward()
            if case.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), case.clip)
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


def train_with_ranks(case: Case, ranks: int, run_dir: str, **more: Any) -> dict[str, torch.Tensor]:
    dtype = dtype_of(case)
    model = make_model(case.model, dtype)
    trainer = PyTorchDDPTrainer(
        model,
        num_gpus=ranks,
        batch_size=MICRO_BATCH // ranks,
        epochs=EPOCHS,
        seed=5,
        loss_fn=case.loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=RATE, momentum=0.9),
        gradient_accumulation_steps=case.accumulation,
        gradient_clipping=case.clip,
        mixed_precision=case.precision or False,
        scaler_init_scale=1024 if case.precision == "fp16" else None,  # no step may overflow and be skipped
        loss_weighting="targets" if case.ignored else "auto",
        progress=False,
        run_dir=run_dir,
        **more,
    )
    trainer.fit(DataLoader(make_data(case, dtype), batch_size=1, shuffle=True))
    return trainer.model.state_dict()


@pytest.fixture(scope="module", params=[1, 2, 3, 4], ids=lambda ranks: f"{ranks}ranks")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All cases on one world: the state of every rank, by case."""
    ranks, folder = request.param, str(tmp_path_factory.mktemp("runs"))
    cases, train = CASES, train_with_ranks
    if ranks == 1:
        return {name: [train(case, 1, str(Path(folder) / name))] for name, case in cases.items()}

    def all_cases() -> dict[str, Any]:
        return {name: train(case, ranks, f"{folder}/{name}") for name, case in cases.items()}

    results = run_ranks(all_cases, ranks)
    return {name: [result[name] for result in results] for name in cases}


@pytest.mark.parametrize("name", CASES)
def test_ranks_match_one_process_hand_written_loop(name: str, trained: dict[str, Any]) -> None:
    case = CASES[name]
    expected = train_by_hand(case)
    start = make_model(case.model, dtype_of(case)).state_dict()
    assert any(not torch.equal(start[key], expected[key]) for key in start), "the reference did not train at all"
    for state in trained[name]:
        assert state.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(
                state[key], value, rtol=case.tolerance, atol=case.tolerance, msg=lambda m, k=key: f"{k}: {m}"
            )


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_hold_the_same_bytes(name: str, trained: dict[str, Any]) -> None:
    first, *others = trained[name]
    for other in others:
        assert all(torch.equal(first[key], other[key]) for key in first)
