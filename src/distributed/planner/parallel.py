"""The parallelism of a run: its mesh, sharding, pipeline micro-batches and recomputation. Pure: no torch.

State that no setting shards is replicated. An impossible combination is refused here, with the nearest possible one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from distributed.core.batch_plan import BatchPlan
from distributed.core.choices import CompileMode, Recompute, Shard, Sharding
from distributed.core.config import DistributedConfig
from distributed.core.engines.engine import ENGINES, Engine, choose, refused
from distributed.core.engines.features import EngineRequest
from distributed.core.errors import Problem
from distributed.core.mesh import MeshSpec
from distributed.core.plan import Decision, LoraPlan, MemoryPlan, PipelinePlan, ShardPlan, TensorPlan

_AXES = {"pipeline_parallel": "pp", "context_parallel": "cp", "tensor_parallel": "tp"}
STAGES: dict[int, Shard] = {0: "none", 1: "optimizer", 2: "grad_op", 3: "full"}
_NEEDS_MULTIPLE = ("interleaved", "zero_bubble")
_FILLED = 2  # micro-batches per stage that keep most of a pipeline busy


@dataclass(frozen=True)
class Parallel:
    """The decisions on mesh, sharding, engine and memory."""

    engine: str
    why_engine: str  # empty if the user chose the engine
    mesh: MeshSpec
    shard: ShardPlan
    tensor: TensorPlan
    pipeline: PipelinePlan
    memory: MemoryPlan


def plan_parallel(
    config: DistributedConfig,
    world_size: int,
    num_nodes: int,
    *,
    device: str,
    is_stream: bool = False,
    has_batchnorm: bool = False,
    stages: int = 0,
    task: Mapping[str, str] | None = None,
    decisions: list[Decision],
    problems: list[Problem],
) -> Parallel:
    """`task`: the features that it needs, and how it asks for each."""
    asked = _sharding(config, problems)
    wanted = EngineRequest(
        config, asked or "none", is_stream, has_batchnorm, world_size, task=task or {}, stages=stages
    )
    name, why = (config.backend, "") if config.backend != "auto" else choose(wanted, device)
    engine = ENGINES.entries[name]
    kind = asked or ("none" if stages else engine.shards)
    problems += _refused(name, replace(wanted, sharding=kind), device)
    if kind == "none" and engine.shards != "none" and not stages:
        nothing = "sharding=none" if config.sharding == "none" else "zero_stage=0"
        do = "set backend='pytorch-ddp', or leave it out"
        problems.append(Problem(f"backend={name!r} has nothing to shard", why=f"{nothing} replicates the model", do=do))
    mesh = _mesh(config, kind, world_size, num_nodes, problems)
    problems += _useless(config, kind, engine)
    problems += _impossible(config, kind, has_batchnorm)
    if mesh.world_size > mesh.dp_replicate:
        decisions.append(Decision(f"mesh {mesh}", _why(mesh)))
    if kind == "optimizer" and mesh.data_ranks > 1:
        why = f"each of {mesh.data_ranks} data-parallel ranks keeps a shard of the optimizer state"
        decisions.append(Decision("ZeRO-1", why, "zero_stage"))
    styles = tuple((config.tensor_parallel_plan or {}).items())
    every, recompute = _recompute(config.activation_checkpointing)
    return Parallel(
        engine=name,
        why_engine=why,
        mesh=mesh,
        shard=ShardPlan("full" if kind == "hybrid" else kind, tuple(config.wrap_blocks or ()), config.cpu_offload),
        tensor=TensorPlan(styles, config.sequence_parallel),
        pipeline=PipelinePlan(config.pipeline_schedule or "1f1b"),
        memory=MemoryPlan(
            recompute,
            every,
            compile=bool(config.compile),
            compile_whole=config.compile == "whole",
            compile_mode=_compile_mode(config),
            compile_cache=config.compile_cache or "",
            lora=_lora(config, problems),
        ),
    )


def cut_for_pipeline(
    config: DistributedConfig, batch: BatchPlan, decisions: list[Decision], problems: list[Problem]
) -> BatchPlan:
    """A device's batch cut into micro-batches for the pipeline's stages; the global batch stays."""
    stages = config.pipeline_parallel
    if stages == 1:
        return batch
    size, asked = batch.per_device, config.pipeline_microbatches
    if asked is not None and size % asked:
        fitting = [n for n in range(1, size + 1) if size % n == 0]
        problems.append(
            Problem(
                f"pipeline_microbatches={asked} does not divide batch_size={size}",
                why="all micro-batches of a pipeline must have the same size",
                do=f"set pipeline_microbatches to one of {', '.join(map(str, fitting[-6:]))}",
            )
        )
        return batch
    parts = asked or _fill(size, stages, batch.accumulation)
    total = parts * batch.accumulation
    if config.pipeline_schedule in _NEEDS_MULTIPLE and total % stages:
        problems.append(
            Problem(
                f"pipeline_schedule={config.pipeline_schedule!r} with {total} micro-batches and {stages} stages",
                why=f"the schedule needs a number of micro-batches that is a multiple of the {stages} stages",
                do=f"set batch_size to a multiple of {stages}, or pipeline_schedule='1f1b'",
            )
        )
    idle = (stages - 1) / (total + stages - 1)
    reason = f"{total} micro-batches pass through {stages} stages, which are then idle {idle:.0%} of the time"
    decisions.append(Decision(f"micro-batches of {size // parts}", reason, "pipeline_microbatches"))
    return replace(batch, per_device=size // parts, accumulation=total, parts=parts)


def _fill(size: int, stages: int, accumulation: int) -> int:
    """The number of micro-batches: as few as keep the pipeline busy, a multiple of the stages if possible.

    >>> _fill(32, 4, 1), _fill(6, 4, 1), _fill(8, 2, 4)
    (8, 6, 1)
    """
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    even = [n for n in divisors if n * accumulation % stages == 0] or divisors
    return next((n for n in even if n * accumulation >= _FILLED * stages), even[-1])


def _sharding(config: DistributedConfig, problems: list[Problem]) -> Sharding | None:
    """The sharding that the settings ask for over data-parallel ranks; None: no setting asks."""
    asked = config.sharding
    by_stage = None if config.zero_stage is None else STAGES[config.zero_stage]
    if asked is not None and by_stage is not None and by_stage != asked and (asked, by_stage) != ("hybrid", "full"):
        problems.append(
            Problem(
                f"sharding={asked!r}, but zero_stage={config.zero_stage} is {by_stage!r}",
                why="both say which state is sharded",
                do="keep one of them: sharding or zero_stage",
            )
        )
    return asked or by_stage


def _refused(strategy: str, wanted: EngineRequest, device: str) -> list[Problem]:
    """A problem for each requested feature that the engine does not support."""
    found = []
    for asked, why, others in refused(strategy, wanted, device):
        do = f"set backend={' or '.join(map(repr, others))}, or leave it out" if others else "leave it out"
        found.append(Problem(f"{asked} with backend={strategy!r}", why=why, do=do))
    return found


def _mesh(
    config: DistributedConfig, kind: Sharding, world_size: int, num_nodes: int, problems: list[Problem]
) -> MeshSpec:
    sizes = {axis: int(getattr(config, name)) for name, axis in _AXES.items()}
    unit = sizes["pp"] * sizes["cp"] * sizes["tp"]
    if world_size % unit:
        problems.append(_does_not_divide(config, world_size, unit))
        return MeshSpec(dp_replicate=world_size)
    data = world_size // unit
    if kind not in ("grad_op", "full", "hybrid"):
        return MeshSpec(dp_replicate=data, **sizes)
    groups = (config.shard_groups or num_nodes) if kind == "hybrid" else 1
    if kind == "hybrid" and (data % groups or groups in (1, data)):
        fitting = [n for n in range(2, data) if data % n == 0]
        problems.append(
            Problem(
                f"sharding='hybrid' with {groups} group{'s' * (groups > 1)} of {data} data-parallel ranks",
                why="one group is sharding='full', and groups of one rank are sharding='none'"
                if data % groups == 0
                else f"the groups must be of one size, and {groups} does not divide {data}",
                do=f"set shard_groups to one of {', '.join(map(str, fitting))}" if fitting else "set sharding='full'",
            )
        )
        groups = 1
    return MeshSpec(dp_replicate=groups, dp_shard=data // groups, **sizes)


def _does_not_divide(config: DistributedConfig, world_size: int, unit: int) -> Problem:
    asked = {name: getattr(config, name) for name in _AXES if getattr(config, name) > 1}
    product = " × ".join(f"{name}={size}" for name, size in asked.items())
    lower, upper = world_size // unit * unit, (world_size // unit + 1) * unit
    others = []
    for name, size in asked.items():
        rest = unit // size
        legal = [n for n in range(1, world_size + 1) if world_size % (rest * n) == 0]
        others += [f"{name}={n}" for n in _nearest(size, legal)]
    ranks = " or ".join(f"num_gpus={n}" for n in (lower, upper) if n)
    return Problem(
        f"{world_size} ranks cannot be arranged as {product}",
        why=f"the mesh takes {unit} ranks for each copy of the model, and {world_size} is not a multiple of {unit}",
        do=f"set {ranks}" + (f", or {' or '.join(others)}" if others else ""),
    )


def _nearest(wanted: int, legal: Sequence[int]) -> list[int]:
    """The legal sizes just below and just above a wanted one.

    >>> _nearest(4, [1, 2, 3, 6])
    [3, 6]
    """
    below, above = [n for n in legal if n < wanted], [n for n in legal if n > wanted]
    return [*below[-1:], *above[:1]]


def _useless(config: DistributedConfig, kind: Sharding, engine: Engine) -> list[Problem]:
    """A problem for each setting that would have no effect."""
    found = []
    for name, useless, do in (
        ("shard_groups", kind != "hybrid", "sharding='hybrid'"),
        ("cpu_offload", "cpu_offload" in engine.can and kind not in engine.offloads, "backend='fsdp'"),
        ("sequence_parallel", config.tensor_parallel == 1, "tensor_parallel=2, say"),
        ("tensor_parallel_plan", config.tensor_parallel == 1, "tensor_parallel=2, say"),
        ("pipeline_schedule", config.pipeline_parallel == 1, "pipeline_parallel=2, say"),
        ("pipeline_microbatches", config.pipeline_parallel == 1, "pipeline_parallel=2, say"),
        ("save_adapters_only", not config.lora, "lora=true"),
    ):
        if useless and getattr(config, name):
            found.append(Problem(f"{name} is set, but would have no effect", do=f"set {do}, or leave {name} out"))
    return found


def _impossible(config: DistributedConfig, kind: Sharding, has_batchnorm: bool) -> list[Problem]:
    found = []
    shares = kind != "none" or any(getattr(config, name) > 1 for name in _AXES)
    if config.reproducible == "bitwise" and (shares or config.lora or config.compile not in (False, "auto")):
        asked = [name for name in ("lora", "compile") if getattr(config, name) not in (False, "auto")]
        asked += [name for name in _AXES if getattr(config, name) > 1] + (
            [f"sharding ({kind})"] if kind != "none" else []
        )
        found.append(
            Problem(
                f"reproducible='bitwise' with {', '.join(asked)}",
                why="bitwise needs a fixed order of sums, and so the whole model on every rank",
                do="set reproducible='off', or leave the other out",
            )
        )
    if has_batchnorm and config.pipeline_parallel > 1 and config.sync_batchnorm:
        found.append(
            Problem(
                "BatchNorm is synchronized over all ranks, and pipeline_parallel gives each layer to some of them",
                why="ranks of other stages never run that layer, so the layer's all-reduce would wait for them forever",
                do="set sync_batchnorm=false, or leave pipeline_parallel out",
            )
        )
    shared_work = [name for name in _AXES if getattr(config, name) > 1]
    if config.cpu_offload and shared_work:
        found.append(
            Problem(
                f"cpu_offload with {', '.join(shared_work)}",
                why="gradients on the host cannot be all-reduced over these ranks, whose process groups are of GPUs",
                do="leave one of them out",
            )
        )
    for name in ("context_parallel", "pipeline_parallel"):
        if config.sequence_parallel and getattr(config, name) > 1:
            found.append(
                Problem(
                    f"sequence_parallel with {name}",
                    why="both cut the sequence or the stack of blocks at the same places",
                    do="leave sequence_parallel out",
                )
            )
    if shares and config.iterable_split == "dataset":
        found.append(
            Problem(
                "iterable_split='dataset' with a model that is sharded over ranks",
                why="ranks of one replica must read the same samples, and all ranks the same number of batches",
                do="set iterable_split='share'",
            )
        )
    unseen = {
        "context_parallel": "attention is replaced while a block runs" if config.context_parallel > 1 else "",
        "sequence_parallel": "masks along the sequence are drawn by rank" if config.sequence_parallel else "",
    }
    for name, why in unseen.items():
        if why and config.compile not in (False, "auto"):
            why = f"{why}, and a compiled block does not see that"
            found.append(Problem(f"compile with {name}", why=why, do="leave one of them out"))
    if config.context_parallel > 1 and config.pipeline_parallel > 1:
        found.append(
            Problem(
                "context_parallel with pipeline_parallel",
                why="a pipeline stage sends whole sequences to the next one, and context_parallel shards them",
                do="leave one of them out",
            )
        )
    return found


def _recompute(asked: bool | int | Recompute) -> tuple[int, Recompute]:
    """
    >>> _recompute(True), _recompute(2), _recompute("selective"), _recompute(False)
    ((1, 'full'), (2, 'full'), (1, 'selective'), (1, ''))
    """
    if isinstance(asked, str):
        return 1, asked
    return (1, "full" if asked else "") if isinstance(asked, bool) or asked < 1 else (asked, "full")


def _compile_mode(config: DistributedConfig) -> CompileMode:
    return "" if isinstance(config.compile, bool) or config.compile == "whole" else config.compile


def _lora(config: DistributedConfig, problems: list[Problem]) -> LoraPlan | None:
    asked: Any = config.lora
    if asked is False or asked == 0:
        return None
    saves_alone = config.save_adapters_only
    if isinstance(asked, bool):
        return LoraPlan(saves_alone=saves_alone)
    if isinstance(asked, int):
        return LoraPlan(asked, 2.0 * asked, saves_alone=saves_alone)
    known = {f.name for f in fields(LoraPlan)} - {"saves_alone"}
    unknown = sorted(set(asked) - known)
    if unknown:
        problems.append(Problem(f"lora has no option {unknown[0]!r}", do=f"it has {', '.join(sorted(known))}"))
        return None
    rank = int(asked.get("rank", 8))
    targets = asked.get("targets", ())
    if rank < 1:
        problems.append(Problem(f"lora has rank {rank}", do="set 8, say"))
        return None
    return LoraPlan(
        rank,
        float(asked.get("alpha", 2 * rank)),
        float(asked.get("dropout", 0.0)),
        (targets,) if isinstance(targets, str) else tuple(targets),
        saves_alone,
    )


def _why(mesh: MeshSpec) -> str:
    parts = {
        "pp": f"{mesh.pp} stages",
        "dp_replicate": f"{mesh.dp_replicate} replicas of the model",
        "dp_shard": f"each replica sharded over {mesh.dp_shard} data ranks",
        "cp": f"{mesh.cp} ranks for each sequence",
        "tp": f"{mesh.tp} ranks for each layer",
    }
    return ", ".join(text for axis, text in parts.items() if mesh.sizes()[axis] > 1)
