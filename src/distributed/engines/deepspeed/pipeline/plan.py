"""What a deepspeed.pipe.PipelineModule asks of a plan, and what does not go with it. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distributed.core.config import DistributedConfig
from distributed.core.errors import Problem
from distributed.core.plan import Plan

_MODULE = ("deepspeed.runtime.pipe.module", "PipelineModule")


def stages_of(model: Any) -> int:
    """The stages that DeepSpeed has cut a model into; 0: it is no PipelineModule."""
    is_module = any((kind.__module__, kind.__name__) == _MODULE for kind in type(model).__mro__)
    return int(model.num_stages) if is_module else 0


def pipeline_config() -> dict[str, Any]:
    """Of DeepSpeed's pipeline: the optimizer and its clipping are ours, and so is the number of micro-batches."""
    low = {"bf16": {"enabled": False}, "fp16": {"enabled": False}}
    return {"zero_optimization": {"stage": 0}, "gradient_clipping": 0.0} | low  # which would be 1.0 by itself


def pipeline_problems(config: DistributedConfig, plan: Plan, content: Mapping[str, Any], stages: int) -> list[Problem]:
    """Everything that a PipelineModule is refused with, each with its name."""
    found = []
    if stages < 2:
        do = "set num_stages=2 or more, or pass the layers as nn.Sequential"
        why = "the stage has all layers, which is no pipeline"
        found.append(Problem("a PipelineModule of DeepSpeed with one stage", why=why, do=do))
    for name, is_asked, why in (
        ("zero_stage", plan.shard.kind != "none", "each stage holds its state whole here, and DeepSpeed has no ZeRO-2"),
        ("mixed_precision", plan.precision.kind != "fp32", "its low precision has masters that are not stored here"),
        ("lora", plan.memory.lora is not None, "adapters would have to be put into the layers of all stages"),
        ("activation_checkpointing", bool(plan.memory.recompute), "its layers are run by DeepSpeed"),
        ("offload_optimizer", bool(config.offload_optimizer or config.cpu_offload), "that is ZeRO's"),
        ("offload_parameters", bool(config.offload_parameters), "that is ZeRO's"),
        ("pipeline_schedule", config.pipeline_schedule is not None, "DeepSpeed has one schedule, 1F1B"),
        ("optimizer of the DeepSpeed configuration", "optimizer" in content, "the step is the trainer's"),
    ):
        if is_asked:
            do = "leave it out, or give the layers as a model of torch's: nn.Sequential(…), backend='pytorch-ddp'"
            found.append(Problem(f"{name} with a PipelineModule of DeepSpeed", why=why, do=do))
    return found
