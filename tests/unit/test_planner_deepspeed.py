"""What a DeepSpeed configuration says here: what is taken over, what is refused and why, what DeepSpeed is given."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distributed.core.config import DistributedConfig
from distributed.core.env import worker_env
from distributed.core.errors import PlanError, Problem
from distributed.core.plan import Plan
from distributed.engines.deepspeed.config_adoption import adopt
from distributed.engines.deepspeed.process import complete
from distributed.planner.hardware import Gpu, Hardware
from distributed.planner.planning import JobProfile, make_plan

SAMPLES = JobProfile(loader_batch_size=4, samples=64, parameters=1000)


def plan_of(given: Any, profile: JobProfile = SAMPLES, *, gpus: int = 0, **settings: Any) -> Plan:
    asked = {"num_gpus": 2, "backend": "deepspeed", "deepspeed_config": given} | settings
    hardware = Hardware(cpu_cores=2, gpus=(Gpu("GPU", compute_capability=9.0),) * gpus)
    return make_plan(DistributedConfig(**asked), profile, hardware, run_dir="run")


def engine_of(given: Any, **settings: Any) -> dict[str, Any]:
    return plan_of(given, **settings).engine["config"]


def refusals(given: Any, profile: JobProfile = SAMPLES, **settings: Any) -> list[Problem]:
    with pytest.raises(PlanError) as refused:
        plan_of(given, profile, **settings)
    return list(refused.value.problems)


def decided(plan: Plan) -> str:
    return "\n".join(map(str, plan.decisions))


def adopted(given: Any, **settings: Any) -> DistributedConfig:
    problems: list[Problem] = []
    config = adopt(DistributedConfig(deepspeed_config=given, **settings), problems, world_size=2)
    assert problems == []
    return config


# What is taken over


def test_deepspeed_values_become_settings_with_file_as_source(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    content = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/fast"},
            "offload_param": {"device": "cpu"},
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"warmup_type": "linear", "warmup_num_steps": 5, "total_num_steps": 16, "cos_min_ratio": 0.1},
        },
    }
    path.write_text(json.dumps(content))
    config = adopted(str(path))
    expected = {
        "batch_size": 8,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "mixed_precision": "bf16",
        "zero_stage": 3,
        "offload_optimizer": "nvme",
        "offload_dir": "/fast",
        "offload_parameters": "cpu",
        "optimizer": "adamw",
        "learning_rate": 0.01,
        "weight_decay": 0.1,
        "lr_schedule": "cosine",
        "warmup_steps": 5,
        "min_lr_ratio": 0.1,
    }
    assert {name: getattr(config, name) for name in expected} == expected
    assert {config.source(name) for name in expected} == {"ds.json"}


def test_fp16_section_sets_the_scaler_unless_scale_is_static() -> None:
    scaled = {"enabled": True, "loss_scale": 0, "initial_scale_power": 10, "loss_scale_window": 50}
    config = adopted({"fp16": scaled})
    assert (config.scaler_init_scale, config.scaler_growth_interval) == (1024, 50)
    assert engine_of({"fp16": scaled}, gpus=2, device="cuda")["fp16"] == scaled
    static = {"enabled": True, "loss_scale": 128.0}
    assert adopted({"fp16": static}).scaler_init_scale is None
    assert engine_of({"fp16": static}, gpus=2, device="cuda")["fp16"] == static
    (problem,) = refusals({"fp16": static}, gpus=2, device="cuda", scaler_init_scale=64)
    assert "scaler_init_scale (argument)" in problem.what
    assert "128" in problem.what
    (odd,) = refusals({}, gpus=2, device="cuda", mixed_precision="fp16", scaler_init_scale=1000)
    assert "power of two" in odd.why
    assert "512 or 1024" in odd.do


def test_deprecated_deepspeed_keys_are_understood() -> None:
    config = adopted({"zero_optimization": {"stage": 2, "cpu_offload": True}, "bfloat16": {"enabled": True}})
    assert (config.offload_optimizer, config.mixed_precision) == ("cpu", "bf16")
    assert adopted({"zero_optimization": True}).zero_stage == 1
    assert adopted({"optimizer": {"type": "Adam"}}).optimizer == "adamw"
    assert adopted({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}).optimizer == "adam"


@pytest.mark.parametrize(
    ("content", "settings", "batch"),
    [
        ({"train_batch_size": 32}, {}, (16, 1)),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}, {}, (4, 4)),
        ({"train_batch_size": 32, "gradient_accumulation_steps": 4}, {}, (4, 4)),
        ({"train_batch_size": 32}, {"batch_size": 8}, (8, 2)),
        ({"train_batch_size": 32}, {"gradient_accumulation_steps": 2}, (8, 2)),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": 1}, {}, (16, 1)),
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}, {}, (4, 1)),
    ],
)
def test_train_batch_size_determines_the_open_batch_values(content: Any, settings: Any, batch: tuple[int, int]) -> None:
    plan = plan_of(content, **settings)
    assert (plan.batch.per_device, plan.batch.accumulation) == batch


def test_indivisible_train_batch_size_is_refused() -> None:
    (problem,) = refusals({"train_batch_size": 33})
    assert "train_batch_size=33" in problem.what
    assert "32 or 34" in problem.do
    (problem,) = refusals({"train_batch_size": 30}, batch_size=8, gradient_accumulation_steps=2)
    assert "train_batch_size=30" in problem.what
    assert "8 samples × 2 ranks × 2 accumulated" in problem.why


# What DeepSpeed is given


def test_engine_config_overrides_deepspeeds_own_defaults() -> None:
    engine = engine_of(None)
    assert engine["zero_optimization"] == {"stage": 2}
    assert engine["gradient_clipping"] == 0.0  # its own default is 1.0
    assert engine["zero_allow_untested_optimizer"] is True
    assert engine["zero_force_ds_cpu_optimizer"] is False
    assert engine["steps_per_print"] > 10**9
    assert (engine["bf16"], engine["fp16"]) == ({"enabled": False}, {"enabled": False})
    assert not {"optimizer", "scheduler", "train_batch_size", "train_micro_batch_size_per_gpu"} & set(engine)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_engine_config_has_the_plans_zero_stage(stage: int) -> None:
    assert engine_of(None, zero_stage=stage)["zero_optimization"]["stage"] == stage


def test_every_auto_is_resolved_and_reported() -> None:
    content = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
        "zero_optimization": {
            "stage": "auto",
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "overlap_comm": False,
            "offload_param": {"device": "none"},
        },
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {
                "warmup_min_lr": "auto",
                "warmup_max_lr": "auto",
                "warmup_num_steps": "auto",
                "warmup_type": "auto",
            },
        },
    }
    plan = plan_of(content, mixed_precision="bf16", zero_stage=3, learning_rate=0.02, warmup_steps=3)
    engine = plan.engine["config"]
    assert "auto" not in json.dumps(engine)
    assert engine["zero_optimization"] == {"stage": 3, "overlap_comm": False}
    assert engine["bf16"] == {"enabled": True}
    assert engine["fp16"] == {"enabled": False}
    assert engine["optimizer"]["params"]["lr"] == 0.02
    assert engine["optimizer"]["params"]["weight_decay"] == 0.01  # AdamW's own in torch
    assert plan.schedule.warmup_steps == 3
    said = decided(plan)
    assert "train_batch_size=8" in said
    assert "zero_optimization.reduce_bucket_size=DeepSpeed's default" in said


def test_unresolvable_auto_is_refused_by_name() -> None:
    problems = refusals({"aio": {"block_size": "auto"}, "optimizer": {"type": "AdamW", "params": {"foreach": "auto"}}})
    assert ["aio.block_size" in problems[0].what, "optimizer.params.foreach" in problems[1].what] == [True, True]


def test_auto_inside_a_list_is_refused_with_its_index() -> None:
    given = {
        "aio": {"x": ["auto"]},
        "optimizer": {"type": "AdamW", "params": {"betas": ["auto", 0.9]}},
        "zero_optimization": {"leaf_module": {"classes": [["auto"]]}},
    }
    found = {problem.what.removeprefix("deepspeed_config: ") for problem in refusals(given)}
    assert found == {
        'aio.x[0]="auto"',
        'optimizer.params.betas[0]="auto"',
        'zero_optimization.leaf_module.classes[0][0]="auto"',
    }


def test_users_other_deepspeed_keys_are_kept() -> None:
    content = {
        "wall_clock_breakdown": True,
        "steps_per_print": 10,
        "communication_data_type": "fp32",
        "bf16": {"enabled": True, "immediate_grad_update": True},
        "zero_optimization": {
            "stage": 2,
            "reduce_bucket_size": 1000,
            "offload_optimizer": {"device": "cpu", "pin_memory": False},
        },
    }
    engine = engine_of(content)
    assert engine["wall_clock_breakdown"] is True
    assert engine["steps_per_print"] == 10
    assert engine["communication_data_type"] == "fp32"
    assert engine["bf16"] == {"enabled": True, "immediate_grad_update": True}
    assert engine["zero_optimization"] == content["zero_optimization"]


def test_optimizer_section_gets_the_plans_learning_rate() -> None:
    section = {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.8, 0.9]}}
    engine = engine_of({"optimizer": section}, lr_scaling="linear")
    assert engine["optimizer"] == {
        "type": "AdamW",  # weight_decay: DeepSpeed's own default; torch_adam: the same, without a compiler
        "params": {"lr": 0.02, "betas": [0.8, 0.9], "weight_decay": 0.0, "torch_adam": True},
    }
    assert "torch_adam" not in engine_of({"optimizer": section}, gpus=2)["optimizer"]["params"]
    passed = JobProfile(loader_batch_size=4, samples=64, owns_optimizer=True)
    problems = refusals({"optimizer": section}, passed)
    assert any("optimizer is set (deepspeed_config), but an optimizer is passed" in one.what for one in problems)


def test_decisions_report_differences_from_plain_deepspeed() -> None:
    said = decided(plan_of({"bf16": {"enabled": True}}))
    assert "parameters in bf16" in said
    assert "no gradient clipping" in said
    assert "ZeRO-2" in said
    assert "from deepspeed_config: mixed_precision=bf16" in said
    assert "no gradient clipping" not in decided(plan_of({"gradient_clipping": 0.0}))


def test_deepspeed_accepts_the_generated_config() -> None:
    deepspeed = pytest.importorskip("deepspeed")
    content = {
        "zero_optimization": {"stage": 3, "stage3_max_live_parameters": 10, "offload_param": {"device": "cpu"}},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    engine = engine_of(content, mixed_precision="bf16", gradient_clipping=0.5)
    read = deepspeed.DeepSpeedConfig(engine | {"train_micro_batch_size_per_gpu": 4, "train_batch_size": 4})
    assert read.zero_config.stage == 3
    assert read.zero_config.max_live_parameters == 10
    assert read.zero_config.offload_param.device == "cpu"
    assert read.gradient_clipping == 0.5
    assert read.bfloat16_config.enabled


# What is refused


def test_all_contradictions_are_listed_with_sources_and_values(tmp_path: Path) -> None:
    path = tmp_path / "zero.json"
    content = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.5}},
    }
    path.write_text(json.dumps(content))
    problems = refusals(
        str(path),
        batch_size=4,
        gradient_accumulation_steps=1,
        gradient_clipping=1.0,
        mixed_precision="fp16",
        zero_stage=3,
        cpu_offload=True,
        optimizer="adamw",
        learning_rate=0.2,
        gpus=2,
    )
    whats = [problem.what for problem in problems]
    for mine, theirs in (
        ("batch_size=4", "train_micro_batch_size_per_gpu=8"),
        ("gradient_accumulation_steps=1", "gradient_accumulation_steps=2"),
        ("gradient_clipping=1.0", "gradient_clipping=0.0"),
        ("mixed_precision='fp16'", "bf16.enabled=true"),
        ("zero_stage=3", "zero_optimization.stage=2"),
        ("cpu_offload=True", 'zero_optimization.offload_optimizer.device="none"'),
        ("optimizer='adamw'", 'optimizer.type="SGD"'),
        ("learning_rate=0.2", "optimizer.params.lr=0.1"),
    ):
        assert f"{mine} (argument), but zero.json says {theirs}" in whats
    assert len(problems) == 8


@pytest.mark.parametrize(
    ("content", "settings", "first", "second"),
    [
        ({"zero_optimization": {"stage": 3}}, {"sharding": "grad_op"}, "sharding='grad_op'", "stage=3"),
        ({"bf16": {"enabled": False}}, {"mixed_precision": "bf16"}, "mixed_precision='bf16'", "bf16.enabled=false"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, {}, "bf16.enabled=true", "fp16.enabled=true"),
        (
            {
                "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
                "scheduler": {"type": "WarmupLR", "params": {"warmup_type": "linear", "warmup_max_lr": 0.2}},
            },
            {},
            "optimizer.params.lr=0.1",
            "scheduler.params.warmup_max_lr=0.2",
        ),
        (
            {
                "zero_optimization": {
                    "stage": 3,
                    "offload_optimizer": {"device": "nvme", "nvme_path": "a"},
                    "offload_param": {"device": "nvme", "nvme_path": "b"},
                }
            },
            {},
            'offload_optimizer.nvme_path="a"',
            'offload_param.nvme_path="b"',
        ),
    ],
)
def test_contradiction_names_both_sides(
    content: Any, settings: Any, first: str, second: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where the folder of the last case is made
    (problem,) = refusals(content, **settings)
    assert first in problem.what
    assert second in problem.what


def test_equal_values_in_both_places_are_no_contradiction() -> None:
    content = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    plan = plan_of(content, batch_size=8, sharding="full", mixed_precision=True)
    assert (plan.batch.per_device, plan.shard.kind, plan.precision.kind) == (8, "full", "bf16")


@pytest.mark.parametrize(
    ("text", "what", "why"),
    [
        ('{"bf16": {"enabled": true,}}', "is not valid JSON", "line 1, column 27"),
        ("[1, 2]", "is no DeepSpeed configuration", "list"),
        ('{"bf16": {}, "bf16": {}}', "bf16 is set twice", "only one"),
        ('{"zero_optimization": {"stage": 1, "stage": 2}}', "stage is set twice", "only one"),
        ("\ufeff{}", "is not valid JSON", "line 1"),
        ('{"zero_optimization": 2}', "zero_optimization=2", "object"),
        ('{"zero_optimization": {"stage": 3, "offload_param": "cpu"}}', 'offload_param="cpu"', "object"),
        ('{"optimizer": "AdamW"}', 'optimizer="AdamW"', "object"),
    ],
)
def test_invalid_deepspeed_config_file_is_refused_with_reason(tmp_path: Path, text: str, what: str, why: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    (problem,) = refusals(str(path))
    assert what in problem.what
    assert "ds.json" in problem.what
    assert why in problem.why


def test_unreadable_deepspeed_config_file_is_refused(tmp_path: Path) -> None:
    (missing,) = refusals(str(tmp_path / "missing.json"))
    assert "No such file" in missing.why
    (folder,) = refusals(str(tmp_path))
    assert "directory" in folder.why
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    (binary,) = refusals(str(tmp_path / "binary.json"))
    assert "binary.json" in binary.what


@pytest.mark.parametrize(
    ("content", "named", "do"),
    [
        ({"zero_optimisation": {"stage": 2}}, "zero_optimisation", "zero_optimization"),
        ({"gradient_cliping": 1.0}, "gradient_cliping", "gradient_clipping"),
        ({"zero_optimization": {"overlap_com": True}}, "zero_optimization.overlap_com", "overlap_comm"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memry": True}}},
            "offload_optimizer.pin_memry",
            "pin_memory",
        ),
        ({"bf16": {"enable": True}}, "bf16.enable", "enabled"),
        ({"elasticity": {"enabled": True}}, "elasticity", "min_nodes"),
        ({"amp": {"enabled": True}}, "amp", "mixed_precision"),
        ({"pipeline": {"stages": 2}}, "pipeline", "pipeline_parallel"),
        ({"data_efficiency": {"enabled": True}}, "data_efficiency", "leave it out"),
        ({"curriculum_learning": {"enabled": True}}, "curriculum_learning", "leave it out"),
        ({"checkpoint": {"tag_validation": "Fail"}}, "checkpoint", "checkpoint_dir"),
        ({"tensorboard": {"enabled": True}}, "tensorboard", "tensorboard=true"),
        ({"gradient_predivide_factor": 2.0}, "gradient_predivide_factor", "leave it out"),
        ({"communication_data_type": "fp16"}, "communication_data_type", "fp32"),
        ({"optimizer": {"type": "OneBitAdam"}}, "OneBitAdam", "pass the optimizer itself"),
        ({"optimizer": {"params": {"lr": 1}}}, "optimizer has no type", "AdamW"),
        ({"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1}}}, "max_grad_norm", "gradient_clipping"),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "zero_quantized_weights", "leave it out"),
        ({"zero_optimization": {"mics_shard_size": 2}}, "mics_shard_size", "leave it out"),
        ({"scheduler": {"type": "OneCycle", "params": {}}}, "OneCycle", "lr_schedule"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}}, "WarmupLR", "lr_schedule"),  # log
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_type": "linear", "total_num_steps": 99}}},
            "total_num_steps=99 in a run of 8 steps",
            "max_steps=99",
        ),
        ({"train_micro_batch_size_per_gpu": -1}, "batch_size=-1 (deepspeed_config)", "batch_size"),
        ({"zero_optimization": {"stage": 4}}, "zero_stage=4 (deepspeed_config)", "zero_stage"),
        ({"zero_optimization": {"stage": 0}}, "nothing to shard", "backend='pytorch-ddp'"),
        ({"zero_force_ds_cpu_optimizer": True}, "zero_force_ds_cpu_optimizer", "leave it out"),
        ({"fp16": {"enabled": True}}, "mixed_precision='fp16'", "leave it out"),  # on a CPU
    ],
)
def test_unsupported_deepspeed_keys_are_refused_with_a_remedy(content: Any, named: str, do: str) -> None:
    (problem,) = refusals(content)
    assert named in problem.what
    assert do in problem.do


ODD: list[Any] = [None, True, False, 0, -1, 10**9, 1e300, "", "auto", "x", [], [1], {}, {"a": 1}, {"enabled": [1]}]
WHOLE: dict[str, Any] = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": False},
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 100},
    "zero_optimization": {"stage": 3, "overlap_comm": True, "offload_optimizer": {"device": "cpu"}},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.0}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_type": "linear", "warmup_num_steps": 4, "total_num_steps": 4, "warmup_min_lr": 0},
    },
    "communication_data_type": "fp16",
    "elasticity": {},
}


def places(content: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for key, value in content.items():
        yield (key,)
        if isinstance(value, dict):
            yield from ((key, *below) for below in places(value))


@pytest.mark.parametrize("place", list(places(WHOLE)), ids=".".join)
def test_odd_values_are_refused_or_leave_no_auto(place: tuple[str, ...]) -> None:
    for settings in ({}, {"sharding": "full"}):
        for odd in ODD:
            content = copy.deepcopy(WHOLE)
            holder = content
            for key in place[:-1]:
                holder = holder[key]
            holder[place[-1]] = odd
            try:
                engine = engine_of(content, gpus=2, device="cuda", **settings)
            except PlanError:
                continue
            assert "auto" not in json.dumps(engine)


@pytest.mark.parametrize("odd", ["true", 1, [True]])
def test_enabled_that_is_no_boolean_is_refused(odd: Any) -> None:
    (problem,) = refusals({"bf16": {"enabled": odd}})
    assert f"bf16.enabled={json.dumps(odd)}" in problem.what


def test_disabled_unsupported_sections_are_accepted() -> None:
    content = {
        "elasticity": {"enabled": False},
        "amp": {"enabled": False},
        "sparse_gradients": False,
        "tensorboard": {"enabled": False},
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 2, "compute_grad_norm": True, "zero_quantized_weights": False},
    }
    assert "elasticity" not in engine_of(content)
    assert "compute_grad_norm" not in engine_of(content)["zero_optimization"]


@pytest.mark.parametrize("backend", ["fsdp", "horovod", "pytorch-ddp"])
def test_other_engines_refuse_a_deepspeed_config(backend: str) -> None:
    problems = refusals({"bf16": {"enabled": True}}, backend=backend)
    assert [problem.what for problem in problems] == [
        f"deepspeed_config={{'bf16': {{'enabled': True}}}} with backend={backend!r}"
    ]
    assert "deepspeed" in problems[0].do


def test_deepspeed_config_selects_the_deepspeed_engine() -> None:
    plan = plan_of({"zero_optimization": {"stage": 3}}, backend="auto")
    assert plan.strategy == "deepspeed"
    assert "a DeepSpeed configuration is given" in decided(plan)


# Offload


def test_cpu_offload_moves_optimizer_and_at_stage_3_parameters() -> None:
    assert engine_of(None, zero_stage=2, cpu_offload=True)["zero_optimization"] == {
        "stage": 2,
        "offload_optimizer": {"device": "cpu"},
    }
    plan = plan_of(None, zero_stage=3, cpu_offload=True)
    assert plan.engine["config"]["zero_optimization"]["offload_param"] == {"device": "cpu"}
    assert "the parameters in host memory: cpu_offload is set" in decided(plan)


def test_offload_dir_is_created_and_used_for_nvme(tmp_path: Path) -> None:
    folder = tmp_path / "fast" / "disk"
    zero = engine_of(None, zero_stage=3, offload_optimizer="nvme", offload_dir=str(folder))["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "nvme", "nvme_path": str(folder)}
    assert folder.is_dir()
    content = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "auto"}}}
    zero = engine_of(content, offload_dir=str(folder), mixed_precision="bf16")["zero_optimization"]
    assert zero["offload_param"] == {"device": "nvme", "nvme_path": str(folder), "buffer_size": 1000}  # not 10**8


def test_fp32_parameters_on_cpu_are_not_offloaded_to_files(tmp_path: Path) -> None:
    settings = {"zero_stage": 3, "offload_parameters": "nvme", "offload_dir": str(tmp_path)}
    plan = plan_of(None, **settings)
    assert plan.engine["config"]["zero_optimization"]["offload_param"] == {"device": "cpu"}
    assert "would round them to bf16" in decided(plan)
    on_gpu = engine_of(None, gpus=2, device="cuda", **settings)
    assert on_gpu["zero_optimization"]["offload_param"]["device"] == "nvme"


def test_model_too_small_for_offload_files_is_reported(tmp_path: Path) -> None:
    settings = {"zero_stage": 3, "offload_optimizer": "nvme", "offload_dir": str(tmp_path)}
    assert "no files: DeepSpeed writes files of 1 MiB or more" in decided(plan_of(None, **settings))
    larger = JobProfile(loader_batch_size=4, samples=64, parameters=600_000)
    assert "no files" not in decided(plan_of(None, larger, **settings))


@pytest.mark.parametrize(
    ("settings", "what", "do"),
    [
        ({"zero_stage": 2, "offload_parameters": "cpu"}, "offload_parameters='cpu'", "zero_stage=3"),
        ({"zero_stage": 2, "offload_optimizer": "nvme", "offload_dir": "x"}, "'nvme' (argument)", "zero_stage=3"),
        ({"zero_stage": 3, "offload_optimizer": "nvme"}, "without offload_dir", "offload_dir"),
        ({"zero_stage": 3, "offload_dir": "x"}, "offload_dir='x'", "offload_optimizer='nvme'"),
        ({"zero_stage": 3, "offload_optimizer": "cpu", "offload_dir": "x"}, "offload_dir='x'", "leave it out"),
    ],
)
def test_contradictory_offload_settings_are_refused(
    settings: Any, what: str, do: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (problem,) = refusals(None, **settings)
    assert what in problem.what
    assert do in problem.do


def test_cpu_and_nvme_offload_together_are_refused(tmp_path: Path) -> None:
    settings = {"zero_stage": 3, "cpu_offload": True, "offload_parameters": "nvme", "offload_dir": str(tmp_path)}
    (problem,) = refusals(None, **settings)
    assert "cpu_offload (argument), but offload_parameters='nvme' (argument)" in problem.what


@pytest.mark.parametrize("place", ["a-file", "a-file/below", "/proc/offload"])
def test_unwritable_offload_dir_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "a-file").write_text("")
    (problem,) = refusals(None, zero_stage=3, offload_optimizer="nvme", offload_dir=str(tmp_path / place))
    assert "cannot be written to" in problem.what
    assert place in problem.what
    assert "fast local disk" in problem.do


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True)
    if made.returncode:
        pytest.skip(f"a file system cannot be mounted here: {made.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_too_small_offload_disk_is_refused_with_sizes(small_disk: Path) -> None:
    settings = {"zero_stage": 3, "offload_dir": str(small_disk), "mixed_precision": "bf16"}
    big = JobProfile(loader_batch_size=4, samples=64, parameters=100_000)
    (problem,) = refusals(None, big, offload_optimizer="nvme", **settings)
    assert "is too small" in problem.what
    assert "needs 1.6 MB there, and 1.0 MB are free" in problem.why
    plan_of(None, big, offload_parameters="nvme", **settings)  # 2 bytes a parameter, not 16
    plan = plan_of(None, big, offload_parameters="nvme", **settings)
    own = complete(plan)["zero_optimization"]["offload_param"]["nvme_path"]  # where a restarted run writes over it
    for folder, fits in ((small_disk / "another-run", False), (Path(own), True)):
        earlier = folder / "zero_stage_3" / "bfloat16params" / "rank0"
        earlier.mkdir(parents=True)
        (earlier / "1_param.tensor.swp").write_bytes(bytes(900_000))
        if fits:
            plan_of(None, big, offload_parameters="nvme", **settings)
        else:
            assert "is too small" in refusals(None, big, offload_parameters="nvme", **settings)[0].what
            shutil.rmtree(folder)


# Where it is launched from


def test_deepspeed_launcher_environment_is_recognised() -> None:
    words = {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "8",
        "LOCAL_SIZE": "4",
        "CROSS_RANK": "1",
        "CROSS_SIZE": "2",
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "29500",
    }
    world = worker_env(words)
    assert world is not None
    assert (world.launcher, world.rank, world.local_rank, world.world_size) == ("deepspeed", 5, 1, 8)
    assert (world.local_world_size, world.node_rank, world.num_nodes) == (4, 1, 2)
    assert (world.master_addr, world.master_port) == ("node0", 29500)
