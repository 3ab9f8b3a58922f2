"""What the engines declare holds: each feature that one has runs on it, and each that it has not is refused by name."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from distributed import Trainer
from distributed.checkpoint.reading import load
from distributed.core.config import DistributedConfig
from distributed.core.engines import ENGINES, FEATURES
from distributed.core.errors import PlanError
from distributed.core.registry import is_installed
from distributed.planner.hardware import Hardware
from distributed.planner.planning import JobProfile, make_plan
from distributed.testing import run_ranks
from tests.meshes import make_data, make_model

RANKS = 2
MACHINE = Hardware(cpu_cores=2, memory_bytes=2**34, gpus=())
# How a user asks for each feature.
ASKED: dict[str, dict[str, Any]] = {
    "bf16": {"mixed_precision": "bf16"},
    "fp16": {"mixed_precision": "fp16", "scaler_init_scale": 128.0},
    "fp8": {"mixed_precision": "fp8"},
    "bf16_parameters": {"bf16_parameters": True},
    "capture": {"capture": True},
    "accumulation": {"gradient_accumulation_steps": 2},
    "clipping": {"gradient_clipping": 0.5},
    "targets": {"loss_weighting": "targets"},
    "stream": {},
    "batchnorm": {},
    "zero1": {"zero_stage": 1},
    "zero2": {"zero_stage": 2},
    "zero3": {"zero_stage": 3},
    "hybrid": {"sharding": "hybrid", "shard_groups": 2, "num_gpus": 4},
    "cpu_offload": {"cpu_offload": True, "zero_stage": 3},
    "offload_optimizer": {"offload_optimizer": "cpu", "zero_stage": 2},
    "offload_parameters": {"offload_parameters": "cpu", "zero_stage": 3},
    "tensor": {"tensor_parallel": 2},
    "pipeline": {"pipeline_parallel": 2},
    "context": {"context_parallel": 2},
    "recompute": {"activation_checkpointing": True},
    "compile": {"compile": True},
    "lora": {"lora": 4},
    "bitwise": {"reproducible": "bitwise", "virtual_ranks": 2},
    "unused": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "compression": {"compression": "fp16"},
    "adasum": {"gradient_reduction": "adasum", "communication_backend": "mpi"},
    "fusion": {"fusion_threshold_mb": 1, "cycle_time_ms": 2},
    "timeline": {"timeline": "timeline.json"},
    "mpi": {"communication_backend": "mpi"},
    "config_file": {"deepspeed_config": {"zero_optimization": {"stage": 2}}},
    "cluster": {"address": "auto"},
    "parameter_server": {"tensorflow_strategy": "parameter_server"},
}
# What no setting asks for, and what two ranks of ours in one world cannot show: the test that holds each engine to it.
NATIVE = ("pytorch-ddp", "fsdp", "ray")
WHOLE = ("pytorch-ddp", "ray")  # whose ranks may hold the whole model each
GOES_ON = {
    name: "ranks/test_engine_matrix.py::test_every_engine_goes_on_from_every_others"
    for name, engine in ENGINES.entries.items()
    if "save" in engine.can
}
TF_REPLICAS = {"tensorflow": "e2e/test_tensorflow.py::test_two_replicas_train_what_one_process_trains"}
TF_PRECISION = {"tensorflow": "e2e/test_tensorflow.py::test_mixed_precision_learns_with_parameters_in_fp32"}
ELSEWHERE: dict[str, dict[str, str]] = {
    "fp8": dict.fromkeys(WHOLE, "gpu/test_fp8_gpu.py::test_linear_layers_train_as_in_bf16"),
    "capture": dict.fromkeys(WHOLE, "gpu/test_capture_gpu.py::test_captured_and_eager_runs_end_with_the_same_weights"),
    "hybrid": dict.fromkeys(NATIVE, "ranks/test_mesh.py::test_it_trains_what_one_process_trains"),  # four ranks
    "compile": dict.fromkeys(NATIVE, "unit/test_strategies_recompute.py::test_a_compiled_model_trains_as_before"),
    "adasum": {"horovod": "ranks/test_horovod_adasum.py::test_adasum_under_mpirun_is_its_formula"},
    "mpi": {"horovod": "ranks/test_horovod_adasum.py::test_adasum_under_mpirun_is_its_formula"},
    "fusion": {"horovod": "ranks/test_horovod.py::test_the_timeline_is_valid_and_shows_what_the_knobs_do"},
    "timeline": {"horovod": "ranks/test_horovod.py::test_the_timeline_is_valid_and_shows_what_the_knobs_do"},
    "save": GOES_ON,
    "load": GOES_ON,
    "accumulation": TF_REPLICAS,
    "batchnorm": TF_REPLICAS,
    "stream": TF_REPLICAS,
    "bf16": TF_PRECISION,
    "fp16": TF_PRECISION,
    "clipping": {"tensorflow": "e2e/test_tensorflow.py::test_gradients_are_clipped_and_their_norm_is_told"},
    "parameter_server": {"tensorflow": "e2e/test_tensorflow_survival.py::test_a_parameter_server_survives_a_worker"},
    "cluster": {"ray": "e2e/test_ray.py::test_ranks_that_ray_places_train_as_those_of_this_machine"},
    "restart": {
        "pytorch-ddp": "e2e/test_survival.py::test_all_ranks_are_killed_at_once",
        "fsdp": "e2e/test_survival_meshes.py::test_a_rank_of_a_mesh_is_killed",
        "deepspeed": "e2e/test_survival_meshes.py::test_a_rank_of_a_mesh_is_killed",
        "horovod": "e2e/test_horovod_survival.py::test_with_a_cycle_time_set_a_run_goes_on_from_the_checkpoint",
        "ray": "e2e/test_ray.py::test_a_killed_worker_and_a_killed_node_change_no_byte",
        "tensorflow": "e2e/test_tensorflow_survival.py::test_a_killed_worker_of_fit_is_started_again",
    },
    "regroup": {
        "pytorch-ddp": "e2e/test_survival.py::test_each_of_two_ranks_is_killed",
        "horovod": "e2e/test_horovod_survival.py::test_each_of_two_ranks_is_lost",
    },
    "meta": dict.fromkeys(NATIVE, "ranks/test_mesh.py::test_it_trains_what_one_process_trains"),
    "dry_run": dict.fromkeys(NATIVE, "e2e/test_cli_dry_run.py::test_a_step_on_a_mesh"),
}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(list(make_data(16)))


class Normed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def make_work(feature: str) -> tuple[nn.Module, Any]:
    if feature == "batchnorm":
        torch.manual_seed(0)  # the same data on every rank
        return Normed(), TensorDataset(torch.randn(16, 4), torch.randint(0, 3, (16,)))
    return make_model(), Stream() if feature == "stream" else make_data(16)


def fit(engine: str, feature: str, folder: Path, **more: Any) -> dict[str, Any]:
    """Two steps on two ranks, through the front door; what the plan says of it."""
    model, data = make_work(feature)
    settings = {"backend": engine, "batch_size": 2, "max_steps": 2, "progress": False} | ASKED.get(feature, {}) | more
    trainer = Trainer(model, loss_fn=nn.CrossEntropyLoss(), checkpoint_dir=str(folder / feature), **settings)
    history = trainer.fit(data)
    assert history.steps == settings["max_steps"]
    return {"world_size": history.world_size, "checkpoint": history.checkpoint}


def fit_all(engine: str, features: list[str], folder: Path) -> dict[str, dict[str, Any]]:
    return {feature: fit(engine, feature, folder) for feature in features}


def is_declared(engine: str, feature: str) -> bool:
    can = ENGINES.entries[engine].can.get(feature)
    return can is not None and can.device in ("", "cpu")


def declared(engine: str) -> list[str]:
    return [
        feature
        for feature in FEATURES
        if feature in ASKED and engine not in ELSEWHERE.get(feature, {}) and is_declared(engine, feature)
    ]


def strategy_of(engine: str) -> tuple[str, ...]:
    """What trains: an engine that only starts another one's ranks trains as that one does."""
    one = ENGINES.entries[engine]
    return one.target, one.shards, *declared(engine)


INSTALLED = [name for name, engine in ENGINES.entries.items() if is_installed(engine.needs)]
TRAINING = {strategy_of(engine): engine for engine in reversed(ENGINES.entries) if declared(engine)}


@pytest.mark.parametrize("engine", TRAINING.values())
def test_what_an_engine_declares_runs_on_it(engine: str, tmp_path: Path) -> None:
    if engine not in INSTALLED:
        pytest.skip(f"{engine} is not installed: distributed doctor says how")
    features = declared(engine)
    found = run_ranks(fit_all, RANKS, engine, features, tmp_path)[0]
    assert list(found) == features
    assert {one["world_size"] for one in found.values()} == {RANKS}


@pytest.mark.parametrize(
    ("engine", "feature"), [pair for pair in itertools.product(ENGINES.entries, ASKED) if not is_declared(*pair)]
)
def test_what_an_engine_does_not_declare_is_refused(engine: str, feature: str) -> None:
    config = DistributedConfig(backend=engine, batch_size=2, **{"num_gpus": RANKS} | ASKED[feature])
    profile = JobProfile(samples=None if feature == "stream" else 64, has_batchnorm=feature == "batchnorm")
    by = (
        "with sharding"
        if feature == "bitwise" and ENGINES.entries[engine].shards != "none"
        else f"with backend='{engine}'"
    )
    with pytest.raises(PlanError, match=by) as refused:
        make_plan(config, profile, MACHINE, run_dir="run")
    assert all(problem.why and problem.do for problem in refused.value.problems if by in problem.what)


def test_every_feature_is_asked_for_here_or_held_to_a_run_elsewhere() -> None:
    assert set(FEATURES) == set(ASKED) | set(ELSEWHERE)
    for feature, shown in ELSEWHERE.items():
        having = {name for name, engine in ENGINES.entries.items() if feature in engine.can}
        assert set(shown) == having if feature not in ASKED else set(shown) <= having, feature
        for path, _, test in (one.partition("::") for one in shown.values()):
            assert f"def {test}" in (Path(__file__).parents[1] / path).read_text(), f"{feature}: {path}::{test}"


def save_one(engine: str, folder: Path) -> str:
    return fit(engine, engine, folder, checkpoint_frequency="1 steps", certificate_steps=0)["checkpoint"]


def go_on(engine: str, checkpoints: dict[str, str], folder: Path) -> dict[str, str]:
    """From each engine's checkpoint, without a step: what this engine then saves."""
    return {
        source: fit(engine, source, folder / engine, resume_from_checkpoint=path, max_steps=3)["checkpoint"]
        for source, path in checkpoints.items()
    }


def test_every_engine_goes_on_from_every_others_checkpoint(tmp_path: Path) -> None:
    """One more step from the same state comes to the same weights, whoever wrote it and whoever goes on."""
    engines = [name for name in INSTALLED if "save" in ENGINES.entries[name].can]
    saved = {engine: run_ranks(save_one, RANKS, engine, tmp_path)[0] for engine in engines}
    ended = {engine: run_ranks(go_on, RANKS, engine, saved, tmp_path)[0] for engine in engines}
    wanted = weights(ended["pytorch-ddp"]["pytorch-ddp"])
    for engine, sources in ended.items():
        for source, path in sources.items():
            for name, value in weights(path).items():
                told = f"{source} -> {engine}: {name}"
                torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-6, msg=told)


def weights(path: str) -> dict[str, torch.Tensor]:
    return load(path, ranks=()).shared["model"]
