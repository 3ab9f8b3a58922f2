"""summarize: a ModelSummary of a task, and of a batch of its data if there is one."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
from torch import nn

from distributed.core.batch_plan import BatchPlan
from distributed.core.config import DistributedConfig
from distributed.core.plan import OptimizerPlan, Plan, PrecisionPlan
from distributed.data.generators import seeded
from distributed.data.source import Source
from distributed.train.task import Task
from distributed.trainers.summary.measured_pass import PassFindings, fake_pass, is_within, meta_pass
from distributed.trainers.summary.model_summary import NOT_CALLED, LayerSummary, ModelSummary, StepMemory


def summarize(task: Task, config: DistributedConfig, source: Source | None, depth: int) -> ModelSummary:
    """Nothing is trained, and neither the model nor the generators change; of the data, one batch is read."""
    plan, unknown, batch, samples = _plan(config), list[str](), None, None
    counted, stepped = PassFindings(), PassFindings()
    if source is None:
        unknown.append("shapes, FLOPs and activations need a batch: trainer.summary(train_loader)")
    else:
        batch, samples = _first_batch(source, config)
        counted, stepped = meta_pass(task, plan, batch), fake_pass(task, plan, batch)
        unknown += _unknown(counted, stepped)
    if config.activation_checkpointing:
        unknown.append("how many of these activations activation_checkpointing computes again")
    if config.lora:
        unknown.append("what the adapters of lora add, and what they leave untrained")
    flops, shapes = counted.flops or stepped.flops, counted.shapes or stepped.shapes
    layers = tuple(
        _layer(path, module, flops=flops, shapes=shapes, stepped=stepped, samples=samples)
        for path, module in task.model.named_modules()
        if _depth(path) <= depth
    )
    return ModelSummary(
        layers,
        StepMemory(
            layers[0].parameter_bytes,
            stepped.gradient_bytes if source is not None else _trained_bytes(task.model),
            stepped.state_bytes,
            layers[0].activation_bytes,
        ),
        samples,
        _each(counted.backward_flops if counted.backward_flops is not None else stepped.backward_flops, samples),
        tuple(unknown),
    )


def _plan(config: DistributedConfig) -> Plan:
    """What a pass needs of a plan: its precision, and the optimizer that the settings name."""
    asked = config.mixed_precision
    kind = "bf16" if asked is True or (not asked and config.bf16_parameters) else asked or "fp32"
    optimizer = OptimizerPlan(config.optimizer, config.learning_rate, config.weight_decay, config.momentum)
    return Plan("", BatchPlan(1), precision=PrecisionPlan(kind), optimizer=optimizer)


def _first_batch(source: Source, config: DistributedConfig) -> tuple[Any, int]:
    """Read in this process, under a seed, after which the generators are as they were."""
    size = source.batch_size or config.batch_size or 1
    with seeded(config.seed):
        if source.is_stream:
            rows = list(islice(iter(source.dataset), size))
        else:
            rows = [source.dataset[index] for index in range(min(size, len(source.dataset)))]
        return source.collate_fn(rows), len(rows)


def _unknown(counted: PassFindings, stepped: PassFindings) -> list[str]:
    found = []
    if counted.failed and stepped.flops:
        found.append(f"FLOPs of attention and recurrent layers may be missing: {counted.failed}")
    if counted.failed and not stepped.flops:
        found.append(f"shapes and FLOPs: {counted.failed}")
    if stepped.failed:
        what = "the optimizer's state" if stepped.gradient_bytes is not None else "activations, gradients and state"
        found.append(f"{what}: {stepped.failed}")
    return found


def _layer(
    path: str,
    module: nn.Module,
    *,
    flops: dict[str, int],
    shapes: dict[str, str],
    stepped: PassFindings,
    samples: int | None,
) -> LayerSummary:
    own, kept = list(module.parameters()), stepped.kept_bytes
    is_lazy = any(isinstance(parameter, nn.parameter.UninitializedParameter) for parameter in own)
    counts = [(p.numel(), p.requires_grad) for p in own if not isinstance(p, nn.parameter.UninitializedParameter)]
    called = [name for name in shapes if is_within(name, path)]
    outermost = [name for name in called if not any(is_within(name, other) for other in called if other != name)]
    return LayerSummary(
        name=path,
        kind=type(module).__name__,
        depth=_depth(path),
        parameters=None if is_lazy else sum(count for count, _ in counts),
        trained=None if is_lazy else sum(count for count, is_trained in counts if is_trained),
        shape=shapes.get(path, NOT_CALLED if "" in shapes else ""),
        flops=_each(sum(flops.get(name, 0) for name in outermost), samples) if flops else None,
        parameter_bytes=sum(_nbytes(parameter) for parameter in own),
        activation_bytes=sum(size for name, size in kept.items() if is_within(name, path)) if kept else None,
    )


def _depth(path: str) -> int:
    return len(path.split(".")) if path else 0


def _each(count: int | None, samples: int | None) -> int | None:
    return None if count is None or not samples else count // samples


def _nbytes(parameter: torch.Tensor) -> int:
    return 0 if isinstance(parameter, nn.parameter.UninitializedParameter) else parameter.nbytes


def _trained_bytes(model: nn.Module) -> int:
    return sum(_nbytes(parameter) for parameter in model.parameters() if parameter.requires_grad)
