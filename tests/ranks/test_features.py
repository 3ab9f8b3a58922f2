"""What a trainer does beside the plain step, on two real ranks: resume, streams, metrics, schedules, own losses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

from distributed import Trainer
from distributed.core.errors import CheckpointError
from distributed.testing import run_ranks

SAMPLES = 53


def problem(samples: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(x, (x[:, 0] > 0).long())


def model(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 2)).double()


def flat(trained: nn.Module) -> torch.Tensor:
    return torch.cat([value.double().flatten() for value in trained.state_dict().values()])


def settings(folder: str, **more: Any) -> dict[str, Any]:
    return {"num_gpus": 2, "batch_size": 4, "epochs": 2, "seed": 3, "progress": False, "run_dir": folder} | more


class Numbered(IterableDataset):
    """A stream of the problem; with `by_rank`, one that splits itself unevenly over the ranks."""

    def __init__(self, data: TensorDataset, by_rank: bool = False) -> None:
        self.data, self.by_rank = data, by_rank

    def __iter__(self):
        worker = get_worker_info()
        samples = list(self.data)
        if self.by_rank:
            cut = len(samples) // 3
            samples = samples[:cut] if torch.distributed.get_rank() == 0 else samples[cut:]
        return iter(samples[worker.id :: worker.num_workers] if worker else samples)


def test_resumed_run_ends_with_same_bytes(tmp_path: Path) -> None:
    """Stopped in the middle of an epoch; with dropout, accumulation, momentum, a schedule and data loader workers."""
    for same, steps, first, second in run_ranks(whole_and_resumed, 2, str(tmp_path)):
        assert (steps, second) == (30, 30)
        assert 12 < first < 20, "stopped in the middle of the second epoch of ten steps"
        assert same


def whole_and_resumed(folder: str) -> tuple[bool, int, int, int]:
    def train(name: str, stop_at: int, resume: bool) -> tuple[torch.Tensor, int]:
        trained = model(dropout=0.3)
        seen = {"steps": 0}

        def loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            seen["steps"] += 1
            if seen["steps"] == 2 * stop_at:  # two micro-batches a step
                os.kill(os.getpid(), signal.SIGINT)
            return nn.functional.cross_entropy(outputs, target)

        trainer = Trainer(
            trained,
            loss_fn=loss,
            optimizer="sgd",
            momentum=0.9,
            learning_rate=0.1,
            lr_schedule="cosine",
            warmup_steps=2,
            gradient_accumulation_steps=2,
            checkpoint_dir=f"{folder}/{name}",
            resume_from_checkpoint=resume,
            **settings(f"{folder}/run-{name}-{resume}", epochs=3),
        )
        with suppress(KeyboardInterrupt):
            trainer.fit(DataLoader(problem(150), batch_size=4, shuffle=True, num_workers=1))
        assert trainer.history is not None
        return flat(trained), trainer.history.steps

    whole, steps = train("whole", -1, False)
    _, first = train("cut", 12, False)
    resumed, second = train("cut", -1, True)
    return torch.equal(whole, resumed), steps, first, second


def test_stream_trains_as_a_map_dataset_does(tmp_path: Path) -> None:
    def train(data: Any, name: str, **more: Any) -> torch.Tensor:
        trained = model()
        Trainer(trained, learning_rate=0.05, **settings(f"{tmp_path}/{name}", **more)).fit(
            DataLoader(data, batch_size=4)
        )
        return flat(trained)

    def all_kinds() -> list[bool]:
        by_map = train(problem(), "map")
        shared = train(Numbered(problem()), "shared")
        return [bool(torch.allclose(by_map, shared, atol=1e-12)), not torch.equal(by_map, flat(model()))]

    assert run_ranks(all_kinds, 2) == [[True, True]] * 2


def test_unevenly_split_stream_loses_no_sample_and_ranks_agree(tmp_path: Path) -> None:
    """One rank has half of what the other has: nothing is lost, nobody hangs, and the weights agree."""

    def train() -> tuple[int, torch.Tensor]:
        trained = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
        trainer = Trainer(
            trained,
            iterable_split="dataset",
            gradient_accumulation_steps=2,
            **settings(str(tmp_path / "run"), epochs=1),
        )
        history = trainer.fit(DataLoader(Numbered(problem(), by_rank=True), batch_size=4))
        return history.samples, flat(trained)

    (first, one), (second, other) = run_ranks(train, 2)
    assert first == second == SAMPLES
    assert torch.equal(one, other)


def test_metrics_and_evaluation_match_one_process(tmp_path: Path) -> None:
    def margin(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return outputs.gather(1, target[:, None]).squeeze(1)

    def train() -> dict[str, float]:
        trained = model()
        trainer = Trainer(trained, metrics={"margin": margin}, **settings(str(tmp_path / "run"), epochs=1))
        history = trainer.fit(DataLoader(problem(), batch_size=4), DataLoader(problem(37), batch_size=5))
        with torch.no_grad():
            x, y = problem(37).tensors
            outputs = trained(x)
            expected = {
                "val_loss": nn.functional.cross_entropy(outputs, y).item(),
                "val_accuracy": (outputs.argmax(1) == y).double().mean().item(),
                "val_margin": margin(outputs, y).mean().item(),
            }
        found = history.epochs[-1].metrics
        return {name: found[name] - value for name, value in expected.items()}

    for differences in run_ranks(train, 2):
        assert differences == pytest.approx({"val_loss": 0, "val_accuracy": 0, "val_margin": 0}, abs=1e-9)


class OwnLoss(nn.Module):
    """Called with a dict of tensors, returns its loss as Hugging Face models do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layer = nn.Linear(5, 2).double()

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.layer(inputs)
        assert labels is not None
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def as_dict(samples: list[Any]) -> dict[str, torch.Tensor]:
    return {"inputs": torch.stack([x for x, _ in samples]), "labels": torch.stack([y for _, y in samples])}


def test_model_with_own_loss_and_dict_batches_matches_plain_one(tmp_path: Path) -> None:
    def train(name: str, trained: nn.Module, collate: Any) -> torch.Tensor:
        loader = DataLoader(problem(), batch_size=4, collate_fn=collate)
        Trainer(trained, learning_rate=0.05, **settings(f"{tmp_path}/{name}")).fit(loader)
        return flat(trained)

    def both() -> bool:
        own = OwnLoss()
        plain = nn.Linear(5, 2).double()
        plain.load_state_dict(own.layer.state_dict())
        return bool(torch.allclose(train("own", own, as_dict), train("plain", plain, None), atol=1e-12))

    assert run_ranks(both, 2) == [True, True]


def test_learning_rate_follows_scaling_warmup_and_decay(tmp_path: Path) -> None:
    """Scaling is applied only when asked for, warm-up and decay are the stated function of the step."""

    def rates(name: str, **more: Any) -> list[float]:
        run = tmp_path / name
        Trainer(
            model(), learning_rate=0.1, log_every_n_steps=1, **settings(str(run), num_gpus=1, epochs=1, **more)
        ).fit(problem(40))
        events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
        return [event["learning_rate"] for event in events if event["event"] == "StepEnded"]

    assert rates("plain") == pytest.approx([0.1] * 10)
    assert rates("sqrt", lr_scaling="sqrt", base_batch_size=1) == pytest.approx([0.2] * 10)
    assert rates("linear", lr_scaling="linear", base_batch_size=1) == pytest.approx([0.4] * 10)
    # each event is written after its step, when the rate of the next one is set
    linear = rates("decay", lr_schedule="linear", warmup_steps=5, min_lr_ratio=0.5)
    assert linear == pytest.approx([0.04, 0.06, 0.08, 0.1, 0.1, 0.09, 0.08, 0.07, 0.06, 0.05])


def test_resume_with_another_model_names_what_differs(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoints")
    Trainer(model(), **settings(str(tmp_path / "a"), num_gpus=1), checkpoint_dir=folder).fit(problem())
    other = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Dropout(), nn.Linear(9, 2)).double()
    resumed = Trainer(
        other, **settings(str(tmp_path / "b"), num_gpus=1), checkpoint_dir=folder, resume_from_checkpoint=True
    )
    with pytest.raises(
        CheckpointError, match=r"0\.weight is float64 \[8, 5\] in the checkpoint and float64 \[9, 5\] here"
    ):
        resumed.fit(problem())


def test_run_resized_from_1_to_2_ranks_in_mid_epoch_matches(tmp_path: Path) -> None:
    """The global batch stays, so the two histories come to the same weights."""

    def train(name: str, ranks: int, resume: bool, **more: Any) -> torch.Tensor:
        trained = model()
        options = settings(f"{tmp_path}/{name}", num_gpus=ranks, batch_size=8 // ranks, **more)
        trainer = Trainer(trained, checkpoint_dir=f"{tmp_path}/c-{name[0]}", resume_from_checkpoint=resume, **options)
        trainer.fit(DataLoader(problem(), batch_size=1, shuffle=True))
        return flat(trained)

    whole = train("whole", 1, False)
    train("cut-1", 1, False, max_steps=4)
    torch.testing.assert_close(train("cut-2", 2, True), whole, rtol=0, atol=1e-12)


def test_training_starts_from_imported_weights(tmp_path: Path) -> None:
    weights = model().state_dict()
    torch.save(weights, tmp_path / "weights.pt")
    command = [sys.executable, "-m", "distributed", "checkpoint", "import", str(tmp_path / "weights.pt")]
    done = subprocess.run(
        [*command, "--to", str(tmp_path / "checkpoints")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    other = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.0), nn.Linear(8, 2)).double()
    options = settings(str(tmp_path / "run"), num_gpus=1, epochs=1, learning_rate=1e-9)
    trainer = Trainer(other, checkpoint_dir=str(tmp_path / "checkpoints"), resume_from_checkpoint=True, **options)
    history = trainer.fit(problem())
    assert history.steps == 14
    for name, value in other.state_dict().items():
        torch.testing.assert_close(value, weights[name], rtol=1e-5, atol=1e-6)


def test_micro_batch_of_ignored_targets_gives_finite_metrics(tmp_path: Path) -> None:
    x, y = problem(32).tensors
    y = y.clone()
    y[8:16] = -100  # the second of four micro-batches
    data = TensorDataset(x, y)
    options = settings(str(tmp_path / "run"), num_gpus=1, batch_size=8, gradient_accumulation_steps=4, epochs=1)
    trainer = Trainer(model(), loss_fn=nn.CrossEntropyLoss(), loss_weighting="targets", **options)
    history = trainer.fit(data, DataLoader(data, batch_size=8))
    assert all(value == value for value in history.epochs[-1].metrics.values()), history.epochs[-1].metrics


def test_learning_rate_is_scaled_once_over_several_fits(tmp_path: Path) -> None:
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    for number in range(3):
        options = settings(str(tmp_path / str(number)), num_gpus=1, epochs=1)
        Trainer(trained, optimizer=optimizer, lr_scaling="linear", base_batch_size=2, **options).fit(problem())
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.2)
