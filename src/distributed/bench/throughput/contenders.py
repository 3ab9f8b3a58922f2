"""Who trains in `distributed bench throughput`: hand-written loops and our Trainer. The suite adds its peers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distributed.core.errors import ConfigError, Problem
from distributed.core.registry import Entry, is_installed, nearest_hint

BARE, BEST, FLOOR, OURS, FREE, FP8 = "bare", "best-bare", "floor", "ours", "ours-free", "ours-fp8"
GIVEN_BACK = "ours-given-back"
OWN = (OURS, GIVEN_BACK, FREE, FP8)
HAND_WRITTEN = (BEST, BARE, FLOOR)
_PEERS = ("lightning", "fabric", "accelerate", "ray")  # which were contenders here until 0.1
_COMPILED = ("gpt2-124m", "gpt-1.3b", "resnet50", "bert-large")  # what users of a GPU compile
_LOOPS, _OURS = "distributed.bench.throughput.best_loops:", "distributed.bench.throughput.ours:train"
_FREE = {"compile": "auto", "bf16_parameters": True}


@dataclass(frozen=True)
class Contender(Entry):
    setup: str = ""
    devices: tuple[str, ...] = ("cpu", "cuda")
    workloads: tuple[str, ...] = ()  # none: all
    precision: str = ""  # one in which it takes all workloads
    engine: str = "pytorch-ddp"
    settings: Mapping[str, Any] = field(default_factory=dict)  # of our Trainer
    compiles: bool = True  # the user calls model.compile() where models are compiled

    def takes(self, workload: str, precision: str) -> bool:
        return not self.workloads or workload in self.workloads or precision == self.precision

    def is_compiled(self, workload: str, device: str) -> bool:
        """Whether the user has called model.compile() before the contender gets the model."""
        return device == "cuda" and workload in _COMPILED and self.compiles


def _ours(setup: str, **options: Any) -> Contender:
    return Contender(_OURS, "tensorboard", "tensorboard", setup=setup, **options)


# In the order of what a bounded time is spent on first.
WITHOUT_PEERS: dict[str, Contender] = {
    BEST: Contender(
        _LOOPS + "train_best",
        setup="the hand-written loop at its best: batches cut from tensors that lie on the device; on a GPU compiled, "
        "TF32, channels last",
    ),
    OURS: _ours(
        "Trainer with progress (shown by rank 0), events.jsonl, TensorBoard, NaN check; all else by default",
    ),
    GIVEN_BACK: _ours("ours with keep_freed_memory=False", devices=("cpu",), settings={"keep_freed_memory": False}),
    FREE: _ours("ours with compile='auto' and bf16_parameters=True", devices=("cuda",), settings=_FREE, compiles=False),
    FP8: _ours(
        "ours-free with mixed_precision='fp8' besides; its part of peak is that of bf16's peak",
        devices=("cuda",),
        workloads=("gpt-1.3b",),
        precision="fp8",
        settings=_FREE | {"mixed_precision": "fp8"},
        compiles=False,
    ),
    FLOOR: Contender(
        _LOOPS + "train_floor",
        setup="the whole step as one hand-written CUDA graph, batches cut from tensors on the device; no logging",
        devices=("cuda",),
        workloads=("mlp",),
        compiles=False,
    ),
    BARE: Contender(
        "distributed.bench.workloads.hand_written:train",
        setup="DDP (for several processes), DataLoader and a hand-written loop, not compiled; no logging",
        compiles=False,
    ),
}


@dataclass(frozen=True)
class Contenders:
    """The contenders of one run, and why the others are not among them."""

    names: tuple[str, ...]
    missing: dict[str, str]
    known: Mapping[str, Contender]

    def of(self, workload: str, precision: str) -> tuple[str, ...]:
        return tuple(name for name in self.names if self.known[name].takes(workload, precision))

    @property
    def setups(self) -> dict[str, str]:
        return {name: contender.setup for name, contender in self.known.items()}


def _hint(name: str, known: Mapping[str, Contender]) -> str:
    if name in _PEERS:
        return f"in a checkout of the repository: python -m benchmarks.suite throughput --only {name}"
    return nearest_hint(name, known)


def find_contenders(
    only: Sequence[str] | None,
    device: str,
    *,
    free_speed: bool = True,
    known: Mapping[str, Contender] = WITHOUT_PEERS,
) -> Contenders:
    """Those asked for, or all, and a hand-written loop to compare with. Nothing is imported."""
    unknown = [name for name in only or () if name not in known]
    if unknown:
        raise ConfigError([Problem(f"there is no contender {name!r}", do=_hint(name, known)) for name in unknown])
    names, missing = [], {}
    for name, contender in known.items():
        if (only and name not in {*only, BEST}) or (name in (FREE, FP8) and not free_speed):
            continue
        if device not in contender.devices:
            missing[name] = f"on a {'GPU' if device == 'cpu' else 'CPU'} only"
        elif not is_installed(contender.needs):
            missing[name] = f"not installed; {contender.brought_by}"
        else:
            names.append(name)
    if only and BEST not in only:  # who is asked for comes first where time is short
        names.sort(key=lambda name: name == BEST)
    return Contenders(tuple(names), missing, known)
