"""Part of the data, in global steps: the same samples on any number of ranks and after a resume; runs that try."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import distributed
from distributed import Trainer, callbacks
from distributed.checkpoint.restore.reading import load
from distributed.core.config import DistributedConfig
from distributed.core.errors import ConfigError, PlanError
from distributed.core.history import History
from distributed.data.checks.ledger import check_ledgers
from distributed.data.order import shuffled_order
from distributed.testing import run_ranks

SAMPLES, GLOBAL_BATCH, EPOCHS, STEPS = 53, 12, 2, 3
VAL_BATCH = 7


def problem(samples: int = SAMPLES, seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x[:, :4].argmax(1))


WHOLE = problem()


class Read(Dataset[Any]):
    """The same sample by sample."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return WHOLE[index]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(list(problem()))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


DATA: dict[str, Any] = {"rows": problem(), "read": Read(), "stream": Stream()}
LIMIT = {"limit_train_batches": STEPS, "limit_val_batches": 2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "rows": ("rows", LIMIT),
    "read": ("read", LIMIT | {"num_workers": 1}),
    "stream": ("stream", LIMIT),
    "part": ("rows", {"limit_train_batches": 0.7, "limit_val_batches": 0.4}),  # 3.5 of 5 steps, 2.4 of 6 batches
    "overfit": ("rows", {"overfit_batches": STEPS}),
    "overfit read": ("read", {"overfit_batches": 0.6}),
    "accumulated": ("rows", LIMIT | {"gradient_accumulation_steps": 2}),
}
BITWISE = {"bitwise": ("rows", LIMIT | {"reproducible": "bitwise", "virtual_ranks": 2})}


# Three ranks train every way; one and two those in which their number could matter.
WORLDS = {1: ["part", "overfit"], 2: ["stream", "accumulated", *BITWISE], 3: list(CASES)}


def order_of(name: str, epoch: int) -> list[int]:
    is_shuffled = "overfit" not in name and name != "stream"
    return (shuffled_order(SAMPLES, 0, epoch) if is_shuffled else list(range(SAMPLES)))[: STEPS * GLOBAL_BATCH]


def by_hand(name: str, epochs: int = EPOCHS) -> tuple[torch.Tensor, list[float]]:
    """Weights, and the validation losses; the rate falls over the steps of the limited run."""
    model, data, total = make_model(), problem(), STEPS * EPOCHS
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), []
    validation = data[: STEPS * GLOBAL_BATCH] if "overfit" in name else problem(40, seed=2)[: 2 * VAL_BATCH]
    for step in range(STEPS * epochs):
        at, rows = step % STEPS * GLOBAL_BATCH, order_of(name, step // STEPS)
        x, y = data[rows[at : at + GLOBAL_BATCH]]
        optimizer.param_groups[0]["lr"] = 0.5 * (1 - step / total) if name != "stream" else 0.5
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if (step + 1) % STEPS == 0:
            with torch.no_grad():
                found.append(F.cross_entropy(model(validation[0]), validation[1]).item())
    return flat(model.state_dict()), found


def flat(state: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([value.flatten() for value in state.values()])


def fit(name: str, ranks: int, run_dir: str, **more: Any) -> History:
    data, settings = (CASES | BITWISE)[name]
    size = GLOBAL_BATCH // ranks // settings.get("gradient_accumulation_steps", 1)
    how: dict[str, Any] = {"num_gpus": ranks, "batch_size": size, "epochs": EPOCHS, "device": "cpu", "progress": False}
    schedule = {} if data == "stream" else {"lr_schedule": "linear"}
    model = make_model()
    trainer = Trainer(
        model,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9),
        run_dir=run_dir,
        **how | schedule | settings | more,
    )
    loader = DataLoader(DATA[data], batch_size=size, shuffle=data != "stream")
    return trainer.fit(loader, DataLoader(problem(40, seed=2), batch_size=VAL_BATCH))


def fit_all(ranks: int, folder: str) -> dict[str, tuple[torch.Tensor, list[float], int]]:
    found = {}
    for name in WORLDS[ranks]:
        history = fit(name, ranks, f"{folder}/{name}", sample_ledger=True)
        weights = flat(load(history.checkpoint, ranks=()).shared["model"])
        report = check_ledgers(Path(history.run_dir) / "ledger", SAMPLES, limit=STEPS * GLOBAL_BATCH)
        assert name == "stream" or report.samples == EPOCHS * STEPS * GLOBAL_BATCH, report
        assert report.is_exact or name == "stream", report
        found[name] = weights, history["val_loss"], history.samples
    return found


@pytest.mark.parametrize("ranks", WORLDS)
def test_limited_run_takes_the_same_samples_on_any_ranks(ranks: int, tmp_path: Path) -> None:
    for found in run_ranks(fit_all, ranks, ranks, str(tmp_path)):
        for name, (weights, losses, samples) in found.items():
            expected, expected_losses = by_hand(name)
            torch.testing.assert_close(weights, expected, rtol=0, atol=1e-12, msg=name)
            assert losses == pytest.approx(expected_losses, abs=1e-12), name
            assert samples == EPOCHS * STEPS * GLOBAL_BATCH, name


def resume_all(folder: str) -> dict[str, Any]:
    """From the middle of the second epoch; then with another limit."""
    found: dict[str, Any] = {}
    again: dict[str, Any] = {"resume_from_checkpoint": True}
    for name in ("rows", "read", "stream", "overfit"):
        place = {"checkpoint_dir": f"{folder}/{name}-saved", "lr_schedule": "constant"}
        stopped = fit(name, 2, f"{folder}/{name}", max_steps=STEPS + 1, **place)
        history = fit(name, 2, f"{folder}/{name}-again", **again, **place)
        assert (stopped.steps, history.epochs[-1].steps) == (STEPS + 1, STEPS - 1)
        whole = fit(name, 2, f"{folder}/{name}-whole", lr_schedule="constant")
        both = [flat(load(each.checkpoint, ranks=()).shared["model"]) for each in (history, whole)]
        found[name] = torch.equal(*both), history.steps
    place = {"checkpoint_dir": f"{folder}/longer-saved"}
    fit("rows", 2, f"{folder}/longer", max_steps=STEPS + 1, **place)
    longer = fit("rows", 2, f"{folder}/longer-again", limit_train_batches=4, **again, **place)
    found["longer"] = longer.steps
    events = [json.loads(line) for line in (Path(longer.run_dir) / "events.jsonl").read_text().splitlines()]
    found["told"] = [event["message"] for event in events if event["event"] == "Warned"]
    return found


def test_limited_run_resumes_in_the_middle_with_same_bytes(tmp_path: Path) -> None:
    for found in run_ranks(resume_all, 2, str(tmp_path)):
        assert all(found[name] == (True, EPOCHS * STEPS) for name in ("rows", "read", "stream", "overfit")), found
        assert found["longer"] == STEPS + 4  # the second epoch goes on to its new limit
        assert any("limit_train_batches 3 → 4" in line for line in found["told"])


def own_loop(folder: str, settings: dict[str, Any]) -> tuple[History, list[int]]:
    run = distributed.start(batch_size=6, epochs=EPOCHS, progress=False, run_dir=folder, **settings)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    validation = DataLoader(problem(40, seed=2), batch_size=VAL_BATCH)
    loader = DataLoader(problem(), batch_size=6, shuffle=True)
    model, optimizer, batches, val = run.prepare(model, optimizer, loader, validation)
    evaluated = []
    for _ in run.epochs():
        for x, y in batches:
            run.backward(F.cross_entropy(model(x), y))
            run.step(optimizer)
        evaluated.append(sum(len(x) for x, _ in val))
    assert run.history is not None
    return run.history, evaluated


def own_loops(folder: str) -> list[tuple[History, list[int]]]:
    return [own_loop(f"{folder}/limited", LIMIT), own_loop(f"{folder}/tried", {"fast_dev_run": 2})]


def test_loop_of_the_users_own_is_limited_or_tried(tmp_path: Path) -> None:
    first, second = run_ranks(own_loops, 2, str(tmp_path))
    assert [history.steps for history, _ in first] == [EPOCHS * STEPS, 2]
    evaluated = [[sum(each) for each in zip(a, b, strict=True)] for (_, a), (_, b) in zip(first, second, strict=True)]
    assert evaluated == [[2 * VAL_BATCH] * EPOCHS, [2 * VAL_BATCH]]
    assert [bool(history.checkpoint) for history, _ in first] == [True, False]


@pytest.mark.parametrize("ranks", [1, 2])
def test_fast_dev_run_tries_everything_and_keeps_nothing(ranks: int, tmp_path: Path) -> None:
    """Two ranks are started by fit: the model comes home without a checkpoint."""
    model, run_dir, kept = make_model(), tmp_path / "run", tmp_path / "kept"
    before = flat(model.state_dict()).clone()
    trainer = Trainer(
        model, num_gpus=ranks, batch_size=4, epochs=50, tensorboard=True, checkpoint_dir=kept, run_dir=run_dir,
        fast_dev_run=2, progress=False, device="cpu", resume_from_checkpoint=True, lr_schedule="cosine",
        callbacks=[callbacks.EMA(0.5), callbacks.SWA(start_epoch=40)], keep_best="val_loss", checkpoint_frequency=1,
    )  # fmt: skip
    history = trainer.fit(DataLoader(problem(), batch_size=4, shuffle=True), DataLoader(problem(40), batch_size=4))
    assert (history.steps, history.samples, len(history["val_loss"])) == (2, 8 * ranks, 1)
    assert not torch.equal(flat(model.state_dict()), before)
    assert (history.checkpoint, History.load(Path(history.run_dir) / "history.json").checkpoint) == ("", "")
    assert not kept.exists()
    assert [path.name for path in run_dir.iterdir()] == ["dev-runs"]  # the directory is left to the run that is tried
    tried = Path(history.run_dir)
    assert tried.parent == run_dir / "dev-runs"
    assert {path.name for path in tried.iterdir()} & {"checkpoints", "passing", "tensorboard"} == set()
    events = [json.loads(line) for line in (tried / "events.jsonl").read_text().splitlines()]
    said = [line for line in events[0]["decisions"] if "fast_dev_run" in line]
    assert len(said) == 1
    assert "checkpoint_dir" in said[0]
    assert "tensorboard" in said[0]
    with pytest.warns(UserWarning, match="nothing is written"):
        trainer.save_model(tmp_path / "model.pt")
    assert not (tmp_path / "model.pt").exists()
    trained = flat(model.state_dict()).clone()  # what a script does next is tried too
    with pytest.warns(UserWarning, match="a copy of the model"):
        assert torch.equal(flat(trainer.averaged_model("SWA").state_dict()), trained)
    with pytest.warns(UserWarning, match="stays as it is"):
        assert trainer.load_best().value == history["val_loss"][0]
    with pytest.warns(UserWarning, match="stays as it is"):
        trainer.load_checkpoint("best")
    assert torch.equal(flat(model.state_dict()), trained)


@pytest.mark.parametrize(
    ("settings", "error", "told"),
    [
        ({"limit_train_batches": 0.5}, PlanError, "limit_train_batches=0.5 of a stream"),
        ({"overfit_batches": 2}, PlanError, "overfit_batches=2 of a stream"),
        ({"limit_val_batches": 2}, PlanError, "but no validation data"),
        ({"limit_train_batches": 2, "overfit_batches": 2}, ConfigError, "both overfit_batches and limit_train_batches"),
    ],
)
def test_limit_that_cannot_be_kept_is_refused(
    settings: dict[str, Any], error: type[Exception], told: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=told):
        Trainer(make_model(), num_gpus=1, batch_size=4, run_dir=tmp_path / "run", **settings).fit(Stream())


def test_part_without_a_whole_step_is_refused(tmp_path: Path) -> None:
    config = DistributedConfig(num_gpus=1, batch_size=4, limit_train_batches=0.01, run_dir=str(tmp_path / "run"))
    with pytest.raises(PlanError, match=r"limit_train_batches=0\.01 of 14 steps"):
        Trainer(make_model(), config).fit(problem())
