"""A lower bound on the memory of a GPU's ranks; a plan is refused only if it certainly does not fit.

Counted are the tensors that an optimizer step holds at once: weights, gradients, and the state of an optimizer that
this library makes. Activations, NCCL's buffers and the CUDA context come on top, and are not guessed.
"""

from __future__ import annotations

from dataclasses import dataclass

from distributed.core.engines.engine import ENGINES
from distributed.core.errors import Problem
from distributed.core.plan import Plan
from distributed.planner.hardware import Hardware

_MOMENTS = {"adamw": 2, "adam": 2, "lamb": 2}  # tensors that an optimizer keeps for each parameter


@dataclass(frozen=True)
class ModelSize:
    """Bytes of a model's parameters as they were made; 0: not known."""

    parameters: int = 0
    trained: int = 0  # bytes of the parameters that get gradients


def too_little_memory(plan: Plan, size: ModelSize, makes_optimizer: bool, hardware: Hardware) -> list[Problem]:
    """A problem if the state of a GPU's ranks is known to exceed its memory."""
    have = max((gpu.memory_bytes for gpu in hardware.gpus), default=0)
    if plan.device != "cuda" or not have or ENGINES.entries[plan.strategy].owns_state or plan.shard.cpu_offload:
        return []
    whole = _state(plan, size, makes_optimizer)
    ranks = plan.ranks_per_node / len(hardware.gpus) if plan.shares_gpus else 1
    each = whole / _cut(plan)  # the average over ranks: at least one GPU holds that much
    if each * ranks <= have:
        return []
    together = f"the {plan.ranks_per_node} ranks of this node need" if plan.shares_gpus else "a rank needs"
    on = f"its {len(hardware.gpus)} GPU{'s' * (len(hardware.gpus) > 1)}" if plan.shares_gpus else "its GPU"
    needed, there = (each * plan.ranks_per_node, have * len(hardware.gpus)) if plan.shares_gpus else (each, have)
    kept = "weights, gradients and optimizer state" if makes_optimizer else "weights and gradients"
    return [
        Problem(
            f"{together} at least {_gib(needed)} on {on}, with {_gib(there)}",
            why=f"{kept} take {_gib(each)} on each rank, and activations come on top",
            do=_advice(plan, whole, each, have, len(hardware.gpus)),
        )
    ]


def _state(plan: Plan, size: ModelSize, makes_optimizer: bool) -> float:
    trained = 0 if plan.memory.lora is not None else size.trained  # adapters are small, and their size is not known
    moments = _MOMENTS.get(plan.optimizer.name, 0) if makes_optimizer else 0
    narrow = 0.5 if plan.speed.parameters != "fp32" else 1.0
    outer = 2 if plan.replicate.synchronization.kind == "diloco" else 0  # what a round began with, and the momentum
    return narrow * (size.parameters + trained * (1 + moments + outer))


def _cut(plan: Plan) -> int:
    """The number of shards of the state; a tensor that is not sharded takes more than is counted."""
    mesh, cut = plan.mesh, plan.mesh.tp * plan.mesh.pp
    if plan.shard.is_fsdp:
        return cut * mesh.dp_shard * mesh.cp
    return cut if plan.shard.kind == "none" else cut * mesh.data_ranks * mesh.cp


def _advice(plan: Plan, whole: float, each: float, have: int, gpus: int) -> str:
    fit = int(have // each) * gpus * plan.num_nodes
    if plan.shares_gpus and fit and plan.is_replicated:
        return f"set num_gpus={fit}" + (", or zero_stage=3, which shards the state" if whole <= have else "")
    if plan.is_replicated and plan.world_size > 1 and whole / (gpus * plan.num_nodes) <= have:
        return "set zero_stage=3, which shards the state"
    return "set zero_stage=3 with cpu_offload=true, take more GPUs, or train fewer parameters (lora=8)"


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
