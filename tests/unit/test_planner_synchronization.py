"""What the planner makes of replicas that step alone: how often they meet, and every reason for which they cannot."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from distributed.core.config import DistributedConfig
from distributed.core.errors import ConfigError, PlanError
from distributed.core.plan import Plan
from distributed.core.plan_parts.synchronization import SynchronizationPlan
from distributed.planner.hardware import Hardware
from distributed.planner.planning import JobProfile, make_plan
from distributed.train.callbacks.ema import EMA
from distributed.train.task import Task
from distributed.trainers.own_loop.refusals import refuse_for_loop

BOTH = {"local_sgd": {}, "post_local_sgd": {"local_sgd_start": 5}, "diloco": {}}


def plan(task: dict[str, str] | None = None, samples: int | None = 64, **settings: Any) -> Plan:
    config = DistributedConfig(**{"num_gpus": 2, "batch_size": 4} | settings)
    profile = JobProfile(samples=samples, task=task or {}, has_batchnorm=True)
    return make_plan(config, profile, Hardware(cpu_cores=8), run_dir="unused")


def test_settings_become_the_plan() -> None:
    found = plan(synchronization="local_sgd", sync_every_n_steps=7)
    assert found.replicate.synchronization == SynchronizationPlan("local_sgd", every=7)
    assert not found.replicate.sync_batchnorm
    assert not found.is_held_by_each
    chosen = plan(synchronization="diloco", outer_momentum=0.5)
    assert chosen.replicate.synchronization == SynchronizationPlan("diloco", every=100, outer_momentum=0.5)
    assert any(decision.override == "sync_every_n_steps" for decision in chosen.decisions)


@pytest.mark.parametrize(("start", "steps"), [(3, 3), ("3 steps", 3), ("2 epochs", 16)])
def test_start_in_epochs_is_counted_in_steps(start: int | str, steps: int) -> None:
    found = plan(synchronization="post_local_sgd", local_sgd_start=start, epochs=3).replicate.synchronization
    assert found.start == steps
    assert [step for step in range(1, steps + 40) if found.meets_after(step)] == [steps + 16, steps + 32]


def test_single_rank_is_told_that_nothing_changes() -> None:
    alone = plan(num_gpus=1, synchronization="local_sgd")
    assert any("no effect while there is 1 rank" in decision.choice for decision in alone.decisions)
    outer = plan(num_gpus=1, synchronization="diloco")
    assert not any("no effect" in decision.choice for decision in outer.decisions)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(
    ("settings", "task", "other"),
    [
        ({"zero_stage": 1}, {}, "sharded over ranks"),
        ({"sharding": "full"}, {}, "sharded over ranks"),
        ({"tensor_parallel": 2}, {}, "sharded over ranks"),
        ({"pipeline_parallel": 2}, {}, "sharded over ranks"),
        ({"reproducible": "bitwise", "virtual_ranks": 2}, {}, "reproducible='bitwise'"),
        ({"compression": "topk"}, {}, "compression='topk'"),
        ({"bf16_parameters": True}, {}, "bf16_parameters"),
        ({"sync_batchnorm": True}, {}, "sync_batchnorm"),
        ({"slow_rank": "replace"}, {}, "slow_rank"),
        ({"capture": True}, {}, "capture"),
        ({}, {"manual": "manual_optimization"}, "manual_optimization"),
        ({}, {"closure": "optimizer LBFGS"}, "LBFGS"),
        ({}, {"several_optimizers": "training_step(model, batch, optimizer)"}, "training_step"),
    ],
)
def test_what_it_cannot_be_had_with_is_named(
    kind: str, settings: dict[str, Any], task: dict[str, str], other: str
) -> None:
    with pytest.raises(PlanError) as refused:
        plan(task, synchronization=kind, backend="pytorch-ddp", **BOTH[kind], **settings)
    (found,) = [problem for problem in refused.value.problems if problem.what.startswith("synchronization=")]
    assert other in found.what
    assert found.why
    assert found.do


@pytest.mark.parametrize("setting", ["find_unused_parameters", "static_graph"])
def test_settings_of_ddp_need_dense_steps(setting: str) -> None:
    with pytest.raises(PlanError, match=f"{setting}=True"):
        plan(synchronization="local_sgd", **{setting: True})
    plan(synchronization="post_local_sgd", local_sgd_start=5, **{setting: True})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"sync_every_n_steps": 4}, "sync_every_n_steps is set"),
        ({"synchronization": "local_sgd", "local_sgd_start": 5}, "local_sgd_start is set"),
        ({"synchronization": "local_sgd", "outer_momentum": 0.5}, "outer_momentum is set"),
        ({"synchronization": "post_local_sgd", "local_sgd_start": "soon"}, "local_sgd_start"),
    ],
)
def test_settings_without_effect_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        DistributedConfig(**settings)


def test_start_that_is_not_known_is_refused() -> None:
    with pytest.raises(PlanError, match="without local_sgd_start"):
        plan(synchronization="post_local_sgd")
    with pytest.raises(PlanError, match="the training data is a stream"):
        plan(synchronization="post_local_sgd", local_sgd_start="1 epoch", samples=None)


@pytest.mark.parametrize(
    ("start", "run"),
    [
        (16, {"epochs": 2}),
        ("2 epochs", {"epochs": 2}),
        (10, {"max_steps": 10, "epochs": 2}),
        (5, {"samples": None, "max_steps": 5}),
        (4, {"limit_train_batches": 2, "epochs": 2}),
    ],
)
def test_start_after_the_end_is_refused(start: int | str, run: dict[str, Any]) -> None:
    """A start one step earlier is none; what only tries the run may be too short for it."""
    with pytest.raises(PlanError, match="would have no effect") as refused:
        plan(synchronization="post_local_sgd", local_sgd_start=start, **run)
    assert f"local_sgd_start={start!r}, and the run ends after" in str(refused.value)
    earlier = start - 1 if isinstance(start, int) else 15
    assert plan(synchronization="post_local_sgd", local_sgd_start=earlier, **run).replicate.synchronization.start
    plan(synchronization="post_local_sgd", local_sgd_start=start, fast_dev_run=1, **run)


def test_loops_and_averages_of_one_replica_are_refused() -> None:
    config = DistributedConfig(num_gpus=2, batch_size=4, synchronization="local_sgd")
    found = plan(synchronization="local_sgd")
    with pytest.raises(PlanError, match="synchronization='local_sgd' under"):
        refuse_for_loop(found, config, has_several=False, has_models=False)
    task = Task(nn.Linear(2, 2))
    (problem,) = EMA(0.9).check(found, task, False)
    assert "EMA with synchronization='local_sgd'" in problem.what
    assert not EMA(0.9).check(plan(), task, False)


@pytest.mark.parametrize("backend", ["fsdp", "horovod", "deepspeed"])
def test_other_engines_name_those_that_have_it(backend: str) -> None:
    with pytest.raises(PlanError, match="synchronization='local_sgd'") as refused:
        plan(synchronization="local_sgd", backend=backend)
    assert "pytorch-ddp" in str(refused.value)
