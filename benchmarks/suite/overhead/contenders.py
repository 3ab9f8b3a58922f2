"""Who is measured: the bare loop of an engine, ours, and the peers that are installed, each with its setup."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.suite.twins import BARE_LOOPS
from distributed.core.engines.engine import ENGINES
from distributed.core.errors import ConfigError, Problem
from distributed.core.registry import Entry, Registry, is_installed, nearest_hint

BARE, BARE_AGAIN, OURS, OURS_AGAIN = "bare", "bare-again", "ours", "ours-again"

_OURS = Entry("distributed.bench.workloads.ours:train", "tensorboard", "tensorboard")
_PEERS = {  # of the first engine, which they all stand on
    "fabric": Entry("benchmarks.suite.peers.fabric:train", "lightning", "peers"),
    "accelerate": Entry("benchmarks.suite.peers.accelerate:train", "accelerate", "peers"),
    "lightning": Entry("benchmarks.suite.peers.lightning:train", "lightning", "peers"),
    "lightning-silent": Entry("benchmarks.suite.peers.lightning:train_silent", "lightning", "peers"),
}
MEASURED = list(BARE_LOOPS)
_HERE = "benchmarks.suite.overhead.features"
_FEATURES = {  # name → its function there, and whom it is measured beside
    "training-step": ("train_own_step", OURS),
    "task-with-log": ("train_own_task", OURS),
    "callback": ("train_with_callback", OURS),
    "ema": ("train_with_ema", OURS),
    "hand-lerp": ("train_by_hand_with_lerp", BARE),
    "hand-swa-utils": ("train_by_hand_with_average", BARE),
    "own-loop": ("train_in_own_loop", BARE),
    "train-step": ("train_by_steps", BARE),
    "hand-means": ("train_by_hand_with_means", BARE),
}
_OWN_LOOPS = ("fabric", "accelerate")  # the peers of a loop of one's own

SETUPS = {
    BARE: "the engine, DistributedSampler, DataLoader and a hand-written loop; no logging",
    BARE_AGAIN: "the bare loop measured against itself: what is no more than this is noise",
    OURS: "Trainer with progress (shown by rank 0), events.jsonl and TensorBoard every 50 steps, NaN check",
    OURS_AGAIN: "the same against itself",
    "training-step": "ours with training_step=, a function",
    "task-with-log": "ours with a Task whose step logs one value",
    "callback": "ours with a callback that has on_step_end",
    "ema": "ours with callbacks.EMA, its arithmetic included",
    "hand-lerp": "the bare loop with the arithmetic of an average, torch._foreach_lerp_ over lists, and nothing else",
    "hand-swa-utils": "the bare loop with torch's AveragedModel",
    "own-loop": "distributed.start and the user's own loop, with progress, events.jsonl and TensorBoard as ours",
    "train-step": "trainer.train_step in the user's own loop: it returns the mean loss of all ranks in each step",
    "hand-means": "the bare loop with the two sums over ranks that train_step needs",
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


def neighbour_of(name: str) -> str:
    """Whom a contender is compared with, on the same ranks.

    >>> neighbour_of("fabric"), neighbour_of("callback")
    ('bare', 'ours')
    """
    return OURS if name == OURS_AGAIN else _FEATURES.get(name, ("", BARE))[1]


def contenders_of(engine: str) -> Registry[Entry]:
    """All that can be measured, beside an engine's own minimal loop or beside ours."""
    if engine not in MEASURED:
        what = f"there is no bare loop of {engine!r} to measure against"
        raise ConfigError(what, do=nearest_hint(engine, MEASURED))
    ENGINES.require(engine)
    bare = Entry(BARE_LOOPS[engine])
    peers = _PEERS if engine == MEASURED[0] else {}
    features = {name: replace(_OURS, target=f"{_HERE}:{function}") for name, (function, _) in _FEATURES.items()}
    own = {BARE: bare, BARE_AGAIN: bare, OURS: _OURS, OURS_AGAIN: _OURS}
    return Registry("contender", own | (features if engine == MEASURED[0] else {}) | peers)


def find_contenders(only: list[str] | None = None, engine: str = MEASURED[0], *, features: bool = False) -> Contenders:
    """Those asked for, or all trainers, or all `features`; the bare loop against itself is always there.

    Nothing is imported.
    """
    entries = contenders_of(engine).entries
    unknown = [name for name in only or () if name not in entries]
    if unknown:
        problems = [Problem(f"there is no contender {name!r}", do=nearest_hint(name, SETUPS)) for name in unknown]
        raise ConfigError(problems)
    of_features = [OURS_AGAIN, *_FEATURES, *_OWN_LOOPS]
    usual = of_features if features else [name for name in entries if name not in {OURS_AGAIN, *_FEATURES}]
    asked = [name for name in entries if name != BARE and name in {*(only or usual), BARE_AGAIN}]
    missing = {name: entries[name].extra for name in asked if not is_installed(entries[name].needs)}
    return Contenders(tuple(name for name in asked if name not in missing), missing, engine)
