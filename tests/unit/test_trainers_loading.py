"""A trained model taken further: loaded, measured, written for other programs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

from distributed import Trainer
from distributed.checkpoint.exchange.catalog import open_one
from distributed.checkpoint.exchange.export import export_checkpoint
from distributed.cli.checkpoint.transfers import choose
from distributed.core.errors import CheckpointError, ConfigError, DistributedError, TaskError

STEPS = 4  # of an epoch


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


def data(samples: int = 4 * STEPS, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(samples, 4, generator=generator), torch.randint(0, 2, (samples,), generator=generator)
    )


def options(**more: Any) -> dict[str, Any]:
    return {"num_gpus": 1, "batch_size": 4, "progress": False, "device": "cpu"} | more


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """A run whose best checkpoint is not its last."""
    folder = tmp_path_factory.mktemp("loading") / "run"
    settings = {"epochs": 4, "keep_best": "val_loss", "checkpoint_frequency": 1, "learning_rate": 0.5}
    trainer = Trainer(make_model(), optimizer="sgd", mixed_precision="bf16", run_dir=folder, **options(**settings))
    torch.manual_seed(3)
    trainer.fit(data(), data(12, seed=1))
    return trainer


def best_step(trainer: Trainer) -> int:
    assert trainer.history is not None
    return min(trainer.history.evaluations, key=lambda record: record.metrics["val_loss"]).step


def test_chosen_checkpoint_is_loaded(trained: Trainer) -> None:
    history = trained.history
    assert history is not None
    by_step = {record.step: record.metrics for record in history.evaluations}
    trainer = Trainer(make_model(), mixed_precision="bf16", **options(run_dir=history.run_dir))
    last, best = max(by_step), best_step(trained)
    for which, step in (("last", last), ("best", best), (STEPS, STEPS), (history.checkpoint, last)):
        trainer.load_checkpoint(which)
        torch.manual_seed(3)
        assert trainer.validate(data(12, seed=1)) == pytest.approx(by_step[step], abs=1e-6), which


def test_run_is_taken_up_by_its_directory(trained: Trainer, tmp_path: Path) -> None:
    history = trained.history
    assert history is not None
    moved = tmp_path / "moved"
    shutil.copytree(history.run_dir, moved)
    found = Trainer.from_run(moved, make_model(), "best", num_gpus=1, progress=False, device="cpu")
    assert (found.config.mixed_precision, found.config.batch_size, found.config.epochs) == ("bf16", 4, 1)
    assert found.best_accuracy == trained.best_accuracy
    rows = found.predict(data(12, seed=1))
    assert rows.dtype == torch.bfloat16
    found.save_model(tmp_path / "best.safetensors")
    exported = load_file(tmp_path / "best.safetensors")
    assert all(torch.equal(exported[name], value) for name, value in found.model.state_dict().items())


def test_best_checkpoint_is_the_one_that_is_exported(trained: Trainer, tmp_path: Path) -> None:
    assert trained.history is not None
    best = Trainer.from_run(trained.history.run_dir, make_model(), "best", **options())
    path = choose(trained.history.run_dir, best=True, step=None)
    assert path == choose(trained.history.run_dir, best=False, step=best_step(trained))
    export_checkpoint(open_one(path), str(tmp_path / "best.safetensors"))
    exported = load_file(tmp_path / "best.safetensors")
    assert all(torch.equal(exported[name], value) for name, value in best.model.state_dict().items())


def test_refused_checkpoint_of_another_model_changes_nothing(trained: Trainer) -> None:
    assert trained.history is not None
    other = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3), nn.Linear(3, 3))
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"4.bias is only in this model; 3.weight is \[2, 8\] there") as refused:
        Trainer(other, **options()).load_checkpoint(trained.history.checkpoint)
    assert "is of another model" in str(refused.value)
    assert all(torch.equal(other.state_dict()[name], value) for name, value in before.items())


def test_checkpoint_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="which checkpoint is 'best'"):
        Trainer(make_model(), **options()).load_checkpoint("best")
    Trainer(make_model(), **options(run_dir=tmp_path / "run")).fit(data())
    with pytest.raises(CheckpointError, match="is known to be the best"):
        Trainer.from_run(tmp_path / "run", make_model(), "best")
    with pytest.raises(TaskError, match="there is no trained model to save"):
        Trainer(make_model(), **options()).save_model(tmp_path / "x.safetensors")
    with pytest.raises(DistributedError):
        Trainer.from_run(tmp_path / "nowhere", make_model())


def test_model_on_the_meta_device_gets_its_weights(trained: Trainer) -> None:
    assert trained.history is not None
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
    trainer = Trainer.from_run(trained.history.run_dir, model, **options())
    assert torch.equal(trainer.predict(data()), trained.predict(data()))


def test_adapters_are_loaded_with_their_run(tmp_path: Path) -> None:
    def base() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))

    for name, alone in (("whole", False), ("alone", True)):
        trainer = Trainer(base(), lora=2, save_adapters_only=alone, **options(run_dir=tmp_path / name))
        trainer.fit(data())
        again = Trainer.from_run(tmp_path / name, base(), num_gpus=1, progress=False, device="cpu")
        assert torch.equal(again.predict(data()), trainer.predict(data()))


def tiny_bert() -> BertForSequenceClassification:
    torch.manual_seed(2)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    return BertForSequenceClassification(BertConfig(vocab_size=32, max_position_embeddings=16, **sizes))


class Sentences(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(6) + index
        return {"input_ids": ids, "attention_mask": torch.ones(6, dtype=torch.long), "labels": torch.tensor(index % 2)}


class Words:
    """As a tokenizer."""

    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "words.txt").write_text("a b c")


def test_hugging_face_folder_is_loaded_by_from_pretrained(tmp_path: Path) -> None:
    model = tiny_bert()
    trainer = Trainer(model, **options(run_dir=tmp_path / "run"))
    trainer.fit(Sentences())
    trainer.save_pretrained(tmp_path / "bert", Words())
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "bert")
    assert (tmp_path / "bert/words.txt").exists()
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in model.state_dict().items())
    with pytest.raises(TaskError, match="a Sequential has no save_pretrained"):
        Trainer(make_model(), **options()).save_pretrained(tmp_path / "x")


def test_program_computes_what_the_model_does(tmp_path: Path) -> None:
    model = make_model()
    Trainer(model, **options()).export(tmp_path / "a/model.pt2", (torch.randn(3, 4), torch.zeros(3)))
    program = torch.export.load(tmp_path / "a/model.pt2").module()
    inputs = torch.randn(7, 4)
    assert torch.allclose(program(inputs), model.eval()(inputs), atol=1e-6)
    bert, batch = tiny_bert(), torch.utils.data.default_collate([Sentences()[index] for index in range(3)])
    Trainer(bert, **options()).export(tmp_path / "bert.pt2", batch)
    program = torch.export.load(tmp_path / "bert.pt2").module()
    more = torch.utils.data.default_collate([Sentences()[index] for index in range(5)])
    labels = more.pop("labels")
    assert labels is not None
    assert torch.allclose(program(**more), bert.eval()(**more).logits, atol=1e-5)


def test_onnx_program_computes_what_the_model_does(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="the onnx extra is not installed")
    pytest.importorskip("onnxscript", reason="the onnx extra is not installed")
    model = make_model()
    Trainer(model, **options()).export(tmp_path / "model.onnx", (torch.randn(3, 4), torch.zeros(3)))
    session = runtime.InferenceSession(str(tmp_path / "model.onnx"))
    inputs = torch.randn(7, 4)
    (found,) = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})
    assert torch.allclose(torch.from_numpy(found), model.eval()(inputs), atol=1e-5)


def test_program_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight if x.sum() > 0 else x

    trainer = Trainer(Branches(), **options())
    with pytest.raises(TaskError, match="Branches cannot be exported"):
        trainer.export(tmp_path / "model.pt2", torch.ones(2, 4))
    with pytest.raises(ConfigError, match="does not say in which form"):
        trainer.export(tmp_path / "model.bin", torch.ones(2, 4))
    assert not list(tmp_path.iterdir())
