"""What bucket_by_length saves: padding by the number of ranks, and samples a second of a small transformer.

python benchmarks/suite/length_buckets.py --rounds 7 --json benchmarks/suite/length-buckets.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from distributed import Trainer
from distributed.bench.machine import describe_machine, describe_versions
from distributed.core.plan import BatchPlan
from distributed.data.length_buckets import LengthBucketSampler, Lengths, bucketed_order
from distributed.data.order import permutation
from distributed.data.shares import EpochSplit
from distributed.testing import run_ranks

SAMPLES, WORDS, WIDTH, LONGEST, PER_RANK = 4096, 1000, 128, 512, 16


def lengths_of(samples: int) -> Lengths:
    """As of sentences: log-normal, cut at the longest that a model takes."""
    drawn = np.random.RandomState(0).lognormal(4, 0.7, samples)
    return np.clip(drawn, 4, LONGEST).astype(np.int32)


def padded_part(lengths: Lengths, order: Any, ranks: int) -> float:
    """Of what all ranks compute in an epoch, where each pads its share of a step to its own longest sample."""
    padded = 0
    for rank in range(ranks):
        split = EpochSplit(len(lengths), BatchPlan(PER_RANK, ranks), rank)
        cuts = (cut for step in range(split.steps) for cut in split.micro_cuts(step) if cut.size)
        padded += sum(int(lengths[order[cut.start : cut.stop]].max()) * cut.size for cut in cuts)
    return 1 - int(lengths.sum()) / padded


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(WIDTH, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.words(ids), src_key_padding_mask=ids == 0).mean(1))


def collate(samples: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    rows, labels = zip(*samples, strict=True)
    return nn.utils.rnn.pad_sequence(list(rows), batch_first=True), torch.tensor(labels)


def train(rounds: int, steps: int, folder: str) -> list[dict[str, float]]:
    """Samples a second, in turns."""
    lengths, generator = lengths_of(SAMPLES), torch.Generator().manual_seed(0)
    data = [(torch.randint(1, WORDS, (int(n),), generator=generator), index % 2) for index, n in enumerate(lengths)]
    found: list[dict[str, float]] = []
    for at in range(rounds):
        row = {}
        for name in ("shuffled", "bucketed") if at % 2 else ("bucketed", "shuffled"):
            torch.manual_seed(0)
            sampler = LengthBucketSampler(data, PER_RANK, lengths.tolist()) if name == "bucketed" else None
            loader: DataLoader[Any] = DataLoader(
                data,  # type: ignore[arg-type]
                batch_size=PER_RANK,
                collate_fn=collate,
                sampler=sampler,
                shuffle=None if sampler else True,
            )
            trainer = Trainer(
                Classifier(), loss_fn=nn.CrossEntropyLoss(), max_steps=steps, progress=False, device="cpu",
                run_dir=f"{folder}/{at}-{name}", certificate_steps=0,
            )  # fmt: skip
            row[name] = trainer.fit(loader).throughput
        found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    before, lengths = os.getloadavg()[0], lengths_of(100_000)
    padding = {
        str(ranks): {
            "shuffled": padded_part(lengths, permutation(len(lengths), 0, 1), ranks),
            "bucketed": padded_part(lengths, bucketed_order(lengths, PER_RANK * ranks, 0, 1), ranks),
        }
        for ranks in (1, 2, 8, 64)
    }
    with tempfile.TemporaryDirectory() as folder:
        rounds = run_ranks(train, asked.ranks, asked.rounds, asked.steps, folder)[0]
    ratios = [row["bucketed"] / row["shuffled"] for row in rounds]
    record = {
        "benchmark": "length-buckets",
        "unit": "part of the padded entries that is padding; samples a second over all ranks, in turns",
        "machine": describe_machine(),
        "versions": describe_versions(),
        "settings": {
            "lengths": f"log-normal (4, 0.7), 4 to {LONGEST}: 100,000 for the padding, {SAMPLES} trained",
            "batch": PER_RANK,
            "ranks": asked.ranks,
            "steps": asked.steps,
            "model": f"transformer of 2 layers of {WIDTH}",
        },
        "load_average": {"before": before, "after": os.getloadavg()[0]},
        "padding_by_ranks": padding,
        "rounds": rounds,
        "times_as_fast": statistics.median(ratios),
    }
    for ranks, row in padding.items():
        print(
            f"{ranks:>2} ranks: {row['shuffled']:.1%} of a shuffled epoch is padding, {row['bucketed']:.1%} in buckets"
        )
    print(f"{record['times_as_fast']:.2f} times the samples a second ({min(ratios):.2f} to {max(ratios):.2f})")
    if asked.json:
        asked.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
