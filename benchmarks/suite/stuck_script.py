"""A training whose rank 1 gets stuck or fails at its eighth batch: a script for `distributed train`.

Its arguments are what its steps are, `replicated`, `captured` in a CUDA graph or `sharded`, and then the faults, one
for each attempt. `faults` in its working folder gets a line for each one that was made, and `left` one for each
collective that rank 0 has left, both with the time as events have it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from distributed import Trainer

_BATCH = 8  # of an attempt, at which its fault comes
_READ = 400  # of 800 samples of an attempt and a rank, at which "never reads" comes: steps are captured then
_SETTINGS: dict[str, dict[str, Any]] = {
    "replicated": {"capture": False},
    "captured": {"capture": True},
    "sharded": {"backend": "fsdp"},
}


def note(file: str, *words: object) -> None:
    with Path(file).open("a", encoding="utf-8") as lines:
        lines.write(" ".join(map(str, (*words, time.time()))) + "\n")


def wait_for_nobody() -> None:
    time.sleep(1000)


def meet(like: torch.Tensor) -> float:
    total = torch.ones(3, device=like.device)
    dist.all_reduce(total)
    return total.sum().item()  # where the host waits on a GPU: not in the collective


def gather_instead(like: torch.Tensor) -> float:
    mine = torch.ones(1 << 20, device=like.device)
    dist.all_gather([torch.empty_like(mine) for _ in range(dist.get_world_size())], mine)
    return mine.sum().item()


def run_out(like: torch.Tensor) -> None:
    if like.is_cuda:
        torch.cuda.set_per_process_memory_fraction(0.01)  # so that it is the only one to run out
    size = 1 << (30 if like.is_cuda else 50)
    held = [torch.empty(size, dtype=torch.uint8, device=like.device) for _ in range(100)]
    raise AssertionError(f"{len(held)} times {size} bytes were there")


def suffer(word: str, like: torch.Tensor) -> None:
    if word in ("never meets", "never ends its forward"):
        wait_for_nobody()
    elif word == "is stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif word == "differs":
        gather_instead(like)
    elif word == "memory":
        run_out(like)
    elif word == "cuda":
        torch.ones(3, device=like.device)[torch.tensor([7], device=like.device)].sum().item()


class Net(nn.Module):
    def __init__(self, kind: str, word: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))
        self._kind, self._word, self._calls = kind, word, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._kind == "captured":
            return self.layers(x)
        self._calls += self.training
        is_time = self._calls == _BATCH and dist.get_rank() == 1 and self._word != ""
        if is_time and self._word != "never ends":
            note("faults", self._word, os.environ["DISTRIBUTED_ATTEMPT"])
            suffer(self._word, x)
        if self._kind == "sharded":
            return self.layers(x)
        try:
            meet(x)
        finally:
            if dist.get_rank() == 0:
                note("left", os.getpid())
        if is_time and self._word == "never ends":
            note("faults", self._word, os.environ["DISTRIBUTED_ATTEMPT"])
            wait_for_nobody()
        return self.layers(x)


class Rows(Dataset[Any]):
    def __init__(self, word: str) -> None:
        self._x = torch.randn(1600, 8)
        self._word, self._read = word, 0

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._read += 1
        if self._word == "never reads" and self._read == _READ and dist.get_rank() == 1:
            note("faults", self._word, os.environ["DISTRIBUTED_ATTEMPT"])
            wait_for_nobody()
        return self._x[index], (self._x[index, 0] > 0).long()


def main() -> None:
    torch.manual_seed(0)
    kind, faults, attempt = sys.argv[1], sys.argv[2:], int(os.environ["DISTRIBUTED_ATTEMPT"])
    word = faults[attempt] if attempt < len(faults) else ""
    trainer = Trainer(
        Net(kind, word),
        batch_size=8,
        epochs=1,
        log_every_n_steps=50,
        checkpoint_frequency="5 steps",
        **_SETTINGS[kind],
    )
    trainer.fit(Rows(word))


if __name__ == "__main__":
    main()
