"""Features: what engines can do, by which setting, and what runs on an engine have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class EngineRequest:
    """What a run needs of its engine."""

    config: Any  # a DistributedConfig, which this vocabulary comes before
    sharding: str = "none"  # "none", "optimizer", "grad_op", "full" or "hybrid"
    is_stream: bool = False
    has_batchnorm: bool = False
    world_size: int = 1
    task: Mapping[str, str] = field(default_factory=dict)  # features that the task needs, and how it asks for each
    stages: int = 0  # of a model that an engine's own class has cut; 0: it is not such a model


@dataclass(frozen=True)
class Feature:
    """Something that some engines can do, and the setting that turns it on."""

    title: str
    # The setting that turns it on in this run; "": none does.
    asked_as: Callable[[EngineRequest], str] = lambda wanted: ""


def by_setting(name: str, unless: Any = False) -> Callable[[EngineRequest], str]:
    """Asked for by one setting, unless it has this value."""

    def asked_as(wanted: EngineRequest) -> str:
        value = getattr(wanted.config, name)
        return "" if value in (unless, None, False) else f"{name}={value!r}"

    return asked_as


def by_value(name: str, *values: Any) -> Callable[[EngineRequest], str]:
    """Asked for by one of these values of a setting."""

    def asked_as(wanted: EngineRequest) -> str:
        value = getattr(wanted.config, name)
        return f"{name}={value!r}" if value in values else ""

    return asked_as


def by_task(feature: str) -> Callable[[EngineRequest], str]:
    """Asked for by the task: by its steps and its optimizers."""
    return lambda wanted: wanted.task.get(feature, "")


def _sharding(kind: str) -> Callable[[EngineRequest], str]:
    def asked_as(wanted: EngineRequest) -> str:
        if wanted.sharding != kind:
            return ""
        stage = wanted.config.zero_stage
        return f"zero_stage={stage}" if stage is not None else f"sharding={kind!r}"

    return asked_as


_LOSSY = ("bf16", "topk", "randomk", "powersgd", "int8", "onebit")
ASKED: dict[str, Feature] = {
    "bf16": Feature("bf16", by_value("mixed_precision", "bf16")),
    "fp16": Feature("fp16 with a scaled loss", by_value("mixed_precision", "fp16")),
    "fp8": Feature("linear layers in fp8", by_value("mixed_precision", "fp8")),
    "bf16_parameters": Feature("parameters and gradients in bf16", by_setting("bf16_parameters")),
    "capture": Feature("the whole step as one CUDA graph", by_value("capture", True)),
    "accumulation": Feature("gradient accumulation", by_setting("gradient_accumulation_steps", 1)),
    "clipping": Feature("clipping by the norm of the whole gradient", by_setting("gradient_clipping")),
    "clip_value": Feature("clipping of each number of the gradient", by_setting("gradient_clip_value")),
    "anomaly": Feature("the operation that made NaN is named", by_setting("detect_anomaly")),
    "layerwise": Feature("LARS and LAMB, by the norms of whole layers", by_value("optimizer", "lars", "lamb")),
    "buckets": Feature("batches of samples of similar length", by_setting("bucket_by_length")),
    "targets": Feature("mean over targets, also when they are unevenly spread", by_value("loss_weighting", "targets")),
    "own_step": Feature("training, validation and prediction steps of your own", by_task("own_step")),
    "several_optimizers": Feature("several optimizers, each with its phase of a step", by_task("several_optimizers")),
    "manual": Feature("manual optimization", by_task("manual")),
    "closure": Feature("optimizers that call the model by a closure (LBFGS)", by_task("closure")),
    "stream": Feature("streams (iterable datasets)", lambda wanted: "an iterable dataset" * wanted.is_stream),
    "batchnorm": Feature(
        "BatchNorm over all ranks",
        lambda w: "sync_batchnorm=true" * (w.config.sync_batchnorm and w.has_batchnorm and w.world_size > 1),
    ),
    "zero1": Feature("optimizer state sharded (ZeRO-1)", _sharding("optimizer")),
    "zero2": Feature("... and gradients (ZeRO-2)", _sharding("grad_op")),
    "zero3": Feature("... and parameters (ZeRO-3)", _sharding("full")),
    "hybrid": Feature("sharded within groups, replicated over them", _sharding("hybrid")),
    "cpu_offload": Feature("parameters and optimizer state in host memory", by_setting("cpu_offload")),
    "offload_optimizer": Feature("optimizer state alone in host memory or on a disk", by_setting("offload_optimizer")),
    "offload_parameters": Feature("parameters alone in host memory or on a disk", by_setting("offload_parameters")),
    "tensor": Feature("tensor parallelism", by_setting("tensor_parallel", 1)),
    "pipeline": Feature("pipeline parallelism", lambda w: "" if w.stages else by_setting("pipeline_parallel", 1)(w)),
    "context": Feature("context parallelism", by_setting("context_parallel", 1)),
    "recompute": Feature("activations computed again", by_setting("activation_checkpointing")),
    "compile": Feature("torch.compile of each block", by_setting("compile", "auto")),
    "lora": Feature("LoRA", by_setting("lora")),
    "bitwise": Feature(
        "the same bytes at any number of ranks",
        # Where state is sharded, it is refused with its reason.
        lambda w: "" if w.sharding != "none" else by_value("reproducible", "bitwise")(w),
    ),
    "unused": Feature("parameters left out in some steps", by_setting("find_unused_parameters")),
    "static_graph": Feature("static graph", by_setting("static_graph")),
    "compression": Feature("gradients in fp16 on the wire", by_value("compression", "fp16")),
    "feedback": Feature(
        "gradients in bf16; in 8 bits or 1 bit, as factors or a few of them, with error feedback",
        by_value("compression", *_LOSSY),
    ),
    "local_steps": Feature(
        "replicas that step alone: local SGD, post-local SGD, DiLoCo",
        by_value("synchronization", "local_sgd", "post_local_sgd", "diloco"),
    ),
    "asynchronous": Feature(
        "a parameter server whose workers do not wait for each step", by_value("synchronization", "asynchronous")
    ),
    "adasum": Feature("Adasum", by_value("gradient_reduction", "adasum")),
    "fusion": Feature(
        "size of fused gradients, and cycle time",
        lambda wanted: by_setting("fusion_threshold_mb")(wanted) or by_setting("cycle_time_ms")(wanted),
    ),
    "timeline": Feature("timeline of the collectives", by_setting("timeline")),
    "mpi": Feature("collectives over MPI", by_value("communication_backend", "mpi")),
}

# Not asked for by a setting: these say what a run on an engine has.
HAD: dict[str, Feature] = {
    "save": Feature("saves checkpoints that every engine and number of ranks can load"),
    "load": Feature("loads checkpoints of every engine and number of ranks"),
    "restart": Feature("a rank that dies: all resume from the last checkpoint"),
    "regroup": Feature("... and the others resume from memory, with fewer or more ranks"),
    "own_loop": Feature("loops of the user's own (`distributed.start`)"),
    "meta": Feature("models built on the meta device"),
    "dry_run": Feature("dry run of a world of any size in one process"),
}
