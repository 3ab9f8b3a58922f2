"""A run in this process, whole and resumed in the middle of an epoch: weights, losses and samples are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distributed import Trainer
from distributed.core.history import History
from distributed.core.run_dir import RunDir
from distributed.data.checks.ledger import check_ledgers, read_ledger
from distributed.data.order import shuffled_order

SAMPLES, BATCH, EPOCHS, SEED = 19, 2, 2, 3
STEPS_PER_EPOCH = 5  # of two micro-batches each; the last has three samples, of which the second has one


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(SAMPLES, 6, generator=generator), torch.arange(SAMPLES) % 3)


def make_model(dropout: float) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(dropout), nn.Tanh(), nn.Linear(8, 3))


def fit(folder: Path, dropout: float = 0.4, **settings: Any) -> tuple[History, dict[str, torch.Tensor]]:
    model = make_model(dropout)
    trainer = Trainer(
        model,
        num_gpus=1,
        batch_size=BATCH,
        gradient_accumulation_steps=2,
        epochs=EPOCHS,
        seed=SEED,
        loss_fn=nn.CrossEntropyLoss(),
        optimizer="sgd",
        momentum=0.9,
        learning_rate=0.1,
        lr_schedule="cosine",
        sample_ledger=True,
        progress=False,
        run_dir=str(folder),
        **settings,
    )
    return trainer.fit(DataLoader(make_data(), shuffle=True)), {
        name: value.clone() for name, value in model.state_dict().items()
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, History, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("whole")
    return folder, *fit(folder, checkpoint_frequency="3 steps")


def test_resumed_run_equals_the_uninterrupted_one(whole: Any, tmp_path: Path) -> None:
    folder, history, weights = whole
    found = str(folder / "checkpoints" / "step-000003")
    resumed, again = fit(tmp_path, resume_from_checkpoint=found)
    assert resumed.steps == history.steps == EPOCHS * STEPS_PER_EPOCH
    assert all(torch.equal(again[name], value) for name, value in weights.items())
    assert [epoch.metrics["loss"] for epoch in resumed.epochs] == pytest.approx(
        [epoch.metrics["loss"] for epoch in history.epochs], rel=1e-6
    )
    first = [entry.indices.tolist() for entry in read_ledger(RunDir(folder).ledger.file(0))]
    assert [entry.indices.tolist() for entry in read_ledger(RunDir(tmp_path).ledger.file(0))] == first[3:]


def test_same_folder_is_resumed_with_every_sample_once(tmp_path: Path) -> None:
    """The second run goes back to step 6: what the first one did after that is taken out of the ledger."""
    fit(tmp_path, checkpoint_frequency="3 steps", max_steps=8)
    assert [entry.step for entry in read_ledger(RunDir(tmp_path).ledger.file(0))] == list(range(1, 9))
    fit(tmp_path, resume_from_checkpoint=str(tmp_path / "checkpoints" / "step-000006"))
    assert check_ledgers(tmp_path / "ledger", SAMPLES).is_exact


def test_saves_are_made_when_they_are_due_and_at_the_end(whole: Any) -> None:
    folder, history, _ = whole
    assert sorted(path.name for path in (folder / "checkpoints").glob("step-*")) == [
        f"step-{step:06d}" for step in (3, 6, 9, history.steps)
    ]


def test_fit_steps_match_a_hand_written_loop(tmp_path: Path) -> None:
    """One with micro-batches, momentum and a short last step, which takes the mean over its samples."""
    x, y = make_data().tensors
    model = make_model(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    total = EPOCHS * STEPS_PER_EPOCH
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)
    for epoch in range(EPOCHS):
        order = shuffled_order(SAMPLES, SEED, epoch)
        for start in range(0, SAMPLES, 2 * BATCH):
            step = order[start : start + 2 * BATCH]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[step]), y[step]).backward()
            optimizer.step()
            rate.step()
    _, weights = fit(tmp_path, dropout=0.0)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)
