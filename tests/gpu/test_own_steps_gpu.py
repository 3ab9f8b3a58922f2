"""What users bring on NCCL: own steps, also as CUDA graphs, optimizers, averages, and modules of other trainers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from distributed import Task, Trainer
from tests.gpu.worlds import SHARED, Job, result, run_jobs
from tests.own_steps import assert_same
from tests.ranks import test_adapter_lightning as adapter
from tests.ranks import test_callback_library as callbacks
from tests.ranks import test_layerwise_optimizers as layerwise
from tests.ranks import test_own_optimization as optimization
from tests.ranks import test_own_step as steps

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

WAYS = [
    (name, step)
    for name, way in steps.WAYS.items()
    for step in way.steps
    if way.ranks in (2, 4) and way.settings.get("backend") not in ("deepspeed", "horovod") and way.low is None
    if name != "bitwise"  # cross entropy of sequences has no deterministic kernel on a GPU, and is refused
]
MESHES = {
    ranks: {name: settings for name, settings in meshes.items() if settings.get("backend") != "horovod"}
    for ranks, meshes in layerwise.MESHES.items()
    if ranks in (2, 4)
}


def own_step(way: str, step: str, folder: Path) -> Any:
    given = steps.WAYS[way]
    accumulation = given.settings.get("gradient_accumulation_steps", 1)
    size = -(-steps.GLOBAL_BATCH // (given.data_ranks or given.ranks) // accumulation)
    settings: dict[str, Any] = {**SHARED, "batch_size": size, **given.settings}
    return steps.train(steps.STEPS[step], str(folder / f"{way}-{step}"), steps.SAMPLES, **settings)


def own_optimization(name: str, ranks: int, folder: Path) -> Any:
    return optimization.train(optimization.CASES[name], ranks, str(folder / name), **SHARED)


def layerwise_weights(kind: str, ranks: int, mesh: str, folder: Path) -> dict[str, torch.Tensor]:
    path = layerwise.train(kind, ranks, MESHES[ranks][mesh], str(folder / f"{kind}-{mesh}"), **SHARED)
    found: dict[str, torch.Tensor] = layerwise.load(path, ranks=()).shared["model"]
    return found


def averages(folder: Path) -> dict[str, Any]:
    found = callbacks.fit_all(str(folder / "averages"), 2, **SHARED)
    return {name: [tuple(map(on_host, run)) for run in runs] for name, runs in found.items()}


def on_host(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.cpu() for name, value in state.items()}


def averages_of_meshes(folder: Path, names: tuple[str, ...]) -> dict[str, Any]:
    return callbacks.fit_meshes(str(folder / "meshes"), names, **SHARED)


def lightning_modules(folder: Path) -> dict[str, Any]:
    found = adapter.on_ranks(str(folder / "lightning"), [None, "full"], **SHARED)
    return {name: (weights.cpu(), metrics) for name, (weights, metrics) in found.items()}


def kinds_of(mesh: str) -> list[str]:
    return [kind for kind, names in (("lars", layerwise.OF_LARS), ("lamb", layerwise.OF_LAMB)) if mesh in names]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("own")
    by_ranks: dict[int, dict[str, Any]] = {}
    for ranks in (2, 4):
        jobs: dict[str, Job] = {
            f"{way} {step}": (own_step, (way, step, folder)) for way, step in WAYS if steps.WAYS[way].ranks == ranks
        }
        for mesh in MESHES[ranks]:
            jobs |= {f"{kind} {mesh}": (layerwise_weights, (kind, ranks, mesh, folder)) for kind in kinds_of(mesh)}
        if ranks == 2:
            jobs |= {name: (own_optimization, (name, ranks, folder)) for name in optimization.CASES}
            jobs |= {"averages": (averages, (folder,)), "lightning": (lightning_modules, (folder,))}
        meshes = callbacks.TWO if ranks == 2 else ("pp_tp", "hybrid")
        jobs["averages of meshes"] = (averages_of_meshes, (folder, meshes))
        by_ranks[ranks] = run_jobs(ranks, jobs)[0]
    return by_ranks


@pytest.mark.parametrize(("way", "step"), WAYS)
def test_own_step_on_nccl_matches_one_process(way: str, step: str, found: dict[int, dict[str, Any]]) -> None:
    one = steps.WAYS[way]
    ranks = one.data_ranks or one.ranks
    wanted = steps.by_hand(steps.BY_HAND[step], samples=steps.SAMPLES, batch=-(-steps.GLOBAL_BATCH // ranks) * ranks)
    assert_same(result(found[one.ranks], f"{way} {step}"), wanted, 1e-5)


@pytest.mark.parametrize("name", optimization.CASES)
def test_own_optimization_on_nccl_matches_a_plain_loop(name: str, found: dict[int, dict[str, Any]]) -> None:
    assert_same(result(found[2], name), optimization.by_hand(optimization.CASES[name]), 1e-9)


@pytest.mark.parametrize(("ranks", "mesh"), [(ranks, mesh) for ranks, meshes in MESHES.items() for mesh in meshes])
def test_layerwise_norms_on_nccl_are_of_whole_parameters(
    ranks: int, mesh: str, found: dict[int, dict[str, Any]]
) -> None:
    options = {"lamb": layerwise.LAMB_OPTIONS, "lars": layerwise.LARS_OPTIONS}
    for kind in kinds_of(mesh):
        expected = layerwise.by_hand(layerwise.references(kind, **options[kind]))
        assert layerwise.differ(result(found[ranks], f"{kind} {mesh}"), expected) < 1e-12


def test_averages_and_freezing_on_nccl_match_hand_written_loops(found: dict[int, dict[str, Any]]) -> None:
    for name, (whole, again) in result(found[2], "averages").items():
        for mine, resumed, expected in zip(whole, again, callbacks.CASES[name][0](), strict=True):
            assert callbacks.worst(mine, expected) < 1e-9, name
            assert callbacks.worst(mine, resumed) == 0.0, f"{name} resumed has the same bytes"


@pytest.mark.parametrize("ranks", [2, 4])
def test_averages_of_meshes_on_nccl_go_on_under_the_next(ranks: int, found: dict[int, dict[str, Any]]) -> None:
    callbacks.assert_averages(result(found[ranks], "averages of meshes"), 1e-5)


def test_lightning_modules_on_nccl_train_to_one_process_numbers(
    found: dict[int, dict[str, Any]], tmp_path: Path
) -> None:
    for case, (trained, metrics) in result(found[2], "lightning").items():
        kind, _, settings = adapter.CASES[case.partition("-")[0]]
        module, expected = adapter.by_us(kind, str(tmp_path / case), device="cpu", **settings)
        assert torch.allclose(trained, adapter.weights(module), rtol=0, atol=1e-8), case
        for name in expected.keys() - {"val/margin"}:  # which is no mean over samples
            assert metrics[name] == pytest.approx(expected[name], abs=1e-6), (case, name)


# ---- own steps as CUDA graphs

CAPTURED = "one CUDA graph from here on"


class Observed(Task):
    """Logs a tensor, and a mean over some of the samples, from inside of its step."""

    def training_step(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        x, target = batch
        logits = model(x)
        losses = F.cross_entropy(logits, target, reduction="none")
        self.log("spread", logits.square().mean())
        self.log("first", (losses * (target == 0)).sum() / (target == 0).sum().clamp(min=1), weight=(target == 0).sum())
        return {"loss": losses.mean(), "largest": logits.max(1).values.mean()}


class Counted(Task):
    """Its loss depends on how many steps it has taken, which a graph would not count."""

    steps = 0

    def training_step(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, target = batch
        self.steps += 1
        self.log("steps", float(self.steps))
        return F.cross_entropy(model(x), target) / (1 + 0.01 * self.steps)

    def state(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def rows() -> TensorDataset:
    x = torch.randn(1000, 32, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long())


def fit(kind: type[Task], folder: Path, **settings: Any) -> tuple[list[dict[str, Any]], torch.Tensor, bool]:
    """The numbers of each logged step, the weights, and whether steps were a graph."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
    options: dict[str, Any] = {"num_gpus": 1, "batch_size": 32, "epochs": 3, "tf32": False} | settings
    trainer = Trainer(
        kind(model, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9)),
        log_every_n_steps=5,
        progress=False,
        run_dir=str(folder),
        **options,
    )
    trainer.fit(DataLoader(rows(), batch_size=options["batch_size"], shuffle=True))
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    logged = [{"loss": e["loss"], **e["metrics"]} for e in events if e["event"] == "StepEnded"]
    is_captured = any(CAPTURED in event["message"] for event in events if event["event"] == "Warned")
    return logged, torch.cat([value.flatten().cpu() for value in trainer.model.state_dict().values()]), is_captured


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", [Observed, Counted])
def test_own_step_as_a_graph_logs_what_it_does_eagerly(kind: type[Task], ranks: int, tmp_path: Path) -> None:
    shared: dict[str, Any] = {"share_gpus": torch.cuda.device_count() < 2, "num_gpus": 2} if ranks == 2 else {}
    eager, wanted, _ = fit(kind, tmp_path / "eager", capture=False)
    capture = True if kind is Observed else "auto"
    again, weights, is_captured = fit(kind, tmp_path / "again", capture=capture, batch_size=32 // ranks, **shared)
    assert again == [pytest.approx(step, rel=1e-4, abs=1e-5) for step in eager]
    torch.testing.assert_close(weights, wanted, rtol=1e-4, atol=1e-5)
    assert is_captured == (kind is Observed)
