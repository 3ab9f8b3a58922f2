"""Who is measured: the bare loop of an engine, ours, and the peers that are installed, each with its setup."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.suite.twins import BARE_LOOPS
from distributed.core.engines.engine import ENGINES
from distributed.core.errors import ConfigError, Problem
from distributed.core.registry import Entry, Registry, is_installed, nearest_hint

BARE, BARE_AGAIN, OURS = "bare", "bare-again", "ours"

_OURS = Entry("distributed.bench.workloads.ours:train", "tensorboard", "tensorboard")
_PEERS = {  # of the first engine, which they all stand on
    "fabric": Entry("benchmarks.suite.peers.fabric:train", "lightning", "peers"),
    "accelerate": Entry("benchmarks.suite.peers.accelerate:train", "accelerate", "peers"),
    "lightning": Entry("benchmarks.suite.peers.lightning:train", "lightning", "peers"),
    "lightning-silent": Entry("benchmarks.suite.peers.lightning:train_silent", "lightning", "peers"),
}
MEASURED = list(BARE_LOOPS)


SETUPS = {
    BARE: "the engine, DistributedSampler, DataLoader and a hand-written loop; no logging",
    BARE_AGAIN: "the bare loop measured against itself: what is no more than this is noise",
    OURS: "Trainer with progress (shown by rank 0), events.jsonl and TensorBoard every 50 steps, NaN check",
    "fabric": "Lightning Fabric with the user's own loop; no logging",
    "accelerate": "Hugging Face Accelerate with the user's own loop; no logging",
    "lightning": "Lightning Trainer with its progress bar, self.log of the loss, TensorBoard or CSV every 50 steps",
    "lightning-silent": "Lightning Trainer with progress bar, logger and self.log all off",
}


@dataclass(frozen=True)
class Contenders:
    """The contenders of one run, and those that cannot take part."""

    names: tuple[str, ...]
    missing: dict[str, str]  # name → the extra that brings it
    engine: str = MEASURED[0]


def contenders_of(engine: str) -> Registry[Entry]:
    """All that can be measured against an engine's own minimal loop."""
    if engine not in MEASURED:
        what = f"there is no bare loop of {engine!r} to measure against"
        raise ConfigError(what, do=nearest_hint(engine, MEASURED))
    ENGINES.require(engine)
    bare = Entry(BARE_LOOPS[engine])
    peers = _PEERS if engine == MEASURED[0] else {}
    return Registry("contender", {BARE: bare, BARE_AGAIN: bare, OURS: _OURS} | peers)


def find_contenders(only: list[str] | None = None, engine: str = MEASURED[0]) -> Contenders:
    """Those asked for, or all; the bare loop against itself is always there. Nothing is imported."""
    entries = contenders_of(engine).entries
    unknown = [name for name in only or () if name not in entries]
    if unknown:
        problems = [Problem(f"there is no contender {name!r}", do=nearest_hint(name, SETUPS)) for name in unknown]
        raise ConfigError(problems)
    asked = [name for name in entries if name != BARE and (not only or name in {*only, BARE_AGAIN})]
    missing = {name: entries[name].extra for name in asked if not is_installed(entries[name].needs)}
    return Contenders(tuple(name for name in asked if name not in missing), missing, engine)
