"""plan.json and config.json: one schema each, read back as they were written, refused in another version."""

from __future__ import annotations

import hashlib
import json
from dataclasses import is_dataclass, make_dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

from distributed.core.config import DistributedConfig
from distributed.core.documents.run_config import CONFIG_VERSION, RunConfig
from distributed.core.engines.engine import ENGINES
from distributed.core.errors import ConfigError
from distributed.core.plan import PLAN_VERSION, Decision, Plan
from distributed.planner.hardware import Gpu, Hardware
from distributed.planner.planning import JobProfile, make_plan

MESHES: list[dict[str, Any]] = [
    {},
    {"sharding": "full"},
    {"sharding": "grad_op", "wrap_blocks": ["Block"]},
    {"sharding": "hybrid", "shard_groups": 2},
    {"zero_stage": 1},
    {"tensor_parallel": 2, "tensor_parallel_plan": {"layers.*": "colwise"}, "sequence_parallel": True},
    {"pipeline_parallel": 2, "pipeline_schedule": "gpipe"},
    {"context_parallel": 2, "sharding": "full"},
    {"reproducible": "bitwise"},
    {"lora": {"rank": 4, "targets": ["q", "v"]}, "save_adapters_only": True},
    {"activation_checkpointing": 2, "compile": "max-autotune", "mixed_precision": "fp16"},
    {"mlflow_experiment": "e", "checkpoint_dir": "c", "checkpoint_frequency": "1.5 minutes", "keep_last": 3},
    {"keep_best": "val_loss", "keep_best_k": 2, "keep_last": 1, "checkpoint_dir": "c", "warmup_epochs": 1},
    {"allow_change": "seed, data", "resume_from_checkpoint": True, "num_workers": "auto", "gradient_clipping": 1},
]
FIELDS = {Plan: (5, "8e134d2ec673"), RunConfig: (1, "0a5d3ef82f78")}  # version, and digest of what it stands for
GPUS = Hardware(cpu_cores=8, gpus=(Gpu("GPU", compute_capability=9.0),) * 8)
PROFILE = JobProfile(loader_batch_size=32, samples=4096, parameters=10**6, has_blocks=True)


def plan(hardware: Hardware = GPUS, **settings: Any) -> Plan:
    return make_plan(DistributedConfig(num_gpus=8, **settings), PROFILE, hardware, run_dir="runs/a")


def read_back(before: Plan) -> Plan:
    return Plan.from_json(before.to_json())


@pytest.mark.parametrize("settings", MESHES, ids=str)
@pytest.mark.parametrize("hardware", [Hardware(cpu_cores=8), GPUS], ids=["cpu", "gpu"])
def test_plan_of_any_mesh_is_read_back(settings: dict[str, Any], hardware: Hardware) -> None:
    before = plan(hardware, **settings)
    assert read_back(before) == before


@pytest.mark.parametrize("engine", ENGINES.entries)
def test_plan_of_any_engine_is_read_back(engine: str) -> None:
    before = plan(Hardware(cpu_cores=8), backend=engine)
    assert before.strategy == engine
    assert read_back(before) == before
    smaller = before.for_world(4, 1).with_decisions(Decision("4 ranks", "one was lost"))
    assert read_back(smaller) == smaller


def test_plan_of_another_version_is_refused() -> None:
    content = json.loads(plan().to_json())
    with pytest.raises(ConfigError, match="schema version 99, and this release reads 5") as refused:
        Plan.from_json(json.dumps(content | {"schema_version": 99}))
    assert "the release that wrote it" in refused.value.problems[0].do
    del content["schema_version"]
    with pytest.raises(ConfigError, match="older release"):
        Plan.from_json(json.dumps(content))


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("shard", "kind"), "half", "shard.kind='half'"),
        (("batch", "per_device"), "8", "batch.per_device='8'"),
        (("mesh", "ep"), 2, "mesh.ep is unknown"),
        (("decisions",), [{"choice": "a"}], "decisions[0].override is missing"),
        (("mesh", "tp"), 0, "mesh axis tp has size 0"),
    ],
)
def test_plan_with_bad_or_unknown_field_is_refused(path: tuple[str, ...], value: Any, said: str) -> None:
    content = json.loads(plan().to_json())
    inner = content
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    with pytest.raises(ConfigError) as refused:
        Plan.from_json(json.dumps(content))
    assert said in str(refused.value)


def field_tree(kind: Any) -> Any:
    """The fields of a dataclass and all that it holds, by name and type. What a choice may be is left out: a value
    that this release does not know is refused when it is read."""
    if is_dataclass(kind):
        return {name: field_tree(hint) for name, hint in get_type_hints(kind).items()}
    if get_origin(kind) is Literal:
        return "choice"
    name = (
        "Union" if get_origin(kind) in (Union, UnionType) else getattr(get_origin(kind) or kind, "__name__", str(kind))
    )
    return [name, *map(field_tree, get_args(kind))]


def digest(kind: type) -> str:
    return hashlib.sha256(json.dumps(field_tree(kind)).encode()).hexdigest()[:12]


@pytest.mark.parametrize(
    ("kind", "version", "name"), [(Plan, PLAN_VERSION, "PLAN_VERSION"), (RunConfig, CONFIG_VERSION, "CONFIG_VERSION")]
)
def test_changed_fields_have_another_version(kind: type, version: int, name: str) -> None:
    assert (version, digest(kind)) == FIELDS[kind], (
        f"the fields of {kind.__name__} changed: raise {name}, and enter both here"
    )


def test_any_changed_field_changes_the_digest() -> None:
    inner = make_dataclass("Inner", [("size", int)])
    before = digest(make_dataclass("Outer", [("parts", tuple[inner, ...]), ("name", str | None)]))  # type: ignore[valid-type]
    for inner in (
        make_dataclass("Inner", [("length", int)]),
        make_dataclass("Inner", [("size", float)]),
        make_dataclass("Inner", [("size", int), ("more", int)]),
    ):
        assert digest(make_dataclass("Outer", [("parts", tuple[inner, ...]), ("name", str | None)])) != before  # type: ignore[valid-type]


def test_config_is_read_back_with_its_sources(tmp_path: Path) -> None:
    config = DistributedConfig(_sources={"num_gpus": "run.yaml:3", "epochs": "command line"}, num_gpus=2, epochs=3)
    RunConfig.of(config, ["train.py", "--fast"]).write(tmp_path)
    read = RunConfig.read(tmp_path)
    assert (read.script, read.arguments) == ("train.py", ("--fast",))
    assert read.config == config
    assert (read.config.source("num_gpus"), read.config.source("epochs")) == ("run.yaml:3", "command line")


def test_config_holds_no_secrets(tmp_path: Path) -> None:
    config = DistributedConfig(mlflow_tracking_uri="https://me:pw@host", mlflow_tracking=True)
    RunConfig.of(config, ["train.py", "--token", "abc"]).write(tmp_path)
    read = RunConfig.read(tmp_path)
    assert read.arguments == ("--token", "***")
    assert read.settings["mlflow_tracking_uri"].value == "https://me:***@host"


def test_config_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_gpus": 2}))
    with pytest.raises(ConfigError, match="older release"):
        RunConfig.read(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        RunConfig.read(tmp_path / "none")


def test_decisions_before_and_after_a_plan_are_kept_in_order() -> None:
    made = replace(plan(), decisions=(Decision("b", ""),))
    told = made.with_decisions(Decision("c", ""), first=[Decision("a", "")]).decisions
    assert [decision.choice for decision in told] == ["a", "b", "c"]
