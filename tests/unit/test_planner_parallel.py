"""Which meshes are legal, what the planner says of those that are not, and how a plan is cut for another world."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from distributed.core.config import DistributedConfig
from distributed.core.errors import PlanError, Problem
from distributed.core.mesh import MeshSpec
from distributed.core.plan import BatchPlan, Decision, LoraPlan, Plan, ShardPlan
from distributed.planner.hardware import Hardware
from distributed.planner.parallel import Parallel, cut_for_pipeline, plan_parallel
from distributed.planner.planning import JobProfile, make_plan

LEGAL: list[tuple[int, int, dict[str, Any], MeshSpec, str]] = [
    (1, 1, {}, MeshSpec(), "none"),
    (8, 1, {}, MeshSpec(dp_replicate=8), "none"),
    (8, 1, {"backend": "fsdp"}, MeshSpec(dp_shard=8), "full"),
    (8, 2, {"sharding": "full"}, MeshSpec(dp_shard=8), "full"),
    (8, 1, {"sharding": "grad_op"}, MeshSpec(dp_shard=8), "grad_op"),
    (8, 1, {"zero_stage": 0}, MeshSpec(dp_replicate=8), "none"),
    (8, 1, {"zero_stage": 1}, MeshSpec(dp_replicate=8), "optimizer"),
    (8, 1, {"zero_stage": 2}, MeshSpec(dp_shard=8), "grad_op"),
    (8, 1, {"zero_stage": 3}, MeshSpec(dp_shard=8), "full"),
    (8, 1, {"backend": "fsdp", "zero_stage": 2}, MeshSpec(dp_shard=8), "grad_op"),
    (8, 2, {"sharding": "hybrid"}, MeshSpec(dp_replicate=2, dp_shard=4), "full"),
    (8, 2, {"sharding": "hybrid", "shard_groups": 4}, MeshSpec(dp_replicate=4, dp_shard=2), "full"),
    (8, 1, {"sharding": "hybrid", "zero_stage": 3, "shard_groups": 2}, MeshSpec(dp_replicate=2, dp_shard=4), "full"),
    (6, 1, {"tensor_parallel": 3}, MeshSpec(dp_replicate=2, tp=3), "none"),
    (4, 1, {"tensor_parallel": 4}, MeshSpec(tp=4), "none"),
    (8, 1, {"tensor_parallel": 2, "sharding": "full"}, MeshSpec(dp_shard=4, tp=2), "full"),
    (8, 1, {"tensor_parallel": 2, "sequence_parallel": True}, MeshSpec(dp_replicate=4, tp=2), "none"),
    (8, 1, {"context_parallel": 2, "tensor_parallel": 2}, MeshSpec(dp_replicate=2, cp=2, tp=2), "none"),
    (8, 1, {"pipeline_parallel": 2, "tensor_parallel": 2}, MeshSpec(pp=2, dp_replicate=2, tp=2), "none"),
    (8, 1, {"pipeline_parallel": 2, "tensor_parallel": 2, "zero_stage": 3}, MeshSpec(pp=2, dp_shard=2, tp=2), "full"),
    (1024, 128, {"tensor_parallel": 8, "backend": "fsdp"}, MeshSpec(dp_shard=128, tp=8), "full"),
    (1024, 128, {"sharding": "hybrid"}, MeshSpec(dp_replicate=128, dp_shard=8), "full"),
]

REFUSED: list[tuple[int, int, dict[str, Any], str, str, str]] = [  # … what, why, do: parts of them
    (6, 1, {"tensor_parallel": 4}, "6 ranks", "multiple of 4", "num_gpus=4 or num_gpus=8, or tensor_parallel=3"),
    (6, 1, {"tensor_parallel": 4}, "tensor_parallel=4", "4 ranks for each copy", "tensor_parallel=6"),
    (2, 1, {"tensor_parallel": 4}, "2 ranks", "multiple of 4", "set num_gpus=4, or tensor_parallel=2"),
    (7, 1, {"pipeline_parallel": 2}, "7 ranks", "multiple of 2", "pipeline_parallel=1 or pipeline_parallel=7"),
    (
        8,
        1,
        {"pipeline_parallel": 3, "tensor_parallel": 2},
        "pipeline_parallel=3 × tensor_parallel=2",
        "6 ranks for each copy",
        "num_gpus=6 or num_gpus=12, or pipeline_parallel=2 or pipeline_parallel=4",
    ),
    (8, 1, {"sharding": "hybrid", "shard_groups": 3}, "3 groups of 8", "of one size", "one of 2, 4"),
    (8, 1, {"sharding": "hybrid"}, "1 group of 8", "one group is sharding='full'", "one of 2, 4"),
    (8, 8, {"sharding": "hybrid"}, "8 groups of 8", "groups of one rank", "one of 2, 4"),
    (3, 1, {"sharding": "hybrid", "shard_groups": 3}, "3 groups of 3", "groups of one rank", "sharding='full'"),
    (8, 1, {"sharding": "hybrid", "shard_groups": 4, "tensor_parallel": 2}, "4 groups of 4", "one rank", "one of 2"),
    (8, 1, {"sharding": "grad_op", "zero_stage": 3}, "zero_stage=3 is 'full'", "both say", "keep one"),
    (8, 1, {"sharding": "full", "zero_stage": 1}, "zero_stage=1 is 'optimizer'", "both say", "keep one"),
    (8, 1, {"backend": "fsdp", "sharding": "none"}, "nothing to shard", "sharding=none", "backend='pytorch-ddp'"),
    (8, 1, {"backend": "fsdp", "zero_stage": 0}, "nothing to shard", "zero_stage=0", "backend='pytorch-ddp'"),
    (8, 1, {"shard_groups": 2}, "shard_groups", "", "sharding='hybrid'"),
    (8, 1, {"cpu_offload": True}, "cpu_offload", "", "backend='fsdp'"),
    (8, 1, {"cpu_offload": True, "zero_stage": 1}, "cpu_offload", "", "backend='fsdp'"),
    (8, 1, {"sequence_parallel": True}, "sequence_parallel", "", "tensor_parallel=2"),
    (8, 1, {"tensor_parallel_plan": {"*.fc": "row"}}, "tensor_parallel_plan", "", "tensor_parallel=2"),
    (8, 1, {"pipeline_schedule": "gpipe"}, "pipeline_schedule", "", "pipeline_parallel=2"),
    (8, 1, {"pipeline_microbatches": 4}, "pipeline_microbatches", "", "pipeline_parallel=2"),
    (8, 1, {"save_adapters_only": True}, "save_adapters_only", "", "lora=true"),
    (8, 1, {"reproducible": "bitwise", "backend": "fsdp"}, "sharding (full)", "order of sums", "reproducible='off'"),
    (8, 1, {"reproducible": "bitwise", "zero_stage": 1}, "sharding (optimizer)", "order of sums", "reproducible='off'"),
    (8, 1, {"reproducible": "bitwise", "tensor_parallel": 2}, "tensor_parallel", "order of sums", "reproducible='off'"),
    (8, 1, {"reproducible": "bitwise", "pipeline_parallel": 2}, "pipeline_parallel", "order", "reproducible='off'"),
    (8, 1, {"reproducible": "bitwise", "context_parallel": 2}, "context_parallel", "order", "reproducible='off'"),
    (8, 1, {"reproducible": "bitwise", "lora": 4}, "lora", "order of sums", "reproducible='off'"),
    (8, 1, {"reproducible": "bitwise", "compile": True}, "compile", "order of sums", "reproducible='off'"),
    (
        8,
        1,
        {"cpu_offload": True, "backend": "fsdp", "pipeline_parallel": 2},
        "cpu_offload with pipeline_parallel",
        "gradients on the host",
        "leave one of them out",
    ),
    (
        8,
        1,
        {"sequence_parallel": True, "tensor_parallel": 2, "pipeline_parallel": 2},
        "sequence_parallel with pipeline_parallel",
        "cut",
        "leave sequence_parallel out",
    ),
    (8, 1, {"context_parallel": 2, "pipeline_parallel": 2}, "context_parallel with pipeline_parallel", "whole", "out"),
    (8, 1, {"compile": True, "context_parallel": 2}, "compile with context_parallel", "attention", "out"),
    (8, 1, {"compile": True, "tensor_parallel": 2, "sequence_parallel": True}, "compile with sequence", "masks", "out"),
    (8, 1, {"iterable_split": "dataset", "zero_stage": 3}, "iterable_split", "same samples", "iterable_split='share'"),
    (8, 1, {"lora": {"rnk": 2}}, "'rnk'", "", "rank"),
    (8, 1, {"lora": {"rank": 0}}, "rank 0", "", "8"),
]


def plan(world: int, nodes: int, asked: dict[str, Any], **more: bool) -> tuple[Parallel, list[Decision], list[Problem]]:
    decisions: list[Decision] = []
    problems: list[Problem] = []
    found = plan_parallel(
        DistributedConfig(**asked),
        world,
        nodes,
        device="cpu",
        has_batchnorm=more.get("has_batchnorm", False),
        decisions=decisions,
        problems=problems,
    )
    return found, decisions, problems


@pytest.mark.parametrize(("world", "nodes", "asked", "mesh", "kind"), LEGAL)
def test_legal_mesh_uses_every_rank_once(world, nodes, asked, mesh, kind):
    found, decisions, problems = plan(world, nodes, asked)
    assert not problems
    assert (found.mesh, found.shard.kind) == (mesh, kind)
    assert found.mesh.world_size == world
    places = {tuple(mesh.coordinates(rank).values()) for rank in range(world)}
    assert len(places) == world
    told = [decision for decision in decisions if decision.choice.startswith("mesh")]
    assert bool(told) == (not mesh.is_replicas), "a mesh is told unless every rank has the whole model"


@pytest.mark.parametrize(("world", "nodes", "asked", "what", "why", "do"), REFUSED)
def test_illegal_mesh_error_says_what_why_and_do(world, nodes, asked, what, why, do):
    _, _, problems = plan(world, nodes, asked)
    assert len(problems) == 1, "one mistake is one problem"
    assert what in problems[0].what
    assert why in problems[0].why
    assert do in problems[0].do


@pytest.mark.parametrize("world", range(1, 17))
@pytest.mark.parametrize("sizes", list(itertools.product((1, 2, 3, 4), repeat=2)))
def test_mesh_is_refused_iff_its_sizes_do_not_divide_the_ranks(world, sizes):
    asked = {"pipeline_parallel": sizes[0], "tensor_parallel": sizes[1]}
    found, _, problems = plan(world, 1, asked)
    assert bool(problems) == bool(world % (sizes[0] * sizes[1]))
    for problem in problems:
        for word in problem.do.replace(",", " ").split():
            name, equals, value = word.partition("=")
            if equals:
                ranks = int(value) if name == "num_gpus" else world
                other = asked if name == "num_gpus" else asked | {name: int(value)}
                assert not plan(ranks, 1, other)[2], f"{word} was suggested, and is refused itself"
    assert found.mesh.world_size == world


def test_all_mesh_problems_are_raised_at_once():
    asked = {"num_gpus": 6, "tensor_parallel": 4, "sharding": "full", "zero_stage": 1, "pipeline_schedule": "gpipe"}
    with pytest.raises(PlanError) as refused:
        make_plan(DistributedConfig(**asked), JobProfile(samples=64), Hardware(), run_dir="run")
    text = str(refused.value)
    for hint in ("zero_stage=1", "6 ranks", "pipeline_schedule", "no batch size"):
        assert hint in text


def test_sync_batchnorm_with_pipeline_is_refused():
    asked = {"pipeline_parallel": 2}
    assert "BatchNorm" in plan(4, 1, asked, has_batchnorm=True)[2][0].what
    assert not plan(4, 1, asked | {"sync_batchnorm": False}, has_batchnorm=True)[2]


@pytest.mark.parametrize(
    ("asked", "recompute"),
    [(False, ("", 1)), (True, ("full", 1)), ("full", ("full", 1)), ("selective", ("selective", 1)), (3, ("full", 3))],
)
def test_activation_checkpointing_setting_maps_to_recompute(asked, recompute):
    memory = plan(2, 1, {"activation_checkpointing": asked})[0].memory
    assert (memory.recompute, memory.recompute_every) == recompute


@pytest.mark.parametrize(
    ("asked", "lora"),
    [
        (False, None),
        (True, LoraPlan()),
        (4, LoraPlan(4, 8.0)),
        ({"rank": 2, "targets": "q_proj"}, LoraPlan(2, 4.0, targets=("q_proj",))),
        ({"rank": 2, "alpha": 1, "dropout": 0.1, "targets": ["a", "b"]}, LoraPlan(2, 1.0, 0.1, ("a", "b"))),
    ],
)
def test_lora_setting_maps_to_lora_plan(asked, lora):
    assert plan(2, 1, {"lora": asked})[0].memory.lora == lora


@pytest.mark.parametrize(
    ("asked", "batch", "cut"),  # cut: samples of a micro-batch, micro-batches
    [
        ({}, BatchPlan(8, 2), (8, 1)),
        ({"pipeline_parallel": 2}, BatchPlan(8, 2), (2, 4)),
        ({"pipeline_parallel": 4}, BatchPlan(32, 2), (4, 8)),
        ({"pipeline_parallel": 4}, BatchPlan(6, 1), (1, 6)),
        ({"pipeline_parallel": 2}, BatchPlan(8, 1, accumulation=4), (8, 4)),
        ({"pipeline_parallel": 2, "pipeline_microbatches": 8}, BatchPlan(8, 2), (1, 8)),
        ({"pipeline_parallel": 2, "pipeline_microbatches": 1}, BatchPlan(8, 2), (8, 1)),
        ({"pipeline_parallel": 2, "pipeline_schedule": "interleaved"}, BatchPlan(4, 2), (1, 4)),
    ],
)
def test_pipeline_micro_batches_keep_the_global_batch(asked, batch, cut):
    problems: list[Problem] = []
    decisions: list[Decision] = []
    found = cut_for_pipeline(DistributedConfig(**asked), batch, decisions, problems)
    assert not problems
    assert (found.per_device, found.accumulation) == cut
    assert (found.global_batch, found.ranks) == (batch.global_batch, batch.ranks)
    assert bool(decisions) == ("pipeline_parallel" in asked)


@pytest.mark.parametrize(
    ("asked", "size", "what", "do"),
    [
        ({"pipeline_microbatches": 3}, 8, "pipeline_microbatches=3", "1, 2, 4, 8"),
        ({"pipeline_schedule": "interleaved"}, 5, "5 micro-batches and 2 stages", "multiple of 2"),
        ({"pipeline_schedule": "zero_bubble"}, 3, "3 micro-batches and 2 stages", "pipeline_schedule='1f1b'"),
    ],
)
def test_batch_indivisible_into_pipeline_micro_batches_refused(asked, size, what, do):
    problems: list[Problem] = []
    config = DistributedConfig(pipeline_parallel=2, **asked)
    cut_for_pipeline(config, BatchPlan(size), [], problems)
    assert what in problems[0].what
    assert do in problems[0].do


MESHES = [
    (MeshSpec(dp_replicate=4, tp=2), "none", 2),
    (MeshSpec(dp_replicate=4, tp=2), "optimizer", 2),
    (MeshSpec(pp=2, dp_replicate=2, tp=2), "none", 4),
    (MeshSpec(dp_shard=4), "full", 1),
    (MeshSpec(dp_shard=4, tp=2), "full", 2),
    (MeshSpec(dp_shard=4, cp=2), "grad_op", 2),
    (MeshSpec(dp_replicate=2, dp_shard=4), "full", 2),
    (MeshSpec(dp_replicate=2, dp_shard=2, tp=2), "full", 4),
]


@pytest.mark.parametrize(("mesh", "kind", "unit"), MESHES)
def test_resized_plan_keeps_the_model_parallel_axes(mesh, kind, unit):
    batch = BatchPlan(4, mesh.data_ranks)
    before = Plan("run", batch, mesh=mesh, shard=ShardPlan(kind))
    sizes = before.legal_sizes
    assert not sizes if unit == 1 else before.world_size in sizes
    assert all(size % unit == 0 for size in sizes)
    for size in sizes or range(1, 9):
        after = before.for_world(size, 1)
        assert after.world_size == size
        assert (after.mesh.pp, after.mesh.cp, after.mesh.tp) == (mesh.pp, mesh.cp, mesh.tp)
        assert after.batch.global_batch == batch.global_batch
        assert after.batch.ranks == after.mesh.data_ranks <= batch.global_batch
        assert after.legal_sizes == sizes, "a run that changed its size has the same ones"
        if kind in ("grad_op", "full"):
            assert after.mesh.dp_replicate == mesh.dp_replicate
        assert after.for_world(before.world_size, 1).mesh == mesh


def test_stream_on_a_mesh_resizes_only_with_even_batches():
    batch = BatchPlan(1, 3, of_stream=True)  # of 3 samples, which two data ranks cannot take one at a time
    before = Plan("run", batch, mesh=MeshSpec(dp_replicate=3, tp=2))
    assert before.legal_sizes == [2, 6]
    for size in before.legal_sizes:
        assert before.for_world(size, 1).batch.is_even
