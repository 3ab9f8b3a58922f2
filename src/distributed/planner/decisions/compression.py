"""Gradient compression: what it cannot be had together with, and where it would send more than it saves."""

from __future__ import annotations

from collections.abc import Mapping

from distributed.core.config import DistributedConfig
from distributed.core.errors import Problem
from distributed.core.plan import Decision, Plan

_BYTES_OF_TOPK = 8  # a value and its place
_WITHOUT_IT = "compression='none'"


def plan_compression(
    config: DistributedConfig, plan: Plan, task: Mapping[str, str], decisions: list[Decision], problems: list[Problem]
) -> None:
    """`task`: the features that it needs, and how it asks for each."""
    compression = plan.replicate.compression
    kind = compression.kind
    if kind == "none":
        return
    if plan.world_size == 1:
        why = "a single rank sends no gradients"
        decisions.append(Decision(f"no {kind} compression while there is 1 rank", why, "num_gpus"))
    elif kind == "auto":
        why = "the link and the kinds are measured in the first steps; one that pays is then turned on"
        decisions.append(Decision("gradients are sent whole at first", why, "compression"))
    asked = f"compression={kind!r}"
    refusals = _of_auto(config, plan, task) if kind == "auto" else {}
    refusals |= {
        "a model that is sharded over ranks": (
            not plan.is_replicated,
            "sharded state is gathered and scattered, and nothing of it is left to be sent later",
            f"leave the sharding out, or set {_WITHOUT_IT}",
        ),
        "reproducible='bitwise'": (
            plan.is_bitwise,
            "bitwise adds whole gradients in a fixed order, the same at any number of ranks; what is left of compressed"
            " ones depends on that number",
            f"set reproducible='off', or {_WITHOUT_IT}",
        ),
        "static_graph": (
            config.static_graph,
            "with a static graph each micro-batch is reduced, and gradients that are reduced already would be "
            "compressed again",
            "leave one of them out",
        ),
        task.get("manual", ""): (
            "manual" in task,
            "a step that is called in training_step may see gradients of any of several backward passes",
            f"set {_WITHOUT_IT}, or return the loss from training_step",
        ),
        task.get("closure", ""): (
            "closure" in task,
            "the optimizer evaluates a step's gradient several times, and takes each for the exact one",
            f"set {_WITHOUT_IT}, or take an optimizer that steps once, such as SGD",
        ),
        f"bf16_parameters={config.bf16_parameters!r}": (
            bool(config.bf16_parameters) and kind in ("bf16", "fp16"),
            "gradients of parameters in bf16 have 16 bits already",
            "leave one of them out",
        ),
    }
    problems += [
        Problem(f"{asked} with {other}", why=why, do=do) for other, (is_so, why, do) in refusals.items() if is_so
    ]
    ranks = plan.mesh.data_ranks
    if kind == "topk" and compression.ratio * ranks >= 1:
        sent, dense = compression.ratio * _BYTES_OF_TOPK * (ranks - 1), 8 * (ranks - 1) / ranks
        problems.append(
            Problem(
                f"{asked} with compression_ratio={compression.ratio:g} on {ranks} ranks",
                why=f"each rank would send {sent:.3g} bytes for each number, and {dense:.3g} without compression",
                do=f"set compression_ratio below {1 / ranks:.3g}, or {_WITHOUT_IT}",
            )
        )


def _of_auto(config: DistributedConfig, plan: Plan, task: Mapping[str, str]) -> dict[str, tuple[bool, str, str]]:
    """What changes between the steps that are measured and those that follow."""
    name_it = f"name the kind, such as compression='bf16', or set {_WITHOUT_IT}"
    return {
        "find_unused_parameters": (
            config.find_unused_parameters,
            "each step may send other gradients, and the measured ones say little of those that follow",
            name_it,
        ),
        "several optimizers": (
            "several_optimizers" in task,
            "each has a reduction of its own, in some of the steps",
            name_it,
        ),
        f"compile={config.compile!r}": (
            plan.memory.compile_whole,
            "a whole model is compiled for a trial in the steps that are measured",
            f"set compile=true, or {name_it}",
        ),
    }
