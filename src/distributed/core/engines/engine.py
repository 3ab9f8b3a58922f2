"""Engines: what trains behind each backend's name, as each declares itself: where it lives, what it needs, what it can.

The planner refuses what an engine does not declare, `distributed doctor` and docs/engines.md show it, and tests hold
every declaration to a run. A new engine is a folder under `engines/` and a line in `engines/declared.py`, which is
imported by its name when an engine is first asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from distributed.core.choices import Device, ModelKind, Shard
from distributed.core.engines.features import ASKED, HAD, EngineRequest, Feature
from distributed.core.registry import Entry, Registry, load_target


@dataclass(frozen=True)
class Support:
    """An engine's word for a feature."""

    note: str = ""  # what a reader of the matrix should know
    device: Device | None = None  # the only kind of device where it holds; None: any


@dataclass(frozen=True)
class PeerLoss:
    """Exceptions by which an engine says that another rank has failed."""

    names: tuple[str, ...]  # of their classes
    says: str = ""  # a pattern that their text must have
    unless: str = ""  # a pattern that says otherwise; "": there is none


@dataclass(frozen=True)
class LauncherTraits:
    """A launcher as the ranks see it that it started, which know its name by `WorkerEnv.launcher`."""

    name: str
    announces: Callable[[Mapping[str, str]], bool] = lambda environ: False  # whether it wrote this environment
    reads_env: str = ""  # module:function (environ) → the WorkerEnv of a process that it announced itself to
    meets: str = ""  # module:function (env, run_dir, timeout_s) → Rendezvous; "": the environment says where
    links: str = ""  # module:function () → this process's LauncherLink, or None; "": there is none
    owns: str = ""  # module:class (env) → ProcessOwner of its ranks; "": each is a process of its own
    is_ours: bool = False  # whether our code watches its ranks, shows the progress and answers for the end
    regroups: bool = False  # whether it makes another world of the ranks that are left
    shows_one_gpu: bool = False  # whether it may show each rank its own GPU only
    runs_threads: bool = False  # whether a rank is not the first thread of its process


@dataclass(frozen=True)
class Engine(Entry):
    """What a backend declares of itself."""

    does: str = ""  # in one line
    can: Mapping[str, Support] = field(default_factory=dict)
    features: Mapping[str, Feature] = field(default_factory=dict)  # that no other engine has
    claims: Callable[[EngineRequest], str] = lambda wanted: ""  # why backend='auto' is this one; "": it is not
    models: ModelKind = "torch"
    places: tuple[ModelKind, ...] = ()  # other frameworks' models, whose ranks its launcher places on its cluster
    bitwise: str = ""  # what trains under reproducible='bitwise'
    shards: Shard = "none"  # what is sharded over data-parallel ranks by default
    offloads: tuple[str, ...] = ()  # the kinds of sharding under which it can keep state in host memory
    owns_state: bool = False  # whether masters, gradients and where they lie are its own matter
    owns_reduction: bool = False  # whether it adds up gradients by itself, and dense ones only
    peer_losses: tuple[PeerLoss, ...] = ()

    # While it is planned
    adopts: str = ""  # module:function (config, problems, world_size) → the config with what its own file says
    checks: str = ""  # module:function (config) → problems of settings that only it knows
    counts: str = ""  # module:function (address) → GPUs and CPUs of the largest machine there; "": of this one
    plans: str = ""  # module:function that makes its own part of the plan; see planner/planning.py
    divides: str = ""  # module:function (model) → the stages of a model of its own kind; 0: it is another
    reads: str = ""  # module:function (data) → a dataset of what it needs as torch's, or None: it is something else

    # While it is launched
    starts: str = "distributed.launch.local:LocalLauncher"  # who starts and watches its ranks
    spans: bool = False  # whether that one starts the ranks of all machines; else each machine starts its own
    processes: str = ""  # module:function (config, nodes, devices of a node) → processes of a node; "": one a device
    roles: str = ""  # module:function of the same → what ranks are to each other and find; see launch/request.py
    preloads: tuple[str, ...] = ()  # what the process that ranks are forked from imports; (): torch and ours
    launcher: LauncherTraits | None = None  # its own
    environ: Mapping[str, str] = field(default_factory=dict)  # what ranks of our launchers find, on any engine

    @property
    def is_native(self) -> bool:
        """Whether its steps are torch's own: what can be compiled can be made faster in other ways, too."""
        return "compile" in self.can

    @property
    def package(self) -> str:
        """The package that it needs; "": none.

        >>> Engine("module:Class", needs="package.module").package
        'package'
        """
        return self.needs.partition(".")[0]


ENGINES: Registry[Engine] = Registry("backend", "distributed.engines.declared:DECLARED")


def features() -> dict[str, Feature]:
    """The features of all engines: those that a setting turns on, and those that every run has."""
    own = {key: feature for engine in ENGINES.entries.values() for key, feature in engine.features.items()}
    return ASKED | own | HAD


def engine_of(config: Any) -> Engine:
    """The engine that a config selects, as far as that is known before its model and its data are."""
    name = config.backend if config.backend != "auto" else choose(EngineRequest(config), "cpu")[0]
    return ENGINES.entries[name]


def stages_of(model: Any) -> int:
    """The stages into which an engine's own class of models has cut this one; 0: none has."""
    found = (load_target(engine.divides)(model) for engine in ENGINES.entries.values() if engine.divides)
    return next((int(stages) for stages in found if stages), 0)


def launching(name: str, config: Any) -> Engine:
    """The engine whose launcher starts the ranks of this one: on a cluster, the one that places them there."""
    engine = ENGINES.entries[name]
    others = (one for one in ENGINES.entries.values() if engine.models in one.places)
    return engine if config.address is None else next(others, engine)


def load_strategy(name: str, is_bitwise: bool = False) -> Any:
    """The class that trains behind a backend's name."""
    engine = ENGINES.require(name)
    return load_target(engine.bitwise if is_bitwise else engine.target)


def choose(wanted: EngineRequest, device: str) -> tuple[str, str]:
    """The engine of backend='auto', and why; what has the most special reason is declared last.

    Where that one cannot do what is asked for, the first that can.
    """
    claims = ((name, engine.claims(wanted)) for name, engine in reversed(list(ENGINES.entries.items())))
    chosen, why = next((name, why) for name, why in claims if why)
    missing = [asked for asked, _, _ in refused(chosen, wanted, device)]
    for name in ENGINES.entries if missing else ():
        if not any(refused(name, wanted, device)):
            return name, f"it is the one for {' and '.join(missing)}"
    return chosen, why


def refused(name: str, wanted: EngineRequest, device: str) -> Iterator[tuple[str, str, list[str]]]:
    """Features that a run sets and this engine lacks: (the setting, why not, the engines that have it)."""
    engine = ENGINES.entries[name]
    for key, feature in features().items():
        asked = feature.asked_as(wanted)
        if not asked or _holds(engine, key, device):
            continue
        others = [other for other, one in ENGINES.entries.items() if _holds(one, key, device)]
        only = engine.can[key].device if key in engine.can else ""
        yield asked, f"it can only with device={only!r}" if only else f"it does not do this: {feature.title}", others


def _holds(engine: Engine, feature: str, device: str) -> bool:
    return feature in engine.can and engine.can[feature].device in (None, device)


def matrix() -> list[tuple[str, dict[str, str]]]:
    """Each feature's title, and what each engine says of it: "yes", "with cuda", a note, or nothing.

    >>> dict(matrix())["Adasum"]["pytorch-ddp"]
    ''
    """
    return [
        (feature.title, {name: _word(engine, key) for name, engine in ENGINES.entries.items()})
        for key, feature in features().items()
    ]


def _word(engine: Engine, feature: str) -> str:
    can = engine.can.get(feature)
    if can is None:
        return ""
    parts = [f"with {can.device}"] if can.device else []
    return ", ".join([*parts, *([can.note] if can.note else [])]) or "yes"
