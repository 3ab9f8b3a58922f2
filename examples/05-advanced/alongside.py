"""What the examples of own steps share: a training on some ranks, and beside it a hand-written loop in one process."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

from distributed import Trainer

Batches = Iterator[tuple[torch.Tensor, ...]]


def train_alongside(
    title: str,
    make: Callable[[], dict[str, Any]],
    data: TensorDataset,
    by_hand: Callable[[Batches], Iterator[float]],
    *,
    validation: TensorDataset | None = None,
    batch: int = 24,
    epochs: int = 4,
) -> None:
    """`make` returns what a Trainer is given, `by_hand` yields each batch's loss. Prints how far they are apart.

    `batch`: the samples of a step, over all ranks.
    """
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="one training each, unless launched")
    parser.add_argument("--epochs", type=int, default=epochs)
    arguments = parser.parse_args()
    is_launched = "WORLD_SIZE" in os.environ
    expected: list[float] = []
    hand = by_hand(_batches(data, batch))
    for ranks in [int(os.environ["WORLD_SIZE"])] if is_launched else arguments.ranks:
        with tempfile.TemporaryDirectory() as scratch:
            trainer = Trainer(
                **make(),
                num_gpus=ranks,
                batch_size=batch // ranks,
                epochs=arguments.epochs,
                log_every_n_steps=1,
                progress=False,
                run_dir=None if is_launched else f"{scratch}/run",
            )
            history = trainer.fit(data, validation)
            if not trainer.is_main:
                return
            lines = map(json.loads, Path(history.run_dir, "events.jsonl").read_text().splitlines())
            losses = {event["step"]: event["loss"] for event in lines if event["event"] == "StepEnded"}
        expected += islice(hand, max(0, history.steps - len(expected)))
        off = max(abs(loss - expected[step - 1]) for step, loss in losses.items())
        curve = f"loss {losses[min(losses)]:.6f} … {losses[max(losses)]:.6f}"
        print(f"{title} on {ranks} rank{'s' * (ranks > 1)}: {curve}, largest difference {off:.1e}", flush=True)
    for name, value in sorted(history.epochs[-1].metrics.items()):
        print(f"  {name} {value:.4f}")


def _batches(data: TensorDataset, size: int) -> Batches:
    """Epoch after epoch, without end."""
    while True:
        yield from zip(*(tensor.split(size) for tensor in data.tensors), strict=True)


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
