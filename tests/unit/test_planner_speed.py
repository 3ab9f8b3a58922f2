"""Free speed: what a plan chooses by itself on which machine, with which reason, and what it refuses."""

from __future__ import annotations

import os
from typing import Any

import pytest

from distributed.core.config import DistributedConfig
from distributed.core.errors import PlanError
from distributed.core.plan import Plan, SpeedPlan
from distributed.planner.hardware import Gpu, Hardware
from distributed.planner.planning import JobProfile, make_plan

CPU = Hardware(cpu_cores=2, memory_bytes=2**34)
HOPPER, AMPERE, VOLTA = (
    Hardware(gpus=(Gpu(name, 2**36, capability),) * 2, cpu_cores=8, memory_bytes=2**38)
    for name, capability in (("H200", 9.0), ("A100", 8.0), ("V100", 7.0))
)
PROFILE = JobProfile(samples=64, has_convolutions=True, has_blocks=True)
SWITCHES = ("fused_optimizer", "channels_last", "tf32", "expandable_segments")


@pytest.fixture(autouse=True)
def no_allocator_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "GLIBC_TUNABLES", "LD_PRELOAD")
    for name in (*ours, *(name for name in os.environ if name.startswith("MALLOC_"))):
        monkeypatch.delenv(name, raising=False)


def plan(machine: Hardware, **settings: Any) -> Plan:
    config = DistributedConfig(**{"batch_size": 2, "num_gpus": 2} | settings)
    return make_plan(config, PROFILE, machine, run_dir="run")


def refused(machine: Hardware, **settings: Any) -> list[str]:
    with pytest.raises(PlanError) as caught:
        plan(machine, **settings)
    assert all(problem.why and problem.do for problem in caught.value.problems)
    return [problem.what for problem in caught.value.problems]


def test_on_a_cpu_freed_memory_is_kept_and_nothing_else_changed() -> None:
    assert plan(CPU).speed == plan(CPU, mixed_precision="bf16").speed == SpeedPlan(keep_freed_memory=True)
    assert "keep_freed_memory" in {decision.override for decision in plan(CPU).decisions}
    without = plan(CPU, keep_freed_memory=False)
    assert without.speed == SpeedPlan()
    assert "keep_freed_memory" not in {decision.override for decision in without.decisions}


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD"])
def test_a_malloc_that_the_user_has_set_up_is_left_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    assert not plan(CPU).speed.keep_freed_memory
    assert plan(CPU, keep_freed_memory=True).speed.keep_freed_memory


def test_where_malloc_cannot_be_told_it_is_left_alone_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "confstr")
    assert not plan(CPU).speed.keep_freed_memory
    assert refused(CPU, keep_freed_memory=True) == ["keep_freed_memory=True would have no effect"]


def test_ray_trains_in_a_thread_whose_memory_cannot_be_kept() -> None:
    assert not plan(CPU, backend="ray").speed.keep_freed_memory
    assert refused(CPU, backend="ray", keep_freed_memory=True) == ["keep_freed_memory=True would have no effect"]


def test_a_hopper_gets_all_in_mixed_precision_each_with_a_reason_and_its_switch() -> None:
    made = plan(HOPPER, mixed_precision="bf16", compile="auto")
    assert all(getattr(made.speed, name) for name in SWITCHES)
    told = {decision.override: decision.reason for decision in made.decisions}
    assert all(told.get(name) for name in (*SWITCHES, "compile"))
    for name in SWITCHES:
        without = plan(HOPPER, mixed_precision="bf16", **{name: False})
        assert not getattr(without.speed, name)
        assert name not in {decision.override for decision in without.decisions}


@pytest.mark.parametrize(
    ("machine", "settings", "chosen"),
    [
        (HOPPER, {}, {"fused_optimizer", "expandable_segments"}),  # in fp32 no digit may be lost
        (AMPERE, {"mixed_precision": "bf16"}, set(SWITCHES)),
        (VOLTA, {"mixed_precision": "fp16"}, {"fused_optimizer", "channels_last", "expandable_segments"}),
        (HOPPER, {"mixed_precision": "bf16", "backend": "fsdp"}, {"tf32", "expandable_segments"}),
        (HOPPER, {"mixed_precision": "bf16", "backend": "deepspeed"}, set()),
        (
            HOPPER,
            {"mixed_precision": "bf16", "reproducible": "bitwise", "virtual_ranks": 2},
            {"fused_optimizer", "expandable_segments"},
        ),
    ],
)
def test_what_is_chosen_where(machine: Hardware, settings: dict[str, Any], chosen: set[str]) -> None:
    speed = plan(machine, **settings).speed
    assert {name for name in SWITCHES if getattr(speed, name)} == chosen


def test_an_allocator_that_the_user_has_set_up_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    assert not plan(HOPPER).speed.expandable_segments
    assert plan(HOPPER, expandable_segments=True).speed.expandable_segments


@pytest.mark.parametrize("name", SWITCHES[1:])
def test_what_only_a_gpu_has_is_refused_on_a_cpu(name: str) -> None:
    assert refused(CPU, **{name: True}) == [f"{name}=True on a CPU"]


@pytest.mark.parametrize(
    ("machine", "settings", "chosen"),
    [
        (HOPPER, {}, "auto"),
        (HOPPER, {"data_on_device": True}, "on"),
        (HOPPER, {"data_on_device": False}, "off"),
        (HOPPER, {"backend": "fsdp"}, "auto"),
        (HOPPER, {"backend": "deepspeed"}, "off"),
        (HOPPER, {"reproducible": "bitwise", "virtual_ranks": 2}, "off"),
        (CPU, {}, "off"),
    ],
)
def test_where_data_may_go_to_the_device(machine: Hardware, settings: dict[str, Any], chosen: str) -> None:
    assert plan(machine, **settings).speed.data_on_device == chosen


def test_data_on_the_device_is_refused_where_it_would_not_be_used() -> None:
    assert refused(CPU, data_on_device=True) == ["data_on_device=True on a CPU"]
    assert "data_on_device=True with backend='deepspeed'" in refused(HOPPER, backend="deepspeed", data_on_device=True)
    bitwise = {"reproducible": "bitwise", "virtual_ranks": 2}
    assert refused(HOPPER, data_on_device=True, **bitwise) == ["data_on_device=True with reproducible='bitwise'"]


def test_a_fused_optimizer_can_be_had_on_a_cpu() -> None:
    assert plan(CPU, fused_optimizer=True).speed.fused_optimizer


@pytest.mark.parametrize("name", SWITCHES)
def test_an_engine_with_kernels_of_its_own_takes_none(name: str) -> None:
    assert f"{name}=True with backend='deepspeed'" in refused(HOPPER, backend="deepspeed", **{name: True})


@pytest.mark.parametrize(("asked", "kind"), [(True, "compensated"), ("stochastic", "stochastic")])
def test_parameters_in_bf16_bring_mixed_precision_and_say_why(asked: Any, kind: str) -> None:
    made = plan(CPU, bf16_parameters=asked)
    assert (made.speed.parameters, made.precision.kind) == (kind, "bf16")
    assert "bf16_parameters" in {decision.override for decision in made.decisions}


def test_what_does_not_go_together_is_refused() -> None:
    assert refused(CPU, bf16_parameters=True, mixed_precision="fp16") == ["bf16_parameters with mixed_precision='fp16'"]
    for sharded in ({"zero_stage": 3}, {"tensor_parallel": 2}, {"zero_stage": 1}):
        assert "bf16_parameters with a model that the ranks share out" in refused(CPU, bf16_parameters=True, **sharded)
    bitwise = {"reproducible": "bitwise", "virtual_ranks": 2}
    assert "bf16_parameters with reproducible='bitwise'" in refused(CPU, bf16_parameters=True, **bitwise)
    assert "channels_last with a model that the ranks share out" in refused(HOPPER, channels_last=True, zero_stage=3)
    assert refused(CPU, compile_cache="here") == ["compile_cache without compile"]


def test_adapters_may_be_beside_parameters_in_bf16() -> None:
    assert plan(CPU, bf16_parameters=True, lora=4).speed.parameters == "compensated"
