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


def test_cpu_plan_only_keeps_freed_memory() -> None:
    assert plan(CPU).speed == plan(CPU, mixed_precision="bf16").speed == SpeedPlan(keep_freed_memory=True)
    assert "keep_freed_memory" in {decision.override for decision in plan(CPU).decisions}
    without = plan(CPU, keep_freed_memory=False)
    assert without.speed == SpeedPlan()
    assert "keep_freed_memory" not in {decision.override for decision in without.decisions}


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD"])
def test_malloc_configured_by_the_user_is_left_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    assert not plan(CPU).speed.keep_freed_memory
    assert plan(CPU, keep_freed_memory=True).speed.keep_freed_memory


def test_keep_freed_memory_without_glibc_is_off_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "confstr")
    assert not plan(CPU).speed.keep_freed_memory
    assert refused(CPU, keep_freed_memory=True) == ["keep_freed_memory=True would have no effect"]


def test_keep_freed_memory_under_ray_is_off_or_refused() -> None:
    assert not plan(CPU, backend="ray").speed.keep_freed_memory
    assert refused(CPU, backend="ray", keep_freed_memory=True) == ["keep_freed_memory=True would have no effect"]


def test_hopper_in_bf16_gets_every_speed_switch_with_reason() -> None:
    made = plan(HOPPER, mixed_precision="bf16", compile="auto")
    assert all(getattr(made.speed, name) for name in SWITCHES)
    told = {decision.override: decision.reason for decision in made.decisions}
    assert all(told.get(name) for name in (*SWITCHES, "compile"))
    for name in SWITCHES:
        without = plan(HOPPER, mixed_precision="bf16", **{name: False})
        assert not getattr(without.speed, name)
        assert name not in {decision.override for decision in without.decisions}


@pytest.mark.parametrize(
    ("settings", "compiles"),
    [
        ({"tensor_parallel": 2}, True),
        ({"tensor_parallel": 2, "sequence_parallel": True}, False),
        ({"context_parallel": 2}, False),
    ],
)
def test_auto_compiles_blocks_of_a_mesh_where_it_may(settings: dict[str, Any], compiles: bool) -> None:
    made = plan(HOPPER, compile="auto", **settings)
    assert (made.memory.compile, made.memory.compile_whole) == (compiles, False)


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
def test_speed_switches_follow_gpu_precision_and_engine(
    machine: Hardware, settings: dict[str, Any], chosen: set[str]
) -> None:
    speed = plan(machine, **settings).speed
    assert {name for name in SWITCHES if getattr(speed, name)} == chosen


def test_allocator_configured_by_the_user_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    assert not plan(HOPPER).speed.expandable_segments
    assert plan(HOPPER, expandable_segments=True).speed.expandable_segments


@pytest.mark.parametrize("name", SWITCHES[1:])
def test_gpu_only_speed_switches_are_refused_on_cpu(name: str) -> None:
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
def test_data_on_device_follows_device_engine_and_setting(
    machine: Hardware, settings: dict[str, Any], chosen: str
) -> None:
    assert plan(machine, **settings).speed.data_on_device == chosen


def test_data_on_device_without_effect_is_refused() -> None:
    assert refused(CPU, data_on_device=True) == ["data_on_device=True on a CPU"]
    assert "data_on_device=True with backend='deepspeed'" in refused(HOPPER, backend="deepspeed", data_on_device=True)
    bitwise = {"reproducible": "bitwise", "virtual_ranks": 2}
    assert refused(HOPPER, data_on_device=True, **bitwise) == ["data_on_device=True with reproducible='bitwise'"]


def test_fused_optimizer_is_allowed_on_cpu() -> None:
    assert plan(CPU, fused_optimizer=True).speed.fused_optimizer


@pytest.mark.parametrize("name", SWITCHES)
def test_deepspeed_refuses_every_speed_switch(name: str) -> None:
    assert f"{name}=True with backend='deepspeed'" in refused(HOPPER, backend="deepspeed", **{name: True})


@pytest.mark.parametrize(("asked", "kind"), [(True, "compensated"), ("stochastic", "stochastic")])
def test_bf16_parameters_imply_bf16_precision_with_reason(asked: Any, kind: str) -> None:
    made = plan(CPU, bf16_parameters=asked)
    assert (made.speed.parameters, made.precision.kind) == (kind, "bf16")
    assert "bf16_parameters" in {decision.override for decision in made.decisions}


@pytest.mark.parametrize("sharded", [{"zero_stage": 3}, {"zero_stage": 2}, {"backend": "fsdp"}])
def test_bf16_parameters_are_allowed_with_sharding(sharded: dict[str, Any]) -> None:
    made = plan(CPU, bf16_parameters=True, **sharded)
    assert made.speed.parameters == "compensated"
    assert made.precision.kind == "bf16"
    assert "shards are in fp32" in next(d.reason for d in made.decisions if d.override == "bf16_parameters")


def test_incompatible_speed_settings_are_refused() -> None:
    assert refused(CPU, bf16_parameters=True, mixed_precision="fp16") == ["bf16_parameters with mixed_precision='fp16'"]
    for sharded in ({"tensor_parallel": 2}, {"zero_stage": 1}, {"backend": "fsdp", "context_parallel": 2}):
        assert "bf16_parameters with a model that is sharded over ranks" in refused(
            CPU, bf16_parameters=True, **sharded
        )
    bitwise = {"reproducible": "bitwise", "virtual_ranks": 2}
    assert "bf16_parameters with reproducible='bitwise'" in refused(CPU, bf16_parameters=True, **bitwise)
    assert "channels_last with a model that is sharded over ranks" in refused(HOPPER, channels_last=True, zero_stage=3)
    assert refused(CPU, compile_cache="here") == ["compile_cache without compile"]


def test_lora_with_bf16_parameters_is_allowed() -> None:
    assert plan(CPU, bf16_parameters=True, lora=4).speed.parameters == "compensated"
