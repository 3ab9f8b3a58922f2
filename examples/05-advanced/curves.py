"""What these examples share: a small transformer, data, and the losses of a run's steps and of a plain loop's."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from distributed import Trainer

VOCABULARY, LENGTH = 64, 16
LEARNING_RATE = 0.01


class Encoder(nn.Module):
    """Torch's own layers, made without a thought of being cut: the blocks and what can be cut in them are found."""

    def __init__(self, *, width: int = 32, blocks: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.tokens(ids)
        x = self.encoder(x)
        return self.head(x)


def make_model(**size: int) -> Encoder:
    torch.manual_seed(0)
    return Encoder(**size)


def make_data(samples: int) -> TensorDataset:
    """Sequences of numbers; to be learned is another number for each."""
    ids = torch.randint(0, VOCABULARY, (samples, LENGTH), generator=torch.Generator().manual_seed(1))
    return TensorDataset(ids, (5 * ids + 3) % VOCABULARY)


def token_loss(logits, target):
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


@dataclass(frozen=True)
class Curve:
    losses: list[float]  # one a step
    global_batch: int


def train(data: TensorDataset, run_dir: str | Path | None = None, **settings) -> Curve:
    """A run of the library. The data are not shuffled, so that a plain loop can be compared with it."""
    trainer = Trainer(
        make_model(),
        loss_fn=token_loss,
        learning_rate=LEARNING_RATE,
        log_every_n_steps=1,
        progress=False,
        run_dir=run_dir,
        **settings,
    )
    history = trainer.fit(data)
    events = map(json.loads, Path(history.run_dir, "events.jsonl").read_text().splitlines())
    batch = json.loads(Path(history.run_dir, "plan.json").read_text())["batch"]
    return Curve(
        [event["loss"] for event in events if event["event"] == "StepEnded"],
        batch["per_device"] * batch["ranks"] * batch["accumulation"],
    )


def train_by_hand(data: TensorDataset, batch: int) -> Curve:
    """The same in ten lines of torch, in this process, without the library: what everything else is compared with."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for ids, target in zip(*(tensor.split(batch) for tensor in data.tensors), strict=True):
        optimizer.zero_grad()
        loss = token_loss(model(ids), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Curve(losses, batch)


def print_agreement(name: str, found: Curve, expected: Curve) -> None:
    assert found.global_batch == expected.global_batch, f"{found} is not comparable with {expected}"
    off = max(abs(mine - plain) for mine, plain in zip(found.losses, expected.losses, strict=True))
    first, last = found.losses[0], found.losses[-1]
    print(f"{name:36} loss {first:.6f} … {last:.6f}, largest difference {off:.1e}", flush=True)
