"""What a run whose steps are the code of a loop cannot have, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping

from distributed.core.config import DistributedConfig
from distributed.core.engines.engine import ENGINES
from distributed.core.errors import PlanError, Problem
from distributed.core.plan import Plan, ValidationPlan

_Reasons = Mapping[str, tuple[bool, str]]  # by what is asked for: whether it is, and why a loop cannot have it
_BY_TRAINER = "use distributed.Trainer, with training_step=… for a step of your own"
_ONE_MODEL = f"make them parts of one nn.Module, whose forward calls them, or {_BY_TRAINER}"


def refuse_for_loop(plan: Plan, config: DistributedConfig, *, has_several: bool, has_models: bool) -> None:
    """Raise every reason against this plan at once. `has_several`: optimizers. `has_models`: several."""
    own, mesh, backend = "{} under distributed.start", plan.mesh, f"backend={plan.strategy!r}"
    takes_parts = "own_loop" in ENGINES.entries[plan.strategy].can
    problems = _problems(own, f"set backend='pytorch-ddp', or {_BY_TRAINER}", {
        backend: (not takes_parts, f"{backend} takes whole steps"),
    })  # fmt: skip
    is_auto = plan.replicate.compression.kind == "auto"
    name_it = f"name the kind, such as compression='bf16', or {_BY_TRAINER}"
    problems += _problems(own, name_it, {
        "compression='auto'": (is_auto, "whole steps are measured, and yours has parts that only you know"),
    })  # fmt: skip
    problems += _problems(own, _BY_TRAINER, {
        f"pipeline_parallel={mesh.pp}": (mesh.pp > 1, "the stages of a pipeline run parts of a step in another order"),
        f"context_parallel={mesh.cp}": (mesh.cp > 1, "a step of the trainer checks that the model allows shards"),
        "reproducible='bitwise'": (plan.is_bitwise, "virtual ranks' gradients are summed within a trainer's step"),
    })  # fmt: skip
    evaluates = plan.validation != ValidationPlan(sanity_batches=plan.validation.sanity_batches)
    tries_sanity = config.given("sanity_val_steps") and bool(config.sanity_val_steps)
    meets = plan.replicate.synchronization.kind
    replaces = "a rank is replaced while the others keep their place, and a loop of yours starts again with all of them"
    problems += _problems(own, f"leave it out, or {_BY_TRAINER}", {
        "val_check_interval": (evaluates, "your loop evaluates when it passes over the evaluation data"),
        "sanity_val_steps": (tries_sanity, "nothing evaluates before your loop does"),
        "slow_rank='replace'": (plan.slow_rank == "replace", replaces),
        f"synchronization={meets!r}": (meets != "every_step", "the loop's own code would see one replica of many"),
        "capture=True": (plan.speed.capture == "on", "a captured step repeats kernels without the code of your loop"),
    })  # fmt: skip
    if has_several:
        problems += _of_several(plan)
    elif has_models and (plan.shard.is_fsdp or mesh.tp > 1):
        why = "parameters are gathered where the forward of one whole model begins, and your loop calls each of several"
        problems.append(Problem("several models under distributed.start with sharding", why=why, do=_ONE_MODEL))
    if problems:
        raise PlanError(problems)


def _of_several(plan: Plan) -> list[Problem]:
    is_cut = not plan.is_replicated or plan.shard.kind != "none"
    is_fp16, accumulation = plan.precision.kind == "fp16", f"gradient_accumulation_steps={plan.batch.accumulation}"
    compression = plan.replicate.compression.kind
    do = "leave it out, or use a Trainer with configure_optimizers"
    return _problems("several optimizers under distributed.start with {}", do, {
        "sharding or tensor parallelism": (is_cut, "each step of the loop reduces the gradients of whole parameters"),
        accumulation: (plan.batch.most_accumulated > 1, "the loop says in each batch which optimizers step"),
        "mixed_precision='fp16'": (is_fp16, "the loss scale is one for all optimizers, which step in any order"),
        "static_graph=True": (plan.replicate.static_graph, "the setting is DDP's, which this does without"),
        f"compression={compression!r}": (compression != "none", "DDP's buckets are compressed, and this has none"),
    })  # fmt: skip


def _problems(what: str, do: str, reasons: _Reasons) -> list[Problem]:
    return [Problem(what.format(name), why=why, do=do) for name, (is_asked, why) in reasons.items() if is_asked]
