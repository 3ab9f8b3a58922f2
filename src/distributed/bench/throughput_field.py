"""Who trains in `distributed bench throughput`: loops by hand, ours, and the peers that are installed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from distributed.core.errors import ConfigError, Problem
from distributed.core.registry import Entry, Registry, is_installed, nearest_hint

BARE, BEST, FLOOR, OURS, FREE, FP8 = "bare", "best-bare", "floor", "ours", "ours-free", "ours-fp8"
GIVEN_BACK = "ours-given-back"
OWN = (OURS, FREE, FP8, GIVEN_BACK)
BY_HAND = (BARE, BEST, FLOOR)
ANYWHERE = ("cpu", "cuda")
ORDER = ("mlp", "gpt2-124m", "gpt-1.3b", "resnet50", "bert-large", "dlrm", "convnet")  # the dearest GPU minutes first
_COMPILED = ("gpt2-124m", "gpt-1.3b", "resnet50", "bert-large")  # what users of a GPU compile
_HAND, _OURS = "distributed.bench.throughput_hand:", "distributed.bench.throughput_ours:train"
_FREE = {"compile": "auto", "bf16_parameters": True}


@dataclass(frozen=True)
class Contender(Entry):
    setup: str = ""
    devices: tuple[str, ...] = ANYWHERE
    workloads: tuple[str, ...] = ()  # none: all
    engine: str = "pytorch-ddp"
    settings: Mapping[str, Any] = field(default_factory=dict)  # of our Trainer
    compiles: bool = True  # the user calls model.compile() where models are compiled


# In the order of what a bounded time is spent on first.
CONTENDERS: Registry[Contender] = Registry(
    "contender",
    {
        BEST: Contender(
            _HAND + "train_best",
            setup="the loop by hand at its best: batches cut from tensors that lie on the device; on a GPU compiled, "
            "TF32, channels last",
        ),
        OURS: Contender(
            _OURS,
            "tensorboard",
            "tensorboard",
            setup="Trainer with progress (shown by rank 0), events.jsonl, TensorBoard, NaN check; all else by default",
        ),
        GIVEN_BACK: Contender(
            _OURS,
            "tensorboard",
            "tensorboard",
            setup="ours with keep_freed_memory=False",
            devices=("cpu",),
            settings={"keep_freed_memory": False},
        ),
        FREE: Contender(
            _OURS,
            "tensorboard",
            "tensorboard",
            setup="ours with compile='auto' and bf16_parameters=True",
            devices=("cuda",),
            settings=_FREE,
            compiles=False,
        ),
        FP8: Contender(
            _OURS,
            "tensorboard",
            "tensorboard",
            setup="ours-free with mixed_precision='fp8' besides; its part of peak is that of bf16's peak",
            devices=("cuda",),
            workloads=("gpt-1.3b",),
            settings=_FREE | {"mixed_precision": "fp8"},
            compiles=False,
        ),
        FLOOR: Contender(
            _HAND + "train_floor",
            setup="the whole step as one CUDA graph by hand, batches cut from tensors on the device; no logging",
            devices=("cuda",),
            workloads=("mlp",),
            compiles=False,
        ),
        BARE: Contender(
            "distributed.bench.hand_written:train",
            setup="DDP (for several processes), DataLoader and a loop by hand, not compiled; no logging",
            compiles=False,
        ),
        "lightning": Contender(
            "distributed.bench.peer_lightning:train",
            "lightning",
            "peers",
            setup="Lightning Trainer with its progress bar, self.log of the loss, and TensorBoard",
        ),
        "fabric": Contender(
            "distributed.bench.peer_fabric:train",
            "lightning",
            "peers",
            setup="Lightning Fabric with the user's own loop; no logging",
        ),
        "accelerate": Contender(
            "distributed.bench.peer_accelerate:train",
            "accelerate",
            "peers",
            setup="Hugging Face Accelerate with the user's own loop; no logging",
        ),
        "ray": Contender(
            "distributed.bench.hand_written_ray:train",
            "ray",
            "ray",
            setup="Ray Train's prepare_model with the user's own loop in workers that Ray placed; no logging",
            devices=("cpu",),
            engine="ray",
        ),
    },
)


@dataclass(frozen=True)
class Field:
    """The contenders of one run, and why the others are not among them."""

    names: tuple[str, ...]
    missing: dict[str, str]

    def of(self, workload: str, precision: str) -> tuple[str, ...]:
        return tuple(name for name in self.names if _takes(name, workload, precision))


def _takes(name: str, workload: str, precision: str) -> bool:
    only = CONTENDERS.entries[name].workloads
    return not only or workload in only or (name == FP8 and precision == "fp8")


def is_compiled(name: str, workload: str, device: str) -> bool:
    """Whether the user has called model.compile() before the contender gets the model."""
    return device == "cuda" and workload in _COMPILED and CONTENDERS.entries[name].compiles


def find_field(only: list[str] | None, device: str, *, free_speed: bool = True) -> Field:
    """Those asked for, or all, and a bare loop to compare with where there is time for it. Nothing is imported."""
    entries = CONTENDERS.entries
    unknown = [name for name in only or () if name not in entries]
    if unknown:
        raise ConfigError([Problem(f"there is no contender {n!r}", do=nearest_hint(n, entries)) for n in unknown])
    names, missing = [], {}
    for name, entry in entries.items():
        if (only and name not in {*only, BEST}) or (name in (FREE, FP8) and not free_speed):
            continue
        if device not in entry.devices:
            missing[name] = f"on a {'GPU' if device == 'cpu' else 'CPU'} only"
        elif not is_installed(entry.needs):
            missing[name] = f"not installed; {entry.brought_by}"
        else:
            names.append(name)
    if only and BEST not in only:  # who is asked for comes first where time is short
        names.sort(key=lambda name: name == BEST)
    return Field(tuple(names), missing)
