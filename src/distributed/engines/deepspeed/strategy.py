"""Which of DeepSpeed's engines trains a plan: its ZeRO, or its pipeline."""

from __future__ import annotations

from distributed.core.plan import Plan
from distributed.engines.deepspeed.engine import DeepSpeedEngine
from distributed.engines.deepspeed.pipeline.strategy import DeepSpeedPipeline
from distributed.strategies.base import Strategy


def strategy_of(plan: Plan) -> Strategy:
    return DeepSpeedPipeline(plan) if plan.mesh.pp > 1 else DeepSpeedEngine(plan)
