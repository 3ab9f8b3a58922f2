"""Free speed: which ways to a faster step a run takes, each with its reason and the setting that changes it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from distributed.core.config import DistributedConfig
from distributed.core.engines import ENGINES
from distributed.core.env import ALLOCATOR
from distributed.core.errors import Problem
from distributed.core.plan import Decision, MemoryPlan, Plan, SpeedPlan
from distributed.planner.hardware import Hardware

HAS_FP8 = 8.9  # Ada, and all since

Asked = bool | Literal["auto"]


def plan_compile(
    config: DistributedConfig, plan: Plan, has_blocks: bool, decisions: list[Decision], problems: list[Problem]
) -> MemoryPlan:
    """What compile='auto' comes to: compiling takes a minute once, which a CPU's kernels seldom bring back."""
    memory, holds_whole = plan.memory, plan.is_replicated
    if config.compile == "whole" and not holds_whole:
        why = "each rank runs only parts of it, which are gathered or sent between its blocks"
        problems.append(
            Problem("compile='whole' with a model that the ranks share out", why=why, do="set compile=true")
        )
    if config.compile != "auto":
        return memory
    others = config.tensor_parallel > 1 or config.context_parallel > 1 or config.reproducible == "bitwise"
    reasons = {
        "this engine has kernels of its own": not ENGINES.entries[plan.strategy].is_native,
        "there is no GPU": plan.device != "cuda",
        "what is asked for beside it replaces parts of the model": others,
        "the model has no blocks": not holds_whole and not has_blocks,
    }
    why_not = next((why for why, holds in reasons.items() if holds), "")
    if why_not:
        decisions.append(Decision("nothing compiled", why_not, "compile"))
    elif holds_whole:
        reason = "also what lies between its blocks becomes few kernels; compiled once, and kept for later runs"
        decisions.append(Decision("compiled as a whole", reason, "compile"))
    else:
        reason = "each of its blocks becomes a few kernels; equal blocks are compiled once, and kept for later runs"
        decisions.append(Decision("compiled blocks", reason, "compile"))
    return replace(memory, compile=not why_not, compile_whole=not why_not and holds_whole, compile_mode="")


def plan_speed(
    config: DistributedConfig,
    plan: Plan,
    hardware: Hardware,
    has_convolutions: bool,
    environ: Mapping[str, str],
    decisions: list[Decision],
    problems: list[Problem],
) -> SpeedPlan:
    """For a plan that is made but for this."""
    on_gpu, holds_whole, precision = plan.device == "cuda", plan.is_replicated, plan.precision
    is_native = ENGINES.entries[plan.strategy].is_native
    is_low = precision.kind != "fp32"
    capability = min((gpu.compute_capability for gpu in hardware.gpus), default=0.0)
    is_bitwise = config.reproducible == "bitwise"

    def choose(name: str, asked: Asked, when: bool, what: str, why: str) -> bool:
        if asked == "auto":
            if when:
                decisions.append(Decision(what, why, name))
            return when
        return asked

    problems += _impossible(config, plan.device, hardware, holds_whole, is_bitwise)
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
            on_gpu and is_native and not any(name in environ for name in ALLOCATOR),
            "expandable segments",
            "batches of several sizes then leave no holes in the device's memory",
        ),
        keep_freed_memory=choose(
            "keep_freed_memory",
            config.keep_freed_memory,
            plan.device == "cpu" and is_native and not _why_not_kept(config) and not any(map(_is_of_malloc, environ)),
            "freed memory is kept",
            "else the system takes back the activations of each step, and clears them page by page for the next one",
        ),
        data_on_device=_left_open(config.data_on_device, on_gpu and is_native and not is_bitwise),
    )


def _why_not_kept(config: DistributedConfig) -> str:
    """Why freed memory cannot be kept."""
    if config.backend == "ray":
        return "Ray trains in a thread of its workers, and only the memory of a first thread can be told to stay"
    try:
        has_glibc = bool(os.confstr("CS_GNU_LIBC_VERSION"))
    except (AttributeError, ValueError, OSError):
        has_glibc = False
    return "" if has_glibc else "only glibc's malloc can be told to keep what is freed, and this system has another"


def _is_of_malloc(variable: str) -> bool:
    return variable.startswith("MALLOC_") or variable in ("GLIBC_TUNABLES", "LD_PRELOAD")


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
    if config.keep_freed_memory is True and (why := _why_not_kept(config)):
        found.append(Problem("keep_freed_memory=True would have no effect", why=why, do="leave it out"))
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
    asked = [name for name in ("fused_optimizer", "keep_freed_memory", *_OF_A_GPU) if getattr(config, name) is True]
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
