"""Which numbers a model computes in: mixed precision as asked, or as this device has it."""

from __future__ import annotations

from distributed.core.choices import Device, Precision
from distributed.core.config import DistributedConfig
from distributed.core.engines.engine import Engine
from distributed.core.plan import Decision, PrecisionPlan
from distributed.planner.hardware import Hardware


def plan_precision(
    config: DistributedConfig, device: Device, hardware: Hardware, engine: Engine, decisions: list[Decision]
) -> PrecisionPlan:
    asked = config.mixed_precision
    if asked is False and config.bf16_parameters:
        decisions.append(Decision("mixed precision bf16", "bf16_parameters makes the model compute in bf16"))
        asked = "bf16"
    if asked is False:
        return PrecisionPlan()
    kind: Precision
    if asked is not True:
        kind = asked
    else:
        kind, reason = _choose_precision(config, device, hardware, engine)
        decisions.append(Decision(f"mixed precision {kind}", reason, "mixed_precision"))
    defaults = PrecisionPlan()
    return PrecisionPlan(
        kind,
        config.scaler_init_scale or defaults.scaler_init_scale,
        config.scaler_growth_interval or defaults.scaler_growth_interval,
    )


def _choose_precision(
    config: DistributedConfig, device: Device, hardware: Hardware, engine: Engine
) -> tuple[Precision, str]:
    """What mixed_precision=True is, and why. Settings of a gradient scaler ask for fp16, which alone needs one."""
    has_bf16 = device == "cpu" or hardware.has_bf16
    can_fp16 = "fp16" in engine.can and engine.can["fp16"].device in (None, device) and not config.bf16_parameters
    asks = [name for name in ("scaler_init_scale", "scaler_growth_interval") if getattr(config, name)]
    if not has_bf16:
        return "fp16", "this device does not support bf16; the loss is scaled"
    if asks and can_fp16:
        return "fp16", f"{asks[0]} is set, and it is fp16 whose loss is scaled"
    if asks:
        return "bf16", f"fp16 cannot be had here, and bf16 needs no gradient scaler: {asks[0]} is not used"
    return "bf16", "this device supports bf16, which needs no gradient scaling"
