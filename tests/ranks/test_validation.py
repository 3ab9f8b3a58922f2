"""What is measured on validation sets equals one process by hand: several sets, whole-set metrics, within an epoch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics.classification import MulticlassAUROC

from distributed import Trainer, whole_set
from distributed.core.errors import TaskError
from distributed.core.history import History
from distributed.testing import run_ranks

WIDTH, BATCH, TRAINED, CLEAN, FEW = 8, 6, 36, 23, 2
STEPS = TRAINED // BATCH  # an epoch


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)]
    return nn.Sequential(nn.Linear(4, WIDTH), nn.Sequential(*blocks), nn.Linear(WIDTH, 2)).double()


def make_data(samples: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, (inputs.sum(1) + torch.randn(samples, generator=generator) > 0).long())


class Words(IterableDataset):
    def __iter__(self) -> Any:
        return iter(make_data(CLEAN, 2))


def auc(outputs: torch.Tensor, target: torch.Tensor) -> float:
    return float(roc_auc_score(target, outputs[:, 1] - outputs[:, 0]))


def make_metrics() -> dict[str, Any]:
    many = {"num_classes": 2, "average": None}
    return {
        "auc": whole_set(auc),
        "auroc": Auroc(num_classes=2),
        "f1": torchmetrics.F1Score("multiclass", **many),
        "both": torchmetrics.MetricCollection({"a": torchmetrics.Recall("multiclass", **many), "s": Spread()}),
        "margin": lambda outputs, target: outputs[:, 1] - outputs[:, 0],
    }


class Auroc(MulticlassAUROC):
    """Of probabilities: it takes outputs between 0 and 1 for such, batch by batch, so logits must not be left to it."""

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        super().update(preds.softmax(-1), target)


class Spread(torchmetrics.Metric):
    """With every kind of state that torchmetrics has."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("most", torch.full((), -1e9, dtype=torch.float64), dist_reduce_fx="max")
        self.add_state("least", torch.full((), 1e9, dtype=torch.float64), dist_reduce_fx="min")
        self.add_state("kept", [], dist_reduce_fx="cat")
        self.add_state("rows", [], dist_reduce_fx=None)

    def update(self, outputs: torch.Tensor, target: torch.Tensor) -> None:
        self.total += outputs.sum()
        self.most, self.least = torch.maximum(self.most, outputs.max()), torch.minimum(self.least, outputs.min())
        self.kept.append(outputs[:, 0])
        self.rows += list(outputs)

    def compute(self) -> dict[str, torch.Tensor]:
        kept = torch.cat(self.kept) if isinstance(self.kept, list) else self.kept
        spread = torch.stack(self.rows).std()
        return {"total": self.total, "range": self.most - self.least, "median": kept.median(), "std": spread}


def by_hand(model: nn.Module, data: TensorDataset) -> dict[str, float]:
    """In one batch, without anything of ours."""
    inputs, target = data.tensors
    with torch.no_grad():
        outputs = model.eval()(inputs)
    model.train()
    recall = torchmetrics.functional.recall(outputs, target, "multiclass", num_classes=2, average=None)
    f1 = torchmetrics.functional.f1_score(outputs, target, "multiclass", num_classes=2, average=None)
    found = {
        "loss": nn.functional.cross_entropy(outputs, target),
        "accuracy": (outputs.argmax(1) == target).double().mean(),
        "margin": (outputs[:, 1] - outputs[:, 0]).mean(),
        "both_s_total": outputs.sum(),
        "both_s_range": outputs.max() - outputs.min(),
        "both_s_median": outputs[:, 0].median(),
        "both_s_std": outputs.std(),
    }
    for place in range(2):
        found |= {f"f1_{place}": f1[place], f"both_a_{place}": recall[place]}
    values = {name: float(value) for name, value in found.items()}
    return values | {"auc": auc(outputs, target), "auroc": auc(outputs, target)}


def reference(steps: list[int]) -> dict[int, dict[str, float]]:
    """The metrics after these steps of a plain loop, by step."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, target = make_data(TRAINED, 1).tensors
    found = {}
    for step in range(1, max(steps) + 1):
        at = (step - 1) % STEPS * BATCH
        loss = nn.functional.cross_entropy(model(inputs[at : at + BATCH]), target[at : at + BATCH])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in steps:
            sets = {"clean": by_hand(model, make_data(CLEAN, 2)), "few": by_hand(model, make_data(FEW, 3))}
            sets["stream"] = sets["clean"]
            found[step] = {f"val_{of}_{name}": value for of, own in sets.items() for name, value in own.items()}
    return found


def fit(ranks: int, folder: str, **settings: Any) -> History:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"num_gpus": ranks, "epochs": 2, "progress": False, "device": "cpu", "run_dir": folder, "batch_size": 3}
    options["batch_size"] = BATCH // (ranks // settings.get("pipeline_parallel", 1))
    trainer = Trainer(model, optimizer=optimizer, metrics=make_metrics(), **options | settings)
    sets = {
        "clean": DataLoader(make_data(CLEAN, 2), batch_size=4),
        "few": DataLoader(make_data(FEW, 3), batch_size=4),
        "stream": DataLoader(Words(), batch_size=5),
    }
    return trainer.fit(make_data(TRAINED, 1), sets)


MODES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"backend": "fsdp"},
    "pipeline": {"pipeline_parallel": 2},
}


def on_two_ranks(folder: str) -> dict[str, History]:
    return {mode: fit(2, f"{folder}/{mode}", val_check_interval=4, **settings) for mode, settings in MODES.items()}


def on_three_ranks(folder: str) -> dict[str, History]:
    return {"three": fit(3, f"{folder}/three", val_check_interval=4)}


@pytest.fixture(scope="module")
def histories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, History]:
    folder = str(tmp_path_factory.mktemp("validation"))
    one = {"one": fit(1, f"{folder}/one", val_check_interval=4)}
    runs: list[tuple[int, Callable[[str], dict[str, History]]]] = [(2, on_two_ranks), (3, on_three_ranks)]
    for ranks, function in runs:
        by_rank = run_ranks(function, ranks, folder)
        for found in by_rank[1:]:
            for name, history in found.items():
                mine = [record.metrics for record in by_rank[0][name].evaluations]
                assert [record.metrics for record in history.evaluations] == mine, "the same on every rank"
        one |= by_rank[0]
    return one


@pytest.mark.parametrize("mode", ["one", *MODES, "three"])
def test_sets_measure_what_one_process_measures(mode: str, histories: dict[str, History]) -> None:
    expected = reference([4, 8, 12])
    history = histories[mode]
    assert [(record.step, record.epoch) for record in history.evaluations] == [(4, 0), (8, 1), (12, 1)]
    for record in history.evaluations:
        wanted = expected[record.step]
        assert record.metrics.keys() == wanted.keys()
        assert record.metrics == pytest.approx(wanted, rel=1e-6, abs=1e-6)
    last = {name: value for name, value in history.epochs[1].metrics.items() if name.startswith("val_")}
    assert last == history.evaluations[-1].metrics


def test_history_file_has_all_evaluations(histories: dict[str, History]) -> None:
    history = histories["one"]
    assert History.load(Path(history.run_dir) / "history.json").evaluations == history.evaluations


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.steps = nn.Linear(4, 2).double(), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += self.training
        if not self.training:
            raise ValueError("no such column")
        return self.layer(x)


def test_failing_validation_step_is_found_before_training(tmp_path: Path) -> None:
    model = Failing()
    trainer = Trainer(model, num_gpus=1, batch_size=4, progress=False, run_dir=tmp_path, device="cpu")
    with pytest.raises(ValueError, match="no such column"):
        trainer.fit(make_data(TRAINED, 1), make_data(CLEAN, 2))
    assert model.steps == 0


class AlwaysNoisy(nn.Module):
    """Draws random numbers in validation too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, 0.3, training=True)


def test_sanity_check_leaves_no_trace(tmp_path: Path) -> None:
    def losses(name: str, **settings: Any) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), AlwaysNoisy(), nn.Linear(8, 2)).double()
        options = {"num_gpus": 1, "batch_size": 4, "progress": False, "run_dir": tmp_path / name, "device": "cpu"}
        return Trainer(model, **options | settings).fit(make_data(TRAINED, 1), make_data(CLEAN, 2))["val_loss"]

    assert losses("with") == losses("without", sanity_val_steps=0)


def test_metric_that_is_not_measured_is_found_before_training(tmp_path: Path) -> None:
    model = make_model()
    settings = {"keep_best": "min:val_mae", "keep_last": 1, "checkpoint_frequency": 1}
    trainer = Trainer(model, num_gpus=1, batch_size=4, progress=False, run_dir=tmp_path, device="cpu", **settings)
    before = model[0].weight.detach().clone()
    with pytest.raises(TaskError, match="keep_best names 'val_mae', which is not measured"):
        trainer.fit(make_data(TRAINED, 1), make_data(CLEAN, 2))
    assert torch.equal(model[0].weight, before)
