"""What the engines declare holds: each feature that one has runs on it, and each that it has not is refused by name."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from distributed import Task, Trainer
from distributed.checkpoint.restore.reading import load
from distributed.core.config import DistributedConfig
from distributed.core.engines.engine import ENGINES, features
from distributed.core.errors import PlanError
from distributed.core.registry import is_installed
from distributed.planner.hardware import Hardware
from distributed.planner.planning import JobProfile, make_plan
from distributed.testing import run_ranks
from tests.meshes import make_data, make_model

RANKS = 2
REFERENCE = "pytorch-ddp"
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
    "clip_value": {"gradient_clip_value": 0.5},
    "anomaly": {"detect_anomaly": True},
    "layerwise": {"optimizer": "lamb"},
    "buckets": {"bucket_by_length": True},
    "targets": {"loss_weighting": "targets"},
    "own_step": {},
    "several_optimizers": {},
    "manual": {},
    "closure": {},
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
    "feedback": {"compression": "topk"},
    "local_steps": {"synchronization": "local_sgd", "sync_every_n_steps": 2},
    "asynchronous": {"synchronization": "asynchronous"},
    "adasum": {"gradient_reduction": "adasum", "communication_backend": "mpi"},
    "fusion": {"fusion_threshold_mb": 1, "cycle_time_ms": 2},
    "timeline": {"timeline": "timeline.json"},
    "mpi": {"communication_backend": "mpi"},
    "config_file": {"deepspeed_config": {"zero_optimization": {"stage": 2}}},
    "cluster": {"address": "auto"},
    "parameter_server": {"tensorflow_strategy": "parameter_server"},
    "pipeline_module": {},
}
# What no setting asks for, and what two ranks of ours in one world cannot show: the test that holds each engine to it.
NATIVE = ("pytorch-ddp", "fsdp", "ray")
WHOLE = ("pytorch-ddp", "ray")  # whose ranks may hold the whole model each
GOES_ON = {
    name: "ranks/test_engine_matrix.py::test_every_engine_resumes_from_another_engines_checkpoint"
    for name, engine in ENGINES.entries.items()
    if "save" in engine.can
}
TF_REPLICAS = {"tensorflow": "e2e/test_tensorflow.py::test_two_replicas_match_one_process"}
TF_PRECISION = {"tensorflow": "e2e/test_tensorflow.py::test_mixed_precision_learns_with_parameters_in_fp32"}
ELSEWHERE: dict[str, dict[str, str]] = {
    "fp8": dict.fromkeys(NATIVE, "gpu/test_fp8_gpu.py::test_fp8_linear_layers_reach_the_loss_of_bf16"),
    "capture": dict.fromkeys(WHOLE, "gpu/test_capture_gpu.py::test_captured_and_eager_runs_end_with_the_same_weights"),
    "hybrid": dict.fromkeys(NATIVE, "ranks/test_mesh.py::test_mesh_matches_one_process"),  # four ranks
    "compile": dict.fromkeys(NATIVE, "ranks/test_compile_cache.py::test_second_process_compiles_nothing"),
    "adasum": {"horovod": "ranks/test_horovod_adasum.py::test_adasum_under_mpirun_matches_its_formula"},
    "mpi": {"horovod": "ranks/test_horovod_adasum.py::test_adasum_under_mpirun_matches_its_formula"},
    "fusion": {"horovod": "ranks/test_horovod.py::test_timeline_shows_fusion_and_cycle_time_settings"},
    "timeline": {"horovod": "ranks/test_horovod.py::test_timeline_shows_fusion_and_cycle_time_settings"},
    "save": GOES_ON,
    "load": GOES_ON,
    "accumulation": TF_REPLICAS,
    "batchnorm": TF_REPLICAS,
    "stream": TF_REPLICAS,
    "bf16": TF_PRECISION,
    "fp16": TF_PRECISION,
    "clip_value": {"tensorflow": "ranks/test_tensorflow_limits.py::test_keras_run_takes_steps_of_a_hand_written_loop"},
    "clipping": {"tensorflow": "e2e/test_tensorflow.py::test_gradient_norm_is_reported_when_clipping"},
    "parameter_server": {
        "tensorflow": "e2e/test_tensorflow_survival.py::test_killed_worker_costs_no_step_killed_server_a_checkpoint"
    },
    "pipeline_module": {"deepspeed": "ranks/test_deepspeed_pipeline.py::test_two_stages_match_one_process"},
    "cluster": {
        "ray": "e2e/test_ray.py::test_ray_ranks_train_to_the_bytes_of_local_ranks",
        "tensorflow": "e2e/test_ray_keras.py::test_keras_on_ray_survives_a_killed_worker_with_same_bytes",
    },
    "restart": {
        "pytorch-ddp": "e2e/test_survival.py::test_killing_all_ranks_resumes_from_checkpoint",
        "fsdp": "e2e/test_survival_meshes.py::test_killed_rank_of_a_mesh_resumes_with_same_bytes",
        "deepspeed": "e2e/test_survival_meshes.py::test_killed_rank_of_a_mesh_resumes_with_same_bytes",
        "horovod": "e2e/test_horovod_survival.py::test_killed_rank_with_cycle_time_resumes_from_checkpoint",
        "ray": "e2e/test_ray.py::test_killed_worker_node_and_driver_change_no_byte",
        "tensorflow": "e2e/test_tensorflow_survival.py::test_killed_worker_of_fit_restarts_with_same_bytes",
    },
    "regroup": {
        "pytorch-ddp": "e2e/test_survival.py::test_killing_each_of_two_ranks_resumes_with_same_bytes",
        "horovod": "e2e/test_horovod_survival.py::test_lost_horovod_ranks_resume_from_memory_with_same_bytes",
    },
    "own_loop": dict.fromkeys(
        ("pytorch-ddp", "fsdp"), "ranks/test_own_loop.py::test_own_loop_trains_what_one_process_does"
    ),
    "meta": dict.fromkeys(NATIVE, "ranks/test_mesh.py::test_mesh_matches_one_process"),
    "dry_run": dict.fromkeys(NATIVE, "e2e/test_cli_dry_run.py::test_dry_run_step_on_mesh_holds_its_shard"),
}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(list(make_data(16)))


class Normed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def token_loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    return nn.functional.cross_entropy(model(batch[0]), batch[1]), batch[1].numel()


def token_loss_of(model: nn.Module, batch: Any, optimizer: str) -> tuple[torch.Tensor, int]:
    return token_loss(model, batch)


def two_optimizers(model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    head = list(model.head.parameters())
    body = [parameter for name, parameter in model.named_parameters() if not name.startswith("head.")]
    return {"body": torch.optim.SGD(body, lr=0.1), "head": torch.optim.AdamW(head)}


class Manual(Task):
    manual_optimization = True

    def training_step(self, model: nn.Module, batch: Any) -> None:
        self.zero_grad()
        self.backward(*token_loss(model, batch))
        self.step()


# What of a task asks for a feature, beside the settings.
GIVEN: dict[str, dict[str, Any]] = {
    "own_step": {"training_step": token_loss},
    "several_optimizers": {"training_step": token_loss_of, "configure_optimizers": two_optimizers},
    "closure": {"loss_fn": nn.CrossEntropyLoss(), "optimizer": torch.optim.LBFGS},
    "manual": {},
}


def pad(rows: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    ids, targets = zip(*rows, strict=True)
    padded = nn.utils.rnn.pad_sequence
    return padded(list(ids), batch_first=True), padded(list(targets), batch_first=True, padding_value=-100)


def make_work(feature: str) -> tuple[nn.Module, Any]:
    if feature == "batchnorm":
        torch.manual_seed(0)  # the same data on every rank
        return Normed(), TensorDataset(torch.randn(16, 4), torch.randint(0, 3, (16,)))
    if feature == "buckets":
        rows = [(ids[: 4 + at % 3], target[: 4 + at % 3]) for at, (ids, target) in enumerate(make_data(16))]
        return make_model(), DataLoader(rows, batch_size=2, shuffle=True, collate_fn=pad)  # type: ignore[arg-type]
    return make_model(), Stream() if feature == "stream" else make_data(16)


def fit(engine: str, feature: str, folder: Path, **more: Any) -> dict[str, Any]:
    """Two steps on two ranks, through the front door; what the plan says of it."""
    model, data = make_work(feature)
    settings = {"backend": engine, "batch_size": 2, "max_steps": 2, "progress": False} | ASKED.get(feature, {}) | more
    given = GIVEN.get(feature, {"loss_fn": nn.CrossEntropyLoss()})
    task = Manual(model) if feature == "manual" else model
    trainer = Trainer(task, **given, checkpoint_dir=str(folder / feature), **settings)
    history = trainer.fit(data)
    assert history.steps == settings["max_steps"]
    return {"world_size": history.world_size, "checkpoint": history.checkpoint}


def fit_all(engine: str, features: list[str], folder: Path) -> dict[str, dict[str, Any]]:
    return {feature: fit(engine, feature, folder) for feature in features}


def is_declared(engine: str, feature: str) -> bool:
    can = ENGINES.entries[engine].can.get(feature)
    return can is not None and can.device in (None, "cpu")


def declared(engine: str) -> list[str]:
    return [
        feature
        for feature in features()
        if feature in ASKED and engine not in ELSEWHERE.get(feature, {}) and is_declared(engine, feature)
    ]


def strategy_of(engine: str) -> tuple[str, ...]:
    """What trains: an engine that only starts another one's ranks trains as that one does."""
    one = ENGINES.entries[engine]
    return one.target, one.shards, *declared(engine)


INSTALLED = [name for name, engine in ENGINES.entries.items() if is_installed(engine.needs)]
TRAINING = {strategy_of(engine): engine for engine in reversed(ENGINES.entries) if declared(engine)}


SAVING = [name for name in INSTALLED if "save" in ENGINES.entries[name].can]


def save_one(engine: str, folder: Path) -> str:
    return fit(engine, engine, folder, checkpoint_frequency="1 steps", certificate_steps=0)["checkpoint"]


def go_on(engine: str, checkpoints: dict[str, str], folder: Path) -> dict[str, str]:
    """From each engine's checkpoint one step: what this engine then saves."""
    return {
        source: fit(engine, source, folder / engine, resume_from_checkpoint=path, max_steps=3)["checkpoint"]
        for source, path in checkpoints.items()
    }


@dataclass(frozen=True)
class Ran:
    """By engine, what the runs of its features came to, and by source what it saved after it went on from there."""

    features: dict[str, dict[str, dict[str, Any]]]
    ended: dict[str, dict[str, str]]


def run_all(features: dict[str, list[str]], sources: dict[str, list[str]], folder: Path) -> Ran:
    found = {engine: fit_all(engine, names, folder / "features" / engine) for engine, names in features.items()}
    saved = {engine: save_one(engine, folder / "saved") for engine in sources}
    ended = {
        engine: go_on(engine, {name: saved[name] for name in names}, folder / "ended")
        for engine, names in sources.items()
    }
    return Ran(found, ended)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """All engines in one pair of processes, which import each of them once."""
    features = {engine: declared(engine) for engine in TRAINING.values() if engine in INSTALLED}
    sources = {engine: sources_of(engine) for engine in SAVING}
    found: Ran = run_ranks(run_all, RANKS, features, sources, tmp_path_factory.mktemp("engines"))[0]
    return found


@pytest.mark.parametrize("engine", TRAINING.values())
def test_declared_features_run_on_their_engine(engine: str, ran: Ran) -> None:
    if engine not in INSTALLED:
        pytest.skip(f"{engine} is not installed: distributed doctor says how")
    assert list(ran.features[engine]) == declared(engine)
    assert {one["world_size"] for one in ran.features[engine].values()} == {RANKS}


@pytest.mark.parametrize(
    ("engine", "feature"), [pair for pair in itertools.product(ENGINES.entries, ASKED) if not is_declared(*pair)]
)
def test_undeclared_feature_is_refused_by_the_plan(engine: str, feature: str) -> None:
    config = DistributedConfig(backend=engine, batch_size=2, **{"num_gpus": RANKS} | ASKED[feature])
    asked = {feature: f"a task with {feature}"} if feature in GIVEN else {}
    samples, stages = None if feature == "stream" else 64, RANKS if feature == "pipeline_module" else 0
    profile = JobProfile(samples=samples, has_batchnorm=feature == "batchnorm", task=asked, stages=stages)
    by = (
        "with sharding"
        if feature == "bitwise" and ENGINES.entries[engine].shards != "none"
        else f"with backend='{engine}'"
    )
    with pytest.raises(PlanError, match=by) as refused:
        make_plan(config, profile, MACHINE, run_dir="run")
    assert all(problem.why and problem.do for problem in refused.value.problems if by in problem.what)


def test_every_feature_has_a_case_here_or_a_named_test(request: pytest.FixtureRequest) -> None:
    assert set(features()) == set(ASKED) | set(ELSEWHERE)
    tests = TestNames(request.session)
    for feature, shown in ELSEWHERE.items():
        having = {name for name, engine in ENGINES.entries.items() if feature in engine.can}
        assert set(shown) == having if feature not in ASKED else set(shown) <= having, feature
        for path, _, test in (one.partition("::") for one in shown.values()):
            assert test in tests.of(path), f"{feature}: no test is collected as {path}::{test}"


class TestNames:
    """The tests that pytest collects from a file, by their names without parameters."""

    __test__ = False

    def __init__(self, session: pytest.Session) -> None:
        self._session = session
        self._found: dict[str, set[str]] = {}

    def of(self, path: str) -> set[str]:
        if path not in self._found:
            module = pytest.Module.from_parent(self._session, path=Path(__file__).parents[1] / path)
            items = (item for item in module.collect() if isinstance(item, pytest.Function))
            self._found[path] = {item.originalname for item in items}
        return self._found[path]


def sources_of(engine: str) -> list[str]:
    """Whose checkpoints an engine resumes from: the reference engine from all, the others from it and a neighbour."""
    neighbour = SAVING[(SAVING.index(engine) + 1) % len(SAVING)]
    return SAVING if engine == REFERENCE else list(dict.fromkeys([REFERENCE, neighbour]))


def assert_resumed(ended: dict[str, dict[str, str]], sources: dict[str, list[str]]) -> None:
    """One more step from the same state comes to the same weights, no matter which engine saved and which resumes."""
    assert {engine: list(paths) for engine, paths in ended.items()} == sources
    wanted = weights(ended[REFERENCE][REFERENCE])
    for engine, paths in ended.items():
        for source, path in paths.items():
            for name, value in weights(path).items():
                told = f"{source} -> {engine}: {name}"
                torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-6, msg=told)


def test_every_engine_resumes_from_another_engines_checkpoint(ran: Ran) -> None:
    assert_resumed(ran.ended, {engine: sources_of(engine) for engine in SAVING})


@pytest.mark.soak
def test_every_engine_resumes_from_every_others_checkpoint(tmp_path: Path) -> None:
    sources = dict.fromkeys(SAVING, SAVING)
    assert_resumed(run_ranks(run_all, RANKS, {}, sources, tmp_path)[0].ended, sources)


def weights(path: str) -> dict[str, torch.Tensor]:
    return load(path, ranks=()).shared["model"]
