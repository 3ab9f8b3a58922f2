"""Who is measured: the bare loop, ours, and those peers that are installed here, each with the setup it is given."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from distributed.core.errors import ConfigError, Problem
from distributed.core.registry import Entry, Registry, nearest_hint

BARE, BARE_AGAIN, OURS = "bare", "bare-again", "ours"

CONTENDERS = Registry(
    "contender",
    {
        BARE: Entry("distributed.bench.hand_written:train"),
        BARE_AGAIN: Entry("distributed.bench.hand_written:train"),
        OURS: Entry("distributed.bench.ours:train", "tensorboard", "tensorboard"),
        "fabric": Entry("distributed.bench.peer_fabric:train", "lightning", "peers"),
        "accelerate": Entry("distributed.bench.peer_accelerate:train", "accelerate", "peers"),
        "lightning": Entry("distributed.bench.peer_lightning:train", "lightning", "peers"),
        "lightning-silent": Entry("distributed.bench.peer_lightning:train_silent", "lightning", "peers"),
    },
)

SETUPS = {
    BARE: "DDP, DistributedSampler, DataLoader and a loop written by hand; no logging",
    BARE_AGAIN: "the bare loop measured against itself: what is no more than this is noise",
    OURS: "PyTorchDDPTrainer with progress (shown by rank 0), events.jsonl and TensorBoard every 50 steps, NaN check",
    "fabric": "Lightning Fabric with the user's own loop; no logging",
    "accelerate": "Hugging Face Accelerate with the user's own loop; no logging",
    "lightning": "Lightning Trainer with its progress bar, self.log of the loss, TensorBoard or CSV every 50 steps",
    "lightning-silent": "Lightning Trainer with progress bar, logger and self.log all off",
}


@dataclass(frozen=True)
class Field:
    """The contenders of one run, and those that cannot take part."""

    names: tuple[str, ...]
    missing: dict[str, str]  # name → the extra that brings it


def find_contenders(only: list[str] | None = None) -> Field:
    """Those asked for, or all; the bare loop against itself is always there. Nothing is imported."""
    unknown = [name for name in only or () if name not in CONTENDERS.entries]
    if unknown:
        problems = [Problem(f"there is no contender {name!r}", do=nearest_hint(name, SETUPS)) for name in unknown]
        raise ConfigError(problems)
    asked = [name for name in CONTENDERS.entries if name != BARE and (not only or name in {*only, BARE_AGAIN})]
    missing = {
        name: CONTENDERS.entries[name].extra
        for name in asked
        if CONTENDERS.entries[name].needs and find_spec(CONTENDERS.entries[name].needs) is None
    }
    return Field(tuple(name for name in asked if name not in missing), missing)
