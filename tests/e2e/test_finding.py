"""Trials before a run: a learning rate, a batch size, and a process that is left exactly as it was."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from distributed import Trainer
from distributed.core.errors import PlanError, RankFailedError, TaskError
from distributed.testing import run_ranks
from distributed.train.callbacks.probes import RateSweep
from distributed.trainers.finding.finding import BatchSizes
from distributed.trainers.finding.rate_curve import LearningRateCurve, suggest
from tests.conftest import clean_environ


def problem(samples: int = 256) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 8, generator=generator)
    return TensorDataset(x, (x[:, 0] > 0).long())


class Limited(nn.Module):
    """Is out of memory with more samples than `most`, as a GPU would be."""

    def __init__(self, most: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.most, self.layer = most, nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.1), nn.Linear(32, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return self.layer(x)


def make_trainer(model: nn.Module, ranks: int, **more: Any) -> Trainer:
    options: dict[str, Any] = {"num_gpus": ranks, "device": "cpu", "progress": False, "lr_schedule": "cosine"}
    return Trainer(model, loss_fn=nn.CrossEntropyLoss(), **options | more)


def randomness(loader: DataLoader[Any]) -> list[Any]:
    drawn = loader.sampler.generator.get_state()  # type: ignore[union-attr]
    numbers = np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    return [torch.get_rng_state().tolist(), random.getstate(), numbers, drawn.tolist()]


def test_learning_rate_is_found_on_ranks_and_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    curves = []
    for ranks in (1, 2):
        model = Limited(most=1000)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
        data = problem()
        sampler = RandomSampler(data, generator=torch.Generator().manual_seed(3))
        loader = DataLoader(data, sampler=sampler, batch_size=16 // ranks)
        before = [model.state_dict(), optimizer.state_dict()]
        values, drawn = [t.clone() for t in model.state_dict().values()], randomness(loader)
        curve = make_trainer(model, ranks, optimizer=optimizer).find_learning_rate(loader, low=1e-4, steps=40)
        assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), values, strict=True))
        assert [model.state_dict().keys(), optimizer.state_dict()] == [before[0].keys(), before[1]]
        assert randomness(loader) == drawn
        curves.append(curve)
    assert not list(tmp_path.iterdir()), "nothing is left"
    one, two = curves
    rate = one.suggestion
    assert rate is not None
    assert 1e-3 < rate < 10
    assert len(one.losses) == len(one.rates) <= 40
    assert one.rates[0] == pytest.approx(1e-4)
    several = min(len(one.rates), len(two.rates), 10)
    assert one.rates[:several] == two.rates[:several]


def test_trials_leave_out_what_the_run_to_come_validates() -> None:
    trainer = make_trainer(
        Limited(most=1000),
        1,
        val_check_interval=2,
        sanity_val_steps=1,
        checkpoint_frequency="1 validation",
        keep_best="val_loss",
        detect_anomaly=True,
        limit_train_batches=1,
        fast_dev_run=True,
    )
    curve = trainer.find_learning_rate(DataLoader(problem(), batch_size=16), steps=10, high=1e-3)
    assert len(curve.losses) == 10
    assert len(set(curve.losses)) == 10, "steps of other samples each"


def test_sweep_holds_its_rates_against_a_scheduler_of_epochs(tmp_path: Path) -> None:
    seen = []

    class Recording(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.append(self.param_groups[0]["lr"])
            return super().step(closure)

    trainer = make_trainer(
        Limited(most=1000),
        1,
        optimizer=lambda parameters: Recording(parameters, lr=0.1),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        callbacks=[rates := RateSweep(1e-4, 1e-2, 8)],
        lr_schedule="constant",
    )
    trainer.fit(DataLoader(problem(32), batch_size=16), epochs=4, run_dir=tmp_path / "run")
    assert seen == pytest.approx(rates.rates)


def test_batch_size_is_found_where_larger_ones_are_out_of_memory() -> None:
    model = Limited(most=20)
    loader = DataLoader(problem(), batch_size=3)
    found = make_trainer(model, 2).find_batch_size(loader, start=16, steps=1)
    assert found.largest == 20
    assert found.tried[32] is None
    assert (found.tried[16] or 0) > 0


def test_batch_size_within_a_limit_of_the_host_is_found() -> None:
    """Without a trial that would take more."""
    trainer = make_trainer(Limited(most=1000), 1)
    limited = trainer.find_batch_size(DataLoader(problem(), batch_size=3), start=64, steps=1, limit_bytes=1 << 20)
    assert limited.largest is None
    assert "not even batch_size 64 fits into 1 MiB" in str(limited)
    whole = trainer.find_batch_size(DataLoader(problem(), batch_size=3), start=256, steps=1)
    assert whole.largest == 256, "there are no more samples"


def test_error_of_a_trial_is_the_error(tmp_path: Path) -> None:
    wrong = DataLoader(TensorDataset(torch.randn(32, 5), torch.zeros(32).long()), batch_size=4)
    with pytest.raises(RankFailedError, match="mat1 and mat2"):
        make_trainer(Limited(most=1000), 1).find_batch_size(wrong)
    with pytest.raises(TaskError, match="rates grow from low to high"):
        make_trainer(Limited(most=1000), 1).find_learning_rate(wrong, low=1.0, high=0.1)


def find_in_a_rank() -> str:
    with pytest.raises(PlanError) as refused:
        make_trainer(Limited(most=1000), 2).find_learning_rate(DataLoader(problem(), batch_size=4))
    return str(refused.value)


def test_trials_in_a_rank_of_a_launcher_are_refused() -> None:
    assert all("distributed find learning_rate --script" in text for text in run_ranks(find_in_a_rank, 2))


SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from distributed import Trainer

if __name__ == "__main__":
    torch.manual_seed(0)
    x = torch.randn(128, 8)
    trainer = Trainer(nn.Linear(8, 2), loss_fn=nn.CrossEntropyLoss(), optimizer="sgd", batch_size=8, epochs=3)
    trainer.fit(DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), shuffle=True))
    print("it has trained")
"""


def find(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "distributed.cli", "find", *words, "--script", "train.py"]
    return subprocess.run(command, cwd=folder, env=clean_environ(), capture_output=True, text=True, timeout=240)


def test_command_finds_a_learning_rate_of_a_script(tmp_path: Path) -> None:
    done = find(tmp_path, "learning_rate", "--num-gpus", "2", "device=cpu")
    assert done.returncode == 0, done.stderr
    assert "the loss falls fastest there" in done.stdout
    assert "it has trained" not in done.stdout
    assert (tmp_path / "learning-rate.svg").read_bytes().startswith(b"<?xml")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["learning-rate.svg", "train.py"]


def test_command_refuses_the_setting_that_is_wanted(tmp_path: Path) -> None:
    done = find(tmp_path, "batch_size", "batch_size=8")
    assert done.returncode == 3
    assert "batch_size is set (command line), and is what is to be found" in done.stderr


def test_suggestion_is_where_the_loss_falls_fastest() -> None:
    rates = [10 ** (place / 10 - 6) for place in range(70)]
    drawn = random.Random(0)
    falling = [2 / (1 + (rate / 0.01) ** 2) + (rate / 0.3) ** 2 + drawn.gauss(0, 0.02) for rate in rates]
    found = suggest(rates, falling)
    assert found is not None
    assert 0.003 < found < 0.03
    assert suggest(rates, [float(place) for place in range(70)]) is None
    assert suggest(rates[:2], [1.0, 0.5]) is None
    assert suggest(rates, [*falling[:60], math.nan, *falling[61:]]) is not None
    assert "falls at no learning rate" in str(LearningRateCurve(tuple(rates), tuple(map(float, range(70)))))
    assert BatchSizes({1: None}, 1 << 30).largest is None
