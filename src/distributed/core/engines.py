"""Engines: what trains behind each backend's name, as each declares itself: where it lives, what it needs, what it can.

The planner refuses what an engine does not declare, `distributed doctor` and docs/engines.md show it, and tests hold
every declaration to a run. A new engine is a new entry here, and a file under `strategies/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from distributed.core.registry import Entry, Registry, load_target


@dataclass(frozen=True)
class Wanted:
    """What a run asks of its engine."""

    config: Any  # a DistributedConfig, which this vocabulary comes before
    sharding: str = "none"  # "none", "optimizer", "grad_op", "full" or "hybrid"
    is_stream: bool = False
    has_batchnorm: bool = False
    world_size: int = 1


@dataclass(frozen=True)
class Feature:
    """Something that some engines can do, and how a user asks for it."""

    title: str
    asked_as: Callable[[Wanted], str] = lambda wanted: ""  # the setting that asks for it in this run; "": none does


@dataclass(frozen=True)
class Can:
    """An engine's word for a feature."""

    note: str = ""  # what a reader of the matrix should know
    device: str = ""  # the only kind of device where it holds; "": any


@dataclass(frozen=True)
class Engine(Entry):
    """What a backend declares of itself."""

    does: str = ""  # in one line
    can: Mapping[str, Can] = field(default_factory=dict)
    bitwise: str = ""  # what trains under reproducible='bitwise'
    shards: str = "none"  # what data-parallel ranks share out when nothing is said
    offloads: tuple[str, ...] = ()  # the kinds of sharding under which it can keep state in host memory
    starts: str = "distributed.launch.local:LocalLauncher"  # who starts and watches its ranks
    spans: bool = False  # whether that one starts the ranks of all machines; else each machine starts its own
    counts: str = ""  # module:function (address) → GPUs and CPUs of the largest machine there; "": of this one
    checks: str = ""  # module:function (config) → problems of settings that only it knows
    processes: str = ""  # module:function (config, nodes, devices of a node) → processes of a node; "": one a device
    roles: str = ""  # module:function of the same → what ranks are to each other and find; see launch/request.py
    preloads: tuple[str, ...] = ()  # what the process that ranks are forked from imports; (): torch and ours
    plans: str = ""  # module:function that makes its own part of the plan; see planner/planning.py
    bare: str = ""  # module:function that trains with it by hand, for `distributed bench overhead`
    models: str = "torch"  # whose models it trains: "torch" or "keras"
    peer: str = "torchrun"  # who starts the same by hand, for `distributed bench start`
    claims: Callable[[Wanted], str] = lambda wanted: ""  # why backend='auto' is this one; "": it is not

    @property
    def is_native(self) -> bool:
        """Whether its steps are torch's own: what can be compiled can be made faster in other ways, too."""
        return "compile" in self.can


def _setting(name: str, unless: Any = False) -> Callable[[Wanted], str]:
    """Asked for by one setting, unless it has this value."""

    def asked_as(wanted: Wanted) -> str:
        value = getattr(wanted.config, name)
        return "" if value in (unless, None, False) else f"{name}={value!r}"

    return asked_as


def _value(name: str, *values: Any) -> Callable[[Wanted], str]:
    """Asked for by one of these values of a setting."""

    def asked_as(wanted: Wanted) -> str:
        value = getattr(wanted.config, name)
        return f"{name}={value!r}" if value in values else ""

    return asked_as


def _sharding(kind: str) -> Callable[[Wanted], str]:
    def asked_as(wanted: Wanted) -> str:
        if wanted.sharding != kind:
            return ""
        stage = wanted.config.zero_stage
        return f"zero_stage={stage}" if stage is not None else f"sharding={kind!r}"

    return asked_as


FEATURES: dict[str, Feature] = {
    "bf16": Feature("bf16", _value("mixed_precision", "bf16")),
    "fp16": Feature("fp16 with a scaled loss", _value("mixed_precision", "fp16")),
    "fp8": Feature("linear layers in fp8", _value("mixed_precision", "fp8")),
    "bf16_parameters": Feature("parameters and gradients in bf16", _setting("bf16_parameters")),
    "capture": Feature("the whole step as one CUDA graph", _value("capture", True)),
    "accumulation": Feature("gradient accumulation", _setting("gradient_accumulation_steps", 1)),
    "clipping": Feature("clipping by the norm of the whole gradient", _setting("gradient_clipping")),
    "targets": Feature("mean over targets, also when they are unevenly spread", _value("loss_weighting", "targets")),
    "stream": Feature("streams (iterable datasets)", lambda wanted: "an iterable dataset" * wanted.is_stream),
    "batchnorm": Feature(
        "BatchNorm over all ranks",
        lambda w: "sync_batchnorm=true" * (w.config.sync_batchnorm and w.has_batchnorm and w.world_size > 1),
    ),
    "zero1": Feature("optimizer state shared out (ZeRO-1)", _sharding("optimizer")),
    "zero2": Feature("... and gradients (ZeRO-2)", _sharding("grad_op")),
    "zero3": Feature("... and parameters (ZeRO-3)", _sharding("full")),
    "hybrid": Feature("shared out within groups, replicated over them", _sharding("hybrid")),
    "cpu_offload": Feature("parameters and optimizer state in host memory", _setting("cpu_offload")),
    "offload_optimizer": Feature("optimizer state alone in host memory or on a disk", _setting("offload_optimizer")),
    "offload_parameters": Feature("parameters alone in host memory or on a disk", _setting("offload_parameters")),
    "tensor": Feature("tensor parallelism", _setting("tensor_parallel", 1)),
    "pipeline": Feature("pipeline parallelism", _setting("pipeline_parallel", 1)),
    "context": Feature("context parallelism", _setting("context_parallel", 1)),
    "recompute": Feature("activations computed again", _setting("activation_checkpointing")),
    "compile": Feature("torch.compile of each block", _setting("compile", "auto")),
    "lora": Feature("LoRA", _setting("lora")),
    "bitwise": Feature(
        "the same bytes at any number of ranks",
        lambda w: "" if w.sharding != "none" else _value("reproducible", "bitwise")(w),  # else refused with its reason
    ),
    "unused": Feature("parameters left out in some steps", _setting("find_unused_parameters")),
    "static_graph": Feature("static graph", _setting("static_graph")),
    "compression": Feature("gradients compressed on the wire", _setting("compression", "none")),
    "adasum": Feature("Adasum", _value("gradient_reduction", "adasum")),
    "fusion": Feature(
        "size of fused gradients, and cycle time",
        lambda wanted: _setting("fusion_threshold_mb")(wanted) or _setting("cycle_time_ms")(wanted),
    ),
    "timeline": Feature("timeline of the collectives", _setting("timeline")),
    "mpi": Feature("collectives over MPI", _value("communication_backend", "mpi")),
    "config_file": Feature("a DeepSpeed configuration", _setting("deepspeed_config")),
    "cluster": Feature("ranks placed on a Ray cluster", _setting("address")),
    "parameter_server": Feature(
        "asynchronous workers around a parameter server", _value("tensorflow_strategy", "parameter_server")
    ),
    # Not asked for by a setting: these say what a run on this engine has.
    "save": Feature("saves checkpoints that every engine and number of ranks can load"),
    "load": Feature("loads checkpoints of every engine and number of ranks"),
    "restart": Feature("a rank that dies: all go on from the last checkpoint"),
    "regroup": Feature("... and the others go on from memory, with fewer or more ranks"),
    "meta": Feature("models built on the meta device"),
    "dry_run": Feature("dry run of a world of any size in one process"),
}

_REPLICAS = {
    "bf16": Can(),
    "fp16": Can(),
    "accumulation": Can(),
    "clipping": Can(),
    "targets": Can(),
    "stream": Can(),
    "batchnorm": Can(),
    "save": Can(),
    "load": Can(),
    "restart": Can(),
}
_MESH = _REPLICAS | {
    "zero1": Can(),
    "zero2": Can(),
    "zero3": Can(),
    "hybrid": Can(),
    "cpu_offload": Can("with ZeRO-2, ZeRO-3 or hybrid"),
    "tensor": Can(),
    "pipeline": Can(),
    "context": Can(),
    "recompute": Can(),
    "compile": Can(),
    "lora": Can(),
    "unused": Can(),
    "static_graph": Can(),
    "meta": Can(),
    "dry_run": Can(),
}
# Of engines whose ranks may hold the whole model each.
_WHOLE = {
    "bitwise": Can(),
    "fp8": Can("on Hopper and later", device="cuda"),
    "bf16_parameters": Can("where nothing is shared out"),
    "capture": Can("where nothing is shared out", device="cuda"),
}


def _why_fsdp(wanted: Wanted) -> str:
    return "it is what shards the state of a model" if wanted.sharding in ("grad_op", "full", "hybrid") else ""


ENGINES: Registry[Engine] = Registry(
    "backend",
    {
        "pytorch-ddp": Engine(
            "distributed.strategies.torch_mesh:TorchMesh",
            does="PyTorch's own, every rank with the whole model unless it is told otherwise",
            can=_MESH | _WHOLE | {"regroup": Can("where nothing is shared out, on gloo")},
            offloads=("grad_op", "full", "hybrid"),
            bare="distributed.bench.hand_written:train",
            bitwise="distributed.strategies.bitwise:BitwiseReplicas",
            claims=lambda wanted: "" if _why_fsdp(wanted) else "data-parallel ranks hold the same parameters",
        ),
        "fsdp": Engine(
            "distributed.strategies.torch_mesh:TorchMesh",
            does="the same, with all state shared out unless it is told otherwise",
            can=_MESH,
            shards="full",
            offloads=("grad_op", "full", "hybrid"),
            claims=_why_fsdp,
        ),
        "deepspeed": Engine(
            "distributed.strategies.deepspeed_engine:DeepSpeedEngine",
            needs="deepspeed",
            extra="deepspeed",
            does="DeepSpeed's ZeRO, with state in host memory or on a disk",
            can={
                "bf16": Can("parameters in bf16 beside a master in fp32"),
                "fp16": Can("the same, with a scaled loss", device="cuda"),
                "accumulation": Can(),
                "clipping": Can(),
                "targets": Can(),
                "stream": Can(),
                "batchnorm": Can("in fp32"),
                "recompute": Can(),
                "lora": Can(),
                "zero1": Can(),
                "zero2": Can(),
                "zero3": Can(),
                "cpu_offload": Can("parameters with ZeRO-3"),
                "offload_optimizer": Can("on a disk with ZeRO-3"),
                "offload_parameters": Can("with ZeRO-3"),
                "config_file": Can(),
                "save": Can(),
                "load": Can(),
                "restart": Can(),
            },
            shards="grad_op",
            offloads=("optimizer", "grad_op", "full"),
            plans="distributed.planner.deepspeed:plan_engine",
            bare="distributed.bench.hand_written_deepspeed:train",
            claims=lambda wanted: "a DeepSpeed configuration is given" * (wanted.config.deepspeed_config is not None),
        ),
        "horovod": Engine(
            "distributed.strategies.horovod_engine:HorovodEngine",
            needs="horovod.torch",
            install="make horovod",
            does="Horovod's ring, on gloo or MPI",
            can=_REPLICAS
            | {
                "unused": Can(),
                "compression": Can("fp16"),
                "adasum": Can("over MPI; checkpoints have rank 0's optimizer state"),
                "fusion": Can(),
                "timeline": Can(),
                "mpi": Can("where the wheel was built with it"),
                "regroup": Can("on gloo, unless a cycle time is set"),
            },
            plans="distributed.planner.horovod:plan_engine",
            bare="distributed.bench.hand_written_horovod:train",
        ),
        "ray": Engine(
            "distributed.strategies.torch_mesh:TorchMesh",
            needs="ray.train",
            extra="ray",
            does="PyTorch's own, on ranks that Ray places on its cluster",
            can=_MESH | _WHOLE | {"cluster": Can()},
            offloads=("grad_op", "full", "hybrid"),
            starts="distributed.launch.ray:RayLauncher",
            spans=True,
            counts="distributed.launch.ray_cluster:largest_node",
            checks="distributed.planner.ray:problems_of",
            plans="distributed.planner.ray:plan_engine",
            bare="distributed.bench.hand_written_ray:train",
            peer="ray",
            bitwise="distributed.strategies.bitwise:BitwiseReplicas",
            claims=lambda wanted: "a Ray cluster's address is given" * (wanted.config.address is not None),
        ),
        "tensorflow": Engine(
            "distributed.tensorflow.worker:main",
            needs="tensorflow",
            extra="tensorflow",
            does="TensorFlow's own strategies, for Keras models",
            can={
                "bf16": Can(),
                "fp16": Can(),
                "accumulation": Can(),
                "clipping": Can(),
                "stream": Can("tf.data"),
                "batchnorm": Can(),
                "restart": Can(),
                "parameter_server": Can("a worker that dies is replaced alone"),
            },
            processes="distributed.planner.tensorflow:processes",
            roles="distributed.tensorflow.cluster:roles",
            preloads=("tensorflow", "keras", "distributed.tensorflow.worker"),
            plans="distributed.planner.tensorflow:plan_engine",
            models="keras",
            peer="tensorflow",
        ),
    },
)


def engine_of(config: Any) -> Engine:
    """The engine that a config asks for, as far as that is known before its model and its data are."""
    name = config.backend if config.backend != "auto" else choose(Wanted(config), "cpu")[0]
    return ENGINES.entries[name]


def load_strategy(name: str, is_bitwise: bool = False) -> Any:
    """The class that trains behind a backend's name."""
    engine = ENGINES.require(name)
    return load_target(engine.bitwise if is_bitwise else engine.target)


def choose(wanted: Wanted, device: str) -> tuple[str, str]:
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


def refused(name: str, wanted: Wanted, device: str) -> Iterator[tuple[str, str, list[str]]]:
    """What a run asks for and this engine cannot do: (how it was asked for, why not, the engines that can)."""
    engine = ENGINES.entries[name]
    for key, feature in FEATURES.items():
        asked = feature.asked_as(wanted)
        if not asked or _holds(engine, key, device):
            continue
        others = [other for other, one in ENGINES.entries.items() if _holds(one, key, device)]
        only = engine.can[key].device if key in engine.can else ""
        yield asked, f"it can only with device={only!r}" if only else f"it does not do this: {feature.title}", others


def _holds(engine: Engine, feature: str, device: str) -> bool:
    return feature in engine.can and engine.can[feature].device in ("", device)


def matrix() -> list[tuple[str, dict[str, str]]]:
    """Each feature's title, and what each engine says of it: "yes", "with cuda", a note, or nothing.

    >>> dict(matrix())["Adasum"]["pytorch-ddp"]
    ''
    """
    return [
        (feature.title, {name: _word(engine, key) for name, engine in ENGINES.entries.items()})
        for key, feature in FEATURES.items()
    ]


def _word(engine: Engine, feature: str) -> str:
    can = engine.can.get(feature)
    if can is None:
        return ""
    parts = [f"with {can.device}"] if can.device else []
    return ", ".join([*parts, *([can.note] if can.note else [])]) or "yes"
