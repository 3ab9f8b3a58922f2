"""What compresses the gradients of a run's replicas, as its plan says."""

from __future__ import annotations

from functools import partial

import torch

from distributed.comm.compression.choice import STEPS_NEEDED
from distributed.core.plan import Plan
from distributed.core.plan_parts.compression import CompressionPlan
from distributed.runtime.session import Session
from distributed.runtime.torch_module_compat import loss_scale_tensors
from distributed.strategies.data_parallel.auto.auto_compression import AutoCompression
from distributed.strategies.data_parallel.auto.switch_record import SwitchRecord
from distributed.strategies.data_parallel.compressed_gradients import (
    CastGradients,
    CompressedGradients,
    FedBackGradients,
)
from distributed.strategies.data_parallel.step_compression import StepCompression, Stepped


def step_compression(
    plan: Plan, session: Session, scaler: torch.amp.GradScaler | None, stepped: Stepped
) -> StepCompression | None:
    """None: gradients are sent whole."""
    compression, ranks = plan.replicate.compression, plan.mesh.data_ranks
    make = partial(_reducer, plan, session, scaler)
    if compression.kind == "none" or (ranks == 1 and not compression.keeps):
        return None
    if compression.kind != "auto" or ranks == 1:  # a single rank steps by what was left
        return StepCompression(make(compression), session, ranks=ranks, stepped=stepped)
    batch, precision = plan.batch, plan.precision.kind
    steps = [batch.per_device, batch.accumulation, precision, plan.speed.parameters]
    sizes = [compression.ratio, compression.rank, compression.min_size]
    return AutoCompression(
        compression,
        session,
        record=SwitchRecord(plan.run_dir, session, ranks=ranks, measured_with=[*steps, *sizes]),
        kinds=_candidates(plan),
        make=make,
        ranks=ranks,
        stepped=stepped,
    )


def _candidates(plan: Plan) -> list[str]:
    """The kinds that send less than whole gradients, and are as safe."""
    useless = set()
    if plan.speed.parameters != "fp32":  # of which gradients have 16 bits already
        useless.add("bf16")
    if plan.replicate.compression.ratio * plan.mesh.data_ranks >= 1:
        useless.add("topk")
    return [kind for kind in STEPS_NEEDED if kind not in useless]


def _reducer(
    plan: Plan, session: Session, scaler: torch.amp.GradScaler | None, compression: CompressionPlan
) -> CompressedGradients:
    if compression.kind in ("fp16", "bf16"):
        return CastGradients(compression, session, is_scaled=scaler is not None)
    return FedBackGradients(
        compression,
        session,
        seed=plan.seed,
        finds_unused=plan.replicate.find_unused_parameters,
        loss_scale=lambda: loss_scale_tensors(scaler)[0] if scaler is not None else None,
    )
