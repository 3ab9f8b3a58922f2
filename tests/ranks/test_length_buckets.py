"""Length buckets on ranks: the steps of one process over the same global batches, and the same bytes after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from distributed import Trainer
from distributed.checkpoint.restore.reading import load
from distributed.core.errors import CheckpointError, DataError
from distributed.core.history import History
from distributed.core.run_dir import RunDir
from distributed.data.length_buckets import LengthBucketSampler, as_lengths, bucketed_order
from distributed.testing import run_ranks

SAMPLES, GLOBAL_BATCH, EPOCHS, WORDS = 53, 12, 2, 11


class Sentences(Dataset[Any]):
    def __init__(self, longer: int = 0) -> None:
        generator = torch.Generator().manual_seed(2)
        sizes = torch.randint(2, 15, (SAMPLES,), generator=generator) + longer
        self.rows = [torch.randint(0, WORDS, (int(size),), generator=generator) for size in sizes]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"words": self.rows[index]}


def padded(samples: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The next word is the target; ranks have unequal numbers of them."""
    rows = [sample["words"] for sample in samples]
    x = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    y = nn.utils.rnn.pad_sequence([row.roll(-1) for row in rows], batch_first=True, padding_value=-100)
    return x, y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.words(x))).transpose(1, 2)


def by_hand() -> torch.Tensor:
    model, data = Net(), Sentences()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    lengths = as_lengths([len(row) for row in data.rows], SAMPLES)
    for epoch in range(EPOCHS):
        order = bucketed_order(lengths, GLOBAL_BATCH, 0, epoch).tolist()
        for at in range(0, SAMPLES, GLOBAL_BATCH):
            x, y = padded([data[index] for index in order[at : at + GLOBAL_BATCH]])
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return flat(model.state_dict())


def flat(state: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([value.flatten() for value in state.values()])


def length_of(sample: dict[str, Any]) -> int:
    return len(sample["words"])


WAYS: dict[str, dict[str, Any]] = {
    "setting": {"bucket_by_length": "words"},
    "function": {},
    "workers": {"bucket_by_length": "words", "num_workers": 2},
    "fsdp": {"bucket_by_length": "words", "sharding": "full"},
    "accumulated": {"bucket_by_length": "words", "gradient_accumulation_steps": 2},
}
BITWISE = {"bitwise": {"bucket_by_length": "words", "reproducible": "bitwise", "virtual_ranks": 2}}


# Three ranks train every way; one and two those in which their number could matter.
WORLDS = {1: ["setting"], 2: ["fsdp", *BITWISE], 3: list(WAYS)}


def fit(name: str, ranks: int, run_dir: str, data: Dataset[Any] | None = None, **more: Any) -> History:
    data, settings = data or Sentences(), (WAYS | BITWISE)[name] | more
    settings = {"epochs": EPOCHS} | settings
    size = settings.pop("size", GLOBAL_BATCH) // ranks // settings.get("gradient_accumulation_steps", 1)
    trainer = Trainer(
        Net(), loss_fn=nn.CrossEntropyLoss(), optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
        num_gpus=ranks, batch_size=size, run_dir=run_dir, progress=False, device="cpu", **settings,
    )  # fmt: skip
    how: dict[str, Any] = {"shuffle": True}
    if name == "function":
        how = {"sampler": LengthBucketSampler(data, size, length_of)}
    return trainer.fit(DataLoader(data, batch_size=size, collate_fn=padded, **how))


def weights(history: History) -> torch.Tensor:
    return flat(load(history.checkpoint, ranks=()).shared["model"])


def fit_all(ranks: int, folder: str) -> dict[str, torch.Tensor]:
    return {name: weights(fit(name, ranks, f"{folder}/{name}")) for name in WORLDS[ranks]}


@pytest.mark.parametrize("ranks", WORLDS)
def test_buckets_train_as_one_process_on_any_ranks(ranks: int, tmp_path: Path) -> None:
    for found in run_ranks(fit_all, ranks, ranks, str(tmp_path)):
        for name, value in found.items():
            torch.testing.assert_close(value, by_hand(), rtol=0, atol=1e-12, msg=name)


def resume_all(folder: str) -> dict[str, Any]:
    """Seven of ten steps, and on from there: in the middle of the second epoch."""
    place = {"checkpoint_dir": f"{folder}/saved"}
    stopped = fit("setting", 2, f"{folder}/stopped", max_steps=7, **place)
    assert RunDir(stopped.run_dir).lengths.exists() or torch.distributed.get_rank() > 0
    again: dict[str, Any] = {"resume_from_checkpoint": True} | place
    found: dict[str, Any] = {}
    for name, data, more, kind in (
        ("batch", Sentences(), {"size": 24}, CheckpointError),
        ("order", Sentences(), {"bucket_by_length": False}, CheckpointError),
        ("lengths", Sentences(longer=1), {"sample_check": False}, DataError),
    ):
        with pytest.raises(kind) as refused:
            fit("setting", 2, f"{folder}/{name}", data, **again, **more)
        found[name] = str(refused.value)
    resumed, whole = fit("setting", 2, f"{folder}/again", **again), fit("setting", 2, f"{folder}/whole")
    found["bytes"] = torch.equal(weights(resumed), weights(whole))
    return found


def test_buckets_resume_in_the_middle_or_are_refused(tmp_path: Path) -> None:
    for found in run_ranks(resume_all, 2, str(tmp_path)):
        assert found["bytes"]
        assert "batches are of 24" in found["batch"]
        assert "sampler" in found["order"]
        assert "other lengths" in found["lengths"]


def test_padding_that_is_saved_is_among_the_decisions(tmp_path: Path) -> None:
    history = fit("setting", 1, str(tmp_path / "run"))
    text = (Path(history.run_dir) / "events.jsonl").read_text().splitlines()[0]
    assert "batches of samples of similar length (2 to 14, by 'words')" in text
    again = fit("setting", 1, str(tmp_path / "run"), resume_from_checkpoint=True, epochs=3)
    assert again.steps == 15  # with the lengths that were kept


class Even(Sentences):
    def __init__(self) -> None:
        super().__init__()
        self.rows = [row[:2] for row in self.rows]


def test_samples_of_one_length_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="all 53 samples have the length 2"):
        fit("setting", 1, str(tmp_path / "run"), Even())
