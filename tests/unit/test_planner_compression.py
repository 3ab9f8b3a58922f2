"""What the planner makes of compressed gradients: where it has them, and every reason for which it has not."""

from __future__ import annotations

from typing import Any

import pytest

from distributed.core.config import DistributedConfig
from distributed.core.errors import ConfigError, PlanError
from distributed.core.plan import Plan
from distributed.core.plan_parts.compression import CompressionPlan
from distributed.planner.hardware import Gpu, Hardware
from distributed.planner.planning import JobProfile, make_plan
from distributed.strategies.data_parallel.ddp import why_not_captured


def plan(task: dict[str, str] | None = None, hardware: Hardware | None = None, **settings: Any) -> Plan:
    config = DistributedConfig(**{"num_gpus": 2, "batch_size": 4, "compression": "topk"} | settings)
    machine = hardware or Hardware(cpu_cores=8)
    return make_plan(config, JobProfile(samples=64, task=task or {}), machine, run_dir="unused")


def test_settings_become_the_plan() -> None:
    assert plan(compression_ratio=0.05, compression_min_size=7).replicate.compression == CompressionPlan(
        "topk", ratio=0.05, min_size=7
    )
    assert plan(compression="powersgd", compression_rank=2).replicate.compression.rank == 2
    alone = plan(num_gpus=1)
    assert any("no topk compression" in decision.choice for decision in alone.decisions)


@pytest.mark.parametrize("kind", ["fp16", "topk", "auto"])
@pytest.mark.parametrize(
    ("settings", "task", "other"),
    [
        ({"zero_stage": 1}, {}, "sharded over ranks"),
        ({"sharding": "full"}, {}, "sharded over ranks"),
        ({"tensor_parallel": 2}, {}, "sharded over ranks"),
        ({"pipeline_parallel": 2}, {}, "sharded over ranks"),
        ({"context_parallel": 2}, {}, "sharded over ranks"),
        ({"reproducible": "bitwise", "virtual_ranks": 2}, {}, "reproducible='bitwise'"),
        ({"static_graph": True}, {}, "static_graph"),
        ({}, {"manual": "manual_optimization"}, "manual_optimization"),
        ({}, {"closure": "optimizer LBFGS"}, "LBFGS"),
    ],
)
def test_what_it_cannot_be_had_with_is_named(
    kind: str, settings: dict[str, Any], task: dict[str, str], other: str
) -> None:
    with pytest.raises(PlanError) as refused:
        plan(task, compression=kind, backend="pytorch-ddp", **settings)
    (found,) = [problem for problem in refused.value.problems if problem.what.startswith("compression=")]
    assert other in found.what
    assert found.why
    assert found.do


def test_all_reasons_are_told_at_once() -> None:
    with pytest.raises(PlanError) as refused:
        plan({"manual": "manual_optimization"}, static_graph=True, compression_ratio=0.6)
    assert len([one for one in refused.value.problems if one.what.startswith("compression=")]) == 3


def test_top_k_that_sends_more_than_dense_gradients_is_refused() -> None:
    plan(num_gpus=4, compression_ratio=0.24)
    with pytest.raises(PlanError, match=r"set compression_ratio below 0\.25"):
        plan(num_gpus=4, compression_ratio=0.25)
    assert plan(num_gpus=4, compression="randomk", compression_ratio=0.25)


def test_16_bits_of_parameters_in_16_bits_are_refused() -> None:
    with pytest.raises(PlanError, match="have 16 bits already"):
        plan(compression="fp16", bf16_parameters=True)
    assert plan(bf16_parameters=True).replicate.compression.keeps


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("none", "compression_ratio", 0.1),
        ("int8", "compression_ratio", 0.1),
        ("topk", "compression_rank", 2),
        ("fp16", "compression_min_size", 10),
    ],
)
def test_settings_of_another_kind_are_refused(kind: str, name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} is set, but would have no effect"):
        plan(compression=kind, **{name: value})


@pytest.mark.parametrize("engine", ["fsdp", "deepspeed", "tensorflow", "horovod"])
def test_engines_without_it_name_those_that_have_it(engine: str) -> None:
    with pytest.raises(PlanError, match="set backend='pytorch-ddp'"):
        plan(backend=engine)


def test_slow_rank_is_replaced_only_where_the_others_hold_all() -> None:
    assert plan(compression="bf16", slow_rank="replace").is_held_by_each
    with pytest.raises(PlanError, match="slow_rank='replace' with compression='topk'"):
        plan(slow_rank="replace")


def test_step_with_compression_is_not_captured() -> None:
    gpus = Hardware(cpu_cores=8, gpus=(Gpu("H200"),) * 2)
    assert "compression='topk'" in why_not_captured(plan(hardware=gpus))


@pytest.mark.parametrize(
    ("settings", "task", "other"),
    [
        ({"find_unused_parameters": True}, {}, "find_unused_parameters"),
        ({}, {"several_optimizers": "configure_optimizers"}, "several optimizers"),
        ({"compile": "whole"}, {}, "compile='whole'"),
    ],
)
def test_what_changes_between_steps_is_refused_with_auto(
    settings: dict[str, Any], task: dict[str, str], other: str
) -> None:
    with pytest.raises(PlanError) as caught:
        plan(compression="auto", task=task, **settings)
    assert f"compression='auto' with {other}" in str(caught.value)


def test_auto_takes_settings_of_its_kinds_and_says_what_it_does() -> None:
    found = plan(compression="auto", compression_ratio=0.05, compression_rank=2, compression_min_size=7)
    assert found.replicate.compression == CompressionPlan("auto", 0.05, 2, 7)
    assert not found.is_held_by_each, "it may come to keep what it does not send"
    (said,) = [decision for decision in found.decisions if "sent whole at first" in decision.choice]
    assert said.override == "compression"
    alone = plan(compression="auto", num_gpus=1)
    assert any("no auto compression" in decision.choice for decision in alone.decisions)
