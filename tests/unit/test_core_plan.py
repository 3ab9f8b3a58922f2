"""A global batch cut for another number of ranks stays what it was; a stream goes on only where that is so."""

from __future__ import annotations

import itertools

import pytest

from distributed.core.mesh import MeshSpec
from distributed.core.plan import BatchPlan, CheckpointPlan, ObservePlan, Plan

SMALL = list(itertools.product(range(1, 6), range(1, 6), range(1, 4)))  # per_device, ranks, accumulation


@pytest.mark.parametrize(("per_device", "ranks", "accumulation"), SMALL)
def test_batch_plan_for_other_ranks_keeps_the_global_batch(per_device: int, ranks: int, accumulation: int) -> None:
    batch = BatchPlan(per_device, ranks, accumulation)
    for there in range(1, batch.global_batch + 3):  # also more ranks than samples
        cut = batch.for_ranks(there)
        assert cut.global_batch == batch.global_batch
        assert cut.micro_batch <= per_device * there
        assert 0 < batch.global_batch - (cut.accumulation - 1) * cut.micro_batch <= cut.micro_batch
        back = cut.for_ranks(ranks)
        assert (back.global_batch, back.micro_batch <= per_device * ranks) == (batch.global_batch, True)


@pytest.mark.parametrize(("per_device", "ranks", "accumulation"), SMALL)
def test_stream_step_takes_the_global_batch_at_every_legal_size(per_device: int, ranks: int, accumulation: int) -> None:
    plan = stream_plan(BatchPlan(per_device, ranks, accumulation, of_stream=True))
    sizes = plan.legal_sizes
    assert {1, ranks} <= set(sizes)
    assert max(sizes) <= plan.batch.global_batch
    for size in sizes:
        cut = plan.for_world(size, 1).batch
        assert cut.micro_batch * cut.accumulation == plan.batch.global_batch
        assert plan.for_world(size, 1).legal_sizes == sizes, "a run that changed its size has the same ones"


def test_stream_that_splits_itself_keeps_its_world_size() -> None:
    assert stream_plan(BatchPlan(8, 4, of_stream=True), split="dataset").legal_sizes == [4]


def test_map_dataset_allows_any_world_size() -> None:
    assert stream_plan(BatchPlan(8, 4)).legal_sizes == []


def test_agreed_run_dir_moves_the_folders_inside_it() -> None:
    checkpoint, observe = CheckpointPlan(dir="runs/a/checkpoints"), ObservePlan(tensorboard_dir="runs/a/tensorboard")
    plan = Plan("runs/a", BatchPlan(8), checkpoint=checkpoint, observe=observe).in_dir("runs/b")
    found = (plan.run_dir, plan.checkpoint.dir, plan.observe.tensorboard_dir)
    assert found == ("runs/b", "runs/b/checkpoints", "runs/b/tensorboard")


def test_agreed_run_dir_keeps_the_users_folders() -> None:
    plan = Plan("runs/a", BatchPlan(8), checkpoint=CheckpointPlan(dir="mine")).in_dir("runs/b")
    assert (plan.checkpoint.dir, plan.observe.tensorboard_dir) == ("mine", "")


def stream_plan(batch: BatchPlan, split: str = "share") -> Plan:
    return Plan("run", batch, mesh=MeshSpec(dp_replicate=batch.ranks), iterable_split=split)
