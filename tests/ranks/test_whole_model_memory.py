"""A model that memory does not hold whole after its training stays as it is; the run ends well and says what to do."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

from distributed import Trainer
from distributed.checkpoint.restore.reading import load
from distributed.core.errors import CheckpointError, TaskError
from distributed.testing import run_ranks
from tests.ranks.test_model_after_fit import Tied


def memory(free: int) -> Any:
    return lambda: SimpleNamespace(available=free, total=free * 2)


def make_trainer(model: nn.Module, **settings: Any) -> Trainer:
    return Trainer(model, loss_fn=nn.CrossEntropyLoss(), batch_size=2, device="cpu", progress=False, **settings)


def fit(trainer: Trainer, folder: str, **settings: Any) -> list[str]:
    """What `fit` warned of."""
    data = TensorDataset(torch.randint(0, 8, (16,)), torch.randint(0, 8, (16,)))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.fit(data, run_dir=folder, max_steps=2, **settings)
    return [str(one.message) for one in told]


def train_with_no_memory(folder: str) -> dict[str, dict[str, Any]]:
    found, real = {}, psutil.virtual_memory
    for whole_on in ("rank0", "all"):
        torch.manual_seed(0)
        model = Tied()
        needed = sum(parameter.nbytes for parameter in model.parameters())
        psutil.virtual_memory = memory(needed // 2)  # type: ignore[assignment]
        trainer = make_trainer(model, backend="fsdp", whole_model_on=whole_on)
        told = fit(trainer, f"{folder}/{whole_on}")
        trainer.save_model(f"{folder}/{whole_on}.safetensors")
        psutil.virtual_memory = real
        is_whole = all(type(value) is torch.Tensor for value in model.state_dict().values())
        try:
            fit(trainer, f"{folder}/{whole_on}-again")
            is_refused = False
        except TaskError:
            is_refused = True
        found[whole_on] = {"told": told, "is whole": is_whole, "is refused": is_refused}
        if trainer.is_main:
            assert trainer.history is not None
            found[whole_on]["saved"] = load(trainer.history.checkpoint, ranks=()).shared["model"]
            found[whole_on]["file"] = load_file(f"{folder}/{whole_on}.safetensors")
    return found


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(train_with_no_memory, 2, str(tmp_path_factory.mktemp("short")))


@pytest.mark.parametrize("whole_on", ["rank0", "all"])
def test_model_stays_sharded_where_rank_0_lacks_memory(whole_on: str, short: list[dict[str, dict[str, Any]]]) -> None:
    ranks = [rank[whole_on] for rank in short]
    for found in ranks:
        assert not found["is whole"]
        assert found["is refused"], "no rank has the model, so none can train it again"
    (said,) = [text for text in ranks[0]["told"] if "stays sharded" in text]
    assert "MiB for 1 rank; the node of rank 0 has 0.0 MiB of memory free" in said
    assert 'trainer.save_model("model.safetensors")' in said
    assert not any("stays sharded" in text for text in ranks[1]["told"])
    file, saved = ranks[0]["file"], ranks[0]["saved"]
    assert file.keys() == saved.keys() - {"head.weight"}
    assert all(torch.equal(value, saved[name]) for name, value in file.items())


def test_fit_that_cannot_hold_its_model_says_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Tied()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    needed = sum(parameter.nbytes for parameter in model.parameters())
    trainer = make_trainer(model, num_gpus=2)
    monkeypatch.setattr(psutil, "virtual_memory", memory(needed // 2))
    with pytest.raises(CheckpointError, match="MiB of memory free") as refused:
        fit(trainer, str(tmp_path / "run"))
    monkeypatch.undo()
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    assert f"distributed checkpoint export {checkpoint} --to model.safetensors" in str(refused.value)
    assert not torch.equal(
        load(str(checkpoint), ranks=()).shared["model"]["embedding.weight"], before["embedding.weight"]
    )
