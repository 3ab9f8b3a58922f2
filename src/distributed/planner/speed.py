"""Free speed: which ways to a faster step a run takes, each with its reason and the setting that changes it."""

from __future__ import annotations

from typing import Literal

from distributed.core.config import DistributedConfig
from distributed.core.errors import Problem
from distributed.core.plan import Decision, PrecisionPlan, SpeedPlan
from distributed.planner.hardware import Hardware

HAS_FP8 = 8.9  # Ada, and all since
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

Asked = bool | Literal["auto"]


def plan_speed(
    config: DistributedConfig,
    *,
    device: str,
    hardware: Hardware,
    precision: PrecisionPlan,
    is_native: bool,
    holds_whole: bool,
    has_convolutions: bool,
    environ: dict[str, str] | None = None,
    decisions: list[Decision],
    problems: list[Problem],
) -> SpeedPlan:
    """`is_native`: torch trains, and not an engine with kernels of its own. `holds_whole`: every rank has all of it."""
    on_gpu = device == "cuda"
    is_low = precision.kind != "fp32"
    capability = min((gpu.compute_capability for gpu in hardware.gpus), default=0.0)
    is_bitwise = config.reproducible == "bitwise"

    def choose(name: str, asked: Asked, when: bool, what: str, why: str) -> bool:
        if asked == "auto":
            if when:
                decisions.append(Decision(what, why, name))
            return when
        return asked

    problems += _impossible(config, device, hardware, holds_whole, is_bitwise)
    problems += _useless(config, on_gpu, is_native)
    return SpeedPlan(
        capture=_left_open(config.capture, on_gpu and is_native and holds_whole and not is_bitwise),
        fused_optimizer=choose(
            "fused_optimizer",
            config.fused_optimizer,
            on_gpu and is_native and holds_whole,
            "fused optimizer",
            "where torch has one, a kernel that reads and writes each number of its state once",
        ),
        parameters=_plan_parameters(config, decisions),
        channels_last=choose(
            "channels_last",
            config.channels_last,
            on_gpu and is_native and holds_whole and is_low and has_convolutions and not is_bitwise,
            "channels last",
            "convolutions in 16 bits run on the tensor cores in this format, and without a copy into it",
        ),
        tf32=choose(
            "tf32",
            config.tf32,
            on_gpu and is_native and is_low and not is_bitwise and capability >= 8.0,
            "TF32",
            f"what {precision.kind} leaves in fp32 gets 10 bits of precision, more than the 7 that the rest has",
        ),
        expandable_segments=choose(
            "expandable_segments",
            config.expandable_segments,
            on_gpu and is_native and not any(name in (environ or {}) for name in _ALLOCATOR),
            "expandable segments",
            "batches of several sizes then leave no holes in the device's memory",
        ),
        data_on_device=_left_open(config.data_on_device, on_gpu and is_native and not is_bitwise),
    )


def _left_open(asked: Asked, could: bool) -> str:
    """What is decided, and told, when a run has begun."""
    if asked == "auto":
        return "auto" if could else "off"
    return "on" if asked else "off"


def _plan_parameters(config: DistributedConfig, decisions: list[Decision]) -> str:
    asked = config.bf16_parameters
    if not asked:
        return "fp32"
    if asked == "stochastic":
        decisions.append(
            Decision("parameters in bf16", "rounded at random, so that small steps count on average", "bf16_parameters")
        )
        return "stochastic"
    reason = "the digits that bf16 cannot hold are kept aside, so that every step counts in full"
    decisions.append(Decision("parameters in bf16", reason, "bf16_parameters"))
    return "compensated"


def _impossible(
    config: DistributedConfig, device: str, hardware: Hardware, holds_whole: bool, is_bitwise: bool
) -> list[Problem]:
    found: list[Problem] = []
    slow = [gpu for gpu in hardware.gpus if 0 < gpu.compute_capability < HAS_FP8]
    if config.mixed_precision == "fp8" and device == "cuda" and slow:
        found.append(
            Problem(
                f"mixed_precision='fp8' on {slow[0].name}",
                why=f"it has compute capability {slow[0].compute_capability}, and products in 8 bits need {HAS_FP8}",
                do="set mixed_precision='bf16', or take a GPU of Ada, Hopper or later",
            )
        )
    asked = {
        "bf16_parameters": config.bf16_parameters,
        "capture": config.capture is True,
        "channels_last": config.channels_last is True,
        "mixed_precision='fp8'": config.mixed_precision == "fp8",
    }
    for name in [name for name, is_asked in asked.items() if is_asked and (not holds_whole or is_bitwise)]:
        other = "reproducible='bitwise'" if is_bitwise else "a model that the ranks share out"
        why = "its gradients are added up in a way of their own" if is_bitwise else "each rank has only parts of it"
        found.append(
            Problem(
                f"{name} with {other}",
                why=why,
                do="leave one of them out",
            )
        )
    if config.data_on_device is True and is_bitwise:
        found.append(
            Problem(
                "data_on_device=True with reproducible='bitwise'",
                why="the parts of its batches are read one by one, as on any number of ranks",
                do="leave one of them out",
            )
        )
    if config.bf16_parameters and config.mixed_precision == "fp16":
        found.append(
            Problem(
                "bf16_parameters with mixed_precision='fp16'",
                why="gradients in bf16 need no scaled loss, and a model cannot compute in both",
                do="set mixed_precision='bf16', or leave bf16_parameters out",
            )
        )
    return found


_OF_A_GPU = {  # what a GPU alone has, and why
    "channels_last": "a CPU's collectives send tensors in plain order only",
    "tf32": "TF32 is a format of GPUs",
    "expandable_segments": "it is a way in which a GPU's memory is handed out",
    "data_on_device": "the data is in its memory already",
}


def _useless(config: DistributedConfig, on_gpu: bool, is_native: bool) -> list[Problem]:
    """What was asked for and would do nothing here; what is left to us is left out without a word."""
    asked = [name for name in ("fused_optimizer", *_OF_A_GPU) if getattr(config, name) is True]
    found: list[Problem] = []
    if config.compile_cache and not config.compile:
        found.append(
            Problem("compile_cache without compile", why="nothing is compiled", do="set compile, or leave it out")
        )
    if not is_native:
        return found + [
            Problem(
                f"{name}=True with backend={config.backend!r}",
                why="this engine has kernels and memory of its own",
                do=f"leave {name} out, or train with backend='pytorch-ddp'",
            )
            for name in asked
        ]
    return found + [
        Problem(f"{name}=True on a CPU", why=_OF_A_GPU[name], do=f"leave {name} out")
        for name in asked
        if name in _OF_A_GPU and not on_gpu
    ]
