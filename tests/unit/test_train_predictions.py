"""Predictions on one rank: every row once and in order, of any shape, in memory and in files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from transformers.modeling_outputs import SequenceClassifierOutput

from distributed import Predictions, Trainer
from distributed.core.errors import ConfigError, DataError, TaskError
from distributed.train.predictions.files import ShardWriter, write_index
from distributed.train.predictions.pieces import RowPiece

ROWS = 11


class Numbers(Dataset):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((2,), float(index))


class Counting(IterableDataset):
    def __iter__(self) -> Any:
        return (torch.full((2,), float(index)) for index in range(ROWS))


class Words(Dataset):
    """Batches are padded to a length of their own."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"ids": torch.arange(1 + index % 5), "labels": torch.tensor(index)}


def padded(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids = nn.utils.rnn.pad_sequence([sample["ids"] for sample in samples], batch_first=True)
    return {"ids": ids, "labels": torch.stack([sample["labels"] for sample in samples])}


class Embeds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Embedding(8, 3)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> SequenceClassifierOutput:
        logits = self.layer(ids)
        return SequenceClassifierOutput(loss=None if labels is None else logits.sum(), logits=logits)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def trainer_of(model: nn.Module | None = None, **settings: Any) -> Trainer:
    return Trainer(model or Twice(), num_gpus=1, batch_size=4, progress=False, device="cpu", **settings)


def rows() -> torch.Tensor:
    return 2 * torch.arange(float(ROWS))[:, None].expand(-1, 2)


@pytest.mark.parametrize(
    "data",
    [
        Numbers(),
        DataLoader(Numbers(), batch_size=3, shuffle=True),
        DataLoader(Numbers(), batch_size=3, drop_last=True, num_workers=2),
        Counting(),
        TensorDataset(rows() / 2),
        TensorDataset(rows() / 2, torch.zeros(ROWS)),
    ],
    ids=["dataset", "shuffling", "dropping", "stream", "tensors", "with targets"],
)
def test_every_row_is_predicted_once_in_order(data: Any) -> None:
    assert torch.equal(trainer_of().predict(data), rows())


def test_model_outputs_are_predicted_without_their_loss() -> None:
    found = trainer_of(Embeds()).predict(DataLoader(Words(), batch_size=ROWS, collate_fn=padded))
    assert isinstance(found, torch.Tensor)
    assert found.shape == (ROWS, 5, 3)


def test_rows_of_different_shapes_are_a_list(tmp_path: Path) -> None:
    loader = DataLoader(Words(), batch_size=3, collate_fn=padded)
    trainer = trainer_of(Embeds())
    found = trainer.predict(loader)
    lengths = [max(1 + index % 5 for index in range(at, min(at + 3, ROWS))) for at in range(0, ROWS, 3)]
    assert [tuple(row.shape) for row in found] == [(lengths[row // 3], 3) for row in range(ROWS)]
    written = trainer.predict(loader, to=tmp_path / "p")
    assert all(map(torch.equal, written, found))
    assert all(map(torch.equal, written.load(), found))


@pytest.mark.parametrize(
    "step",
    [
        lambda model, x: {"x": model(x), "text": [f"row {int(row[0])}" for row in x], "deep": (x, {"half": x[:, :1]})},
        lambda model, x: [
            {"box": x[row, :1].repeat(int(x[row, 0])), "score": 0.5, "none": None} for row in range(len(x))
        ],
        lambda model, x: (x, {"text": [str(row) for row in x], "deep": list(x), "half": (x.unsqueeze(2), x)}),
    ],
    ids=["dict", "list of rows", "shared memory"],
)
def test_own_predictions_are_kept_as_they_are(step: Any, tmp_path: Path) -> None:
    trainer = trainer_of(predict_step=step)
    whole = trainer.predict(Numbers())
    one = step(trainer.model, torch.stack([Numbers()[index] for index in range(ROWS)]))
    written = trainer.predict(Numbers(), to=tmp_path / "p")
    assert len(written) == ROWS
    for found in (whole, written.load()):
        assert_same(found, one)
    if isinstance(one, list):
        for mine, theirs in zip(written, one, strict=True):
            assert_same(mine, theirs)
    elif isinstance(one, tuple):
        assert all(torch.equal(row[0], whole) for row, whole in zip(written, one[0], strict=True))
    else:
        assert [row["text"] for row in written] == one["text"]
        assert torch.equal(torch.stack([row["deep"][1]["half"] for row in written]), one["deep"][1]["half"])


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_same(mine, theirs)
    else:
        assert one == other


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda model, x: x.sum(), r"a tensor of shape \[\] for 4 samples"),
        (lambda model, x: x[:3], r"a tensor of shape \[3, 2\] for 4 samples"),
        (lambda model, x: (x, {"h": x[:1]}), r"at 1.h a tensor of shape \[1, 2\] for 4 samples"),
        (lambda model, x: ["a", "b"], "a list of 2 for 4 samples"),
        (lambda model, x: None, "returned a NoneType"),
        (lambda model, x: "text", "returned a str"),
        (lambda model, x: [object()] * len(x), "a list with a object in it"),
    ],
)
def test_predictions_that_belong_to_no_row_are_refused(step: Any, message: str, tmp_path: Path) -> None:
    for to in (None, tmp_path / "p"):
        with pytest.raises(TaskError, match=message):
            trainer_of(predict_step=step).predict(Numbers(), to=to)
    with pytest.raises(DataError, match="no whole predictions"):
        Predictions(tmp_path / "p")


def test_predicting_leaves_model_and_generators_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).train()
    trainer = trainer_of(model)
    before, state = torch.get_rng_state(), {name: value.clone() for name, value in model.state_dict().items()}
    first, second = trainer.predict(Numbers()), trainer.predict(Numbers())
    assert torch.equal(first, second), "dropout is off"
    assert torch.equal(torch.get_rng_state(), before)
    assert [module.training for module in model.modules()] == [True] * 3
    assert all(torch.equal(model.state_dict()[name], value) for name, value in state.items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_predictions_are_written_to_a_url() -> None:
    found = trainer_of().predict(Numbers(), to="memory://predictions/of/numbers")
    assert torch.equal(found.load(), rows())
    with pytest.raises(DataError, match="holds predictions already"):
        trainer_of().predict(Numbers(), to="memory://predictions/of/numbers")


def test_several_sets_are_not_predicted_at_once() -> None:
    with pytest.raises(DataError, match="predict got 2 sets"):
        trainer_of().predict({"a": Numbers(), "b": Numbers()})


def test_folder_with_predictions_is_not_overwritten(tmp_path: Path) -> None:
    trainer = trainer_of()
    trainer.predict(Numbers(), to=tmp_path)
    with pytest.raises(DataError, match="holds predictions already"):
        trainer.predict(Numbers(), to=tmp_path)


def shards(folder: Path, pieces: list[list[RowPiece]], *, is_numbered: bool = True) -> Predictions:
    from distributed.checkpoint.storage.urls import open_storage

    storage = open_storage(folder)
    writers = [ShardWriter(storage, rank, most_bytes=64) for rank in range(len(pieces))]
    for writer, own in zip(writers, pieces, strict=True):
        for piece in own:
            writer.add(piece)
        writer.flush()
    write_index(storage, [writer.shards for writer in writers], is_numbered=is_numbered, run="r")
    return Predictions(folder)


def test_rows_of_ranks_that_take_turns_are_read_in_order(tmp_path: Path) -> None:
    pieces = [
        [RowPiece(first, 2, torch.arange(first, first + 2)) for first in range(0, 40, 4)],
        [RowPiece(first, 2, torch.arange(first, first + 2)) for first in range(2, 40, 4)],
    ]
    found = shards(tmp_path, pieces)
    assert [int(row) for row in found] == list(range(40))
    assert found.load().tolist() == list(range(40))
    assert len(list((tmp_path / "rank-00000").glob("*.safetensors"))) > 1


def test_rows_of_ranks_with_own_streams_are_read_by_rank(tmp_path: Path) -> None:
    pieces = [[RowPiece(0, 2, ["a", "b"]), RowPiece(2, 1, ["c"])], [RowPiece(0, 2, ["d", "e"])]]
    found = shards(tmp_path, pieces, is_numbered=False)
    assert list(found) == found.load() == ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize("ending", ["safetensors", "jsonl"])
def test_changed_or_missing_shard_is_an_error(ending: str, tmp_path: Path) -> None:
    found = shards(tmp_path, [[RowPiece(0, 2, torch.zeros(2))]])
    shard = tmp_path / f"rank-00000/shard-000000.{ending}"
    content = bytearray(shard.read_bytes())
    content[-2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(DataError, match="its content is not what was written"):
        found.load()
    shard.unlink()
    with pytest.raises(DataError, match="does not exist"):
        list(found)


@pytest.mark.parametrize("index", ["", "{}", '{"format": 99}', '{"format": 1, "ranks": [[{"name": 3}]]}'])
def test_damaged_index_is_an_error(index: str, tmp_path: Path) -> None:
    (tmp_path / "predictions.json").write_text(index)
    with pytest.raises(DataError, match="is no index of predictions"):
        Predictions(tmp_path)


def test_shards_of_an_earlier_attempt_are_removed(tmp_path: Path) -> None:
    left = tmp_path / "rank-00007/shard-000000.jsonl"
    left.parent.mkdir()
    left.write_text("{}")
    for name in ("mine.txt", "rank-0.log"):
        (tmp_path / name).write_text("kept")
    trainer_of().predict(Numbers(), to=tmp_path)
    assert not left.exists()
    assert all((tmp_path / name).exists() for name in ("mine.txt", "rank-0.log"))
    assert json.loads((tmp_path / "predictions.json").read_text())["rows"] == ROWS


def test_settings_that_train_have_no_effect_in_an_evaluation() -> None:
    with pytest.raises(ConfigError) as refused:
        trainer_of().validate(Numbers(), epochs=3, keep_last=1)
    assert [problem.what for problem in refused.value.problems] == [
        "epochs has no effect in validate(…)",
        "keep_last has no effect in validate(…)",
    ]


def test_loss_that_counts_targets_is_measured_over_the_set() -> None:
    """As in a training on several ranks, and not by the samples of each batch."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(0, 4, (ROWS, 6), generator=generator)
    target[:, 3:][torch.rand(ROWS, 3, generator=generator) < 0.7] = -100
    outputs = torch.randn(ROWS, 6, 4, generator=generator)

    def loss_fn(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs.flatten(0, 1), target.flatten())

    trainer = trainer_of(loss_fn=loss_fn)
    found = trainer.validate(TensorDataset(outputs, target))
    assert found["val_loss"] == pytest.approx(float(loss_fn(2 * outputs, target)), rel=1e-6)
