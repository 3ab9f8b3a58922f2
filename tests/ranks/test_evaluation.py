"""validate, test and predict on two ranks equal one process by hand: before and after a fit, on every kind of mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from distributed import Trainer
from distributed.core.errors import TaskError
from distributed.testing import run_ranks
from distributed.train.predictions.reader import Predictions
from tests.meshes import make_data, make_model

ROWS = 9  # of which the second rank has none in the last batch of 4
MODES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"backend": "fsdp"},
    "fsdp, whole on all": {"backend": "fsdp", "whole_model_on": "all"},
    "zero1": {"zero_stage": 1},
    "pipeline": {"pipeline_parallel": 2},
    "tensor": {"tensor_parallel": 2},
    "context": {"context_parallel": 2},
    "bf16": {"backend": "fsdp", "mixed_precision": "bf16"},
    "bitwise": {"reproducible": "bitwise"},
    "deepspeed": {"backend": "deepspeed", "zero_stage": 3},
    "lora": {"lora": 2},
    "lora, fsdp": {"lora": 2, "backend": "fsdp"},
    "meta": {"backend": "fsdp"},
    "meta, replicas": {},
}
TOLERANCE = {"bf16": 2e-2, "deepspeed": 1e-5}


def held_out() -> TensorDataset:
    ids, target = make_data(40).tensors
    return TensorDataset(ids[-ROWS:], target[-ROWS:])


class Streamed(IterableDataset):
    def __iter__(self) -> Any:
        return iter(held_out())


def by_hand(model: nn.Module) -> dict[str, Any]:
    ids, target = held_out().tensors
    with torch.no_grad():
        outputs = model(ids)
    hits = (outputs.argmax(1) == target).double().mean()
    loss = nn.functional.cross_entropy(outputs, target)
    return {"loss": float(loss), "accuracy": float(hits), "rows": outputs}


def evaluated(trainer: Trainer, folder: str) -> dict[str, Any]:
    loader = DataLoader(held_out(), batch_size=4, shuffle=True)  # in the order of the dataset all the same
    return {
        "val": trainer.validate(DataLoader(held_out(), batch_size=4)),
        "test": trainer.test({"a": held_out(), "b": DataLoader(held_out(), batch_size=5)}),
        "rows": trainer.predict(loader),
        "files": trainer.predict(loader, to=folder).path,
        "stream": trainer.predict(DataLoader(Streamed(), batch_size=2)),
        "streamed": trainer.predict(DataLoader(Streamed(), batch_size=2), to=f"{folder}-stream").path,
    }


def run(mode: str, folder: str, **settings: Any) -> dict[str, Any]:
    is_meta = mode.startswith("meta")
    model = make_model(meta=is_meta)
    options = {"num_gpus": 2, "batch_size": 4, "progress": False, "device": "cpu", "run_dir": f"{folder}/run"}
    trainer = Trainer(model, loss_fn=nn.CrossEntropyLoss(), epochs=1, **options | MODES[mode] | settings)
    found: dict[str, Any] = {}
    if is_meta:
        with pytest.raises(TaskError, match="the model has no weights"):
            trainer.validate(held_out())
    else:
        found["before"] = evaluated(trainer, f"{folder}/before") | {"hand": by_hand(model)}
    history = trainer.fit(make_data(16), held_out())
    found["fit"] = history.epochs[-1].metrics
    found["after"] = evaluated(trainer, f"{folder}/after")
    if trainer.is_main:
        found["after"]["hand"] = by_hand(model.eval())
        found["state"] = {name: float(value.double().sum()) for name, value in model.state_dict().items()}
    found["last"] = trainer.validate(held_out())
    if trainer.is_main:
        assert {n: float(v.double().sum()) for n, v in model.state_dict().items()} == found["state"], "it stays whole"
    return found


def run_all(folder: str) -> dict[str, dict[str, Any]]:
    return {mode: run(mode, f"{folder}/{place}") for place, mode in enumerate(MODES)}


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(run_all, 2, str(tmp_path_factory.mktemp("evaluation")))


def assert_equal(first: dict[str, Any], second: dict[str, Any], hand: dict[str, Any], tolerance: float) -> None:
    """Metrics and rows of both ranks are those by hand, in memory, in files and of a stream."""
    expected = {name: pytest.approx(hand[name], abs=tolerance) for name in ("loss", "accuracy")}
    assert first["val"] == {f"val_{name}": value for name, value in expected.items()}
    assert first["test"] == {f"test_{of}_{name}": value for of in "ab" for name, value in expected.items()}
    assert torch.allclose(first["rows"], hand["rows"], atol=tolerance)
    assert torch.equal(first["rows"], second["rows"])
    assert (first["val"], first["test"]) == (second["val"], second["test"])
    written = Predictions(first["files"])
    assert len(written) == ROWS
    assert torch.equal(written.load(), first["rows"])
    assert torch.equal(torch.stack(list(written)), first["rows"])
    assert torch.allclose(first["stream"], hand["rows"], atol=tolerance)
    assert torch.equal(Predictions(first["streamed"]).load(), first["stream"])


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("mode", MODES)
def test_evaluation_equals_one_process(mode: str, when: str, by_rank: list[dict[str, dict[str, Any]]]) -> None:
    first, second = (found[mode] for found in by_rank)
    if when not in first:
        return  # a model without weights is refused before a fit, as the run has checked
    assert_equal(first[when], second[when], first[when]["hand"], TOLERANCE.get(mode, 1e-6))


@pytest.mark.parametrize("mode", MODES)
def test_evaluation_after_fit_equals_its_last_validation(mode: str, by_rank: list[dict[str, dict[str, Any]]]) -> None:
    first, second = (found[mode] for found in by_rank)
    validated = {name: value for name, value in first["fit"].items() if name.startswith("val_")}
    assert first["after"]["val"] == pytest.approx(validated, abs=TOLERANCE.get(mode, 1e-6))
    assert first["last"] == second["last"] == pytest.approx(validated, abs=TOLERANCE.get(mode, 1e-6))
