"""A PipelineModule of DeepSpeed under our trainer: its PipelineEngine, with our batches, step and checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from distributed import DistributedError, History, Trainer
from distributed.core.config import DistributedConfig
from distributed.core.errors import PlanError
from distributed.planner.hardware import Hardware
from distributed.planner.planning import JobProfile, make_plan
from distributed.testing import run_ranks

pytest.importorskip("deepspeed")
SETTINGS: dict[str, Any] = {
    "batch_size": 8,
    "epochs": 3,
    "learning_rate": 0.02,
    "gradient_clipping": 0.5,
    "loss_weighting": "targets",
    "log_every_n_steps": 1,
    "progress": False,
}
PER_EPOCH, STEPS = 5, 15
MACHINE = Hardware(cpu_cores=2, memory_bytes=2**34)


def layers() -> list[nn.Module]:
    """The same values on every rank, whatever it keeps of them."""
    torch.manual_seed(0)
    return [nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.GELU(), nn.LayerNorm(12), nn.Linear(12, 3)]


def data(samples: int = 37) -> TensorDataset:
    """The last step of an epoch is short, and some targets do not count."""
    x = torch.randn(samples, 6, generator=torch.Generator().manual_seed(1))
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    y[::5] = -100
    return TensorDataset(x, y)


def came_to(history: History, model: nn.Module) -> dict[str, Any]:
    events = map(json.loads, Path(history.run_dir, "events.jsonl").read_text().splitlines())
    steps = [event for event in events if event["event"] == "StepEnded"]
    return {
        "losses": [event["loss"] for event in steps],
        "norms": [event["gradient_norm"] for event in steps],
        "metrics": [record.metrics for record in history.epochs],
        "weights": {name: value.detach().clone() for name, value in model.state_dict().items()},
        "checkpoint": history.checkpoint,
    }


def alone(folder: str, **options: Any) -> dict[str, Any]:
    model = nn.Sequential(*layers())
    trainer = Trainer(model, num_gpus=1, device="cpu", run_dir=folder, **SETTINGS | options)
    return came_to(trainer.fit(data(), data(10)), model)


def trainings(folder: str, checkpoint: str) -> dict[str, Any]:
    """On each of the ranks."""
    from distributed.engines.deepspeed.ops import import_deepspeed

    import_deepspeed("cpu").init_distributed(dist_backend="gloo")
    from deepspeed.pipe import PipelineModule, TiedLayerSpec

    def train(name: str, module: dict[str, Any] | None = None, **options: Any) -> Any:
        given = {"layers": layers(), "num_stages": 2, "partition_method": "uniform"} | (module or {})
        model = PipelineModule(**given)
        trainer = Trainer(model, run_dir=f"{folder}/{name}", **SETTINGS | options)
        return came_to(trainer.fit(data(), data(10)), model)

    def refusal(**given: Any) -> str:
        try:
            train("refused", **given)
        except DistributedError as error:
            return str(error)
        return "it went through"

    def tied() -> Any:
        return TiedLayerSpec("twin", nn.Linear, 6, 6)

    found = {"whole": train("whole", checkpoint_dir=f"{folder}/whole")}
    train("stopped", max_steps=7, checkpoint_dir=f"{folder}/saved")
    found["resumed"] = train("resumed", checkpoint_dir=f"{folder}/saved", resume_from_checkpoint=True)
    found["continued"] = train("continued", checkpoint_dir=f"{folder}/more", resume_from_checkpoint=checkpoint)
    own = {"layers": layers(), "loss_fn": nn.CrossEntropyLoss()}
    found["own loss"] = train("own", own, backend="deepspeed", max_steps=2)
    found["refused"] = {
        "tied": refusal(module={"layers": [tied(), nn.Tanh(), nn.Tanh(), tied(), nn.Linear(6, 3)]}),
        "one stage": refusal(module={"num_stages": 1}),
        "low precision": refusal(mixed_precision="bf16"),
        "other engine": refusal(backend="pytorch-ddp"),
        "other stages": refusal(pipeline_parallel=4),
        "ZeRO": refusal(zero_stage=1),
    }
    return found


def replicas(folder: str) -> dict[str, Any]:
    """On each of four ranks: two stages, twice."""
    from distributed.engines.deepspeed.ops import import_deepspeed

    import_deepspeed("cpu").init_distributed(dist_backend="gloo")
    from deepspeed.pipe import PipelineModule

    model = PipelineModule(layers(), num_stages=2, partition_method="uniform")
    trainer = Trainer(model, run_dir=f"{folder}/run", **SETTINGS | {"batch_size": 4})
    return came_to(trainer.fit(data(), data(10)), model)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What each of two stages came to, and one process with the same layers."""
    folder = tmp_path_factory.mktemp("pipeline")
    one = alone(str(folder / "one"))
    stopped = alone(str(folder / "stopped-alone"), max_steps=7)
    return run_ranks(trainings, 2, str(folder), stopped["checkpoint"]), one


Found = tuple[list[dict[str, Any]], dict[str, Any]]


def weights_of(found: Found, name: str) -> dict[str, torch.Tensor]:
    """Of both stages, neither of which has those of the other."""
    first, second = (rank[name]["weights"] for rank in found[0])
    assert not set(first) & set(second)
    return first | second


def test_two_stages_match_one_process(found: Found) -> None:
    one, whole = found[1], found[0][0]["whole"]
    assert len(one["losses"]) == STEPS
    assert whole["losses"] == pytest.approx(one["losses"], abs=1e-5)
    assert whole["norms"] == pytest.approx(one["norms"], abs=1e-4)
    for mine, expected in zip(whole["metrics"], one["metrics"], strict=True):
        assert mine == pytest.approx(expected, abs=1e-5)
    weights = weights_of(found, "whole")
    assert set(weights) == set(one["weights"])
    for name, value in one["weights"].items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-5)


@pytest.mark.soak  # four processes
def test_replicas_of_two_stages_match_one_process(found: Found, tmp_path: Path) -> None:
    ranks = run_ranks(replicas, 4, str(tmp_path))
    assert ranks[0]["losses"] == pytest.approx(found[1]["losses"], abs=1e-5)
    assert ranks[0]["norms"] == pytest.approx(found[1]["norms"], abs=1e-4)
    weights = ranks[0]["weights"] | ranks[2]["weights"]
    for name, value in found[1]["weights"].items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-5)
    for one, other in ((0, 1), (2, 3)):
        assert all(torch.equal(ranks[other]["weights"][n], value) for n, value in ranks[one]["weights"].items())


def test_stopped_pipeline_resumes_with_same_bytes(found: Found) -> None:
    """In the middle of an epoch."""
    whole, resumed = weights_of(found, "whole"), weights_of(found, "resumed")
    assert found[0][0]["resumed"]["losses"] == found[0][0]["whole"]["losses"][7:]
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())


def test_pipeline_resumes_a_checkpoint_of_one_process(found: Found) -> None:
    assert found[0][0]["continued"]["losses"] == pytest.approx(found[1]["losses"][7:], abs=1e-5)


def test_one_process_resumes_a_checkpoint_of_the_pipeline(found: Found, tmp_path: Path) -> None:
    checkpoint = found[0][0]["whole"]["checkpoint"]
    more = alone(str(tmp_path), epochs=4, resume_from_checkpoint=checkpoint)
    longer = alone(str(tmp_path / "longer"), epochs=4)
    assert more["losses"] == pytest.approx(longer["losses"][STEPS:], abs=1e-4)


def test_loss_of_the_module_is_trained_with(found: Found) -> None:
    assert found[0][0]["own loss"]["losses"] == pytest.approx(found[1]["losses"][:2], abs=1e-5)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("tied", ("'twin' of the PipelineModule is tied", "nn.Sequential")),
        ("one stage", ("a PipelineModule of DeepSpeed with one stage",)),
        ("low precision", ("mixed_precision with a PipelineModule",)),
        ("other engine", ("a PipelineModule with backend='pytorch-ddp'", "backend='deepspeed'")),
        ("other stages", ("pipeline_parallel=4", "the model has 2 stages")),
        ("ZeRO", ("zero_stage with a PipelineModule",)),
    ],
)
def test_what_the_pipeline_cannot_is_refused_by_name(case: str, words: tuple[str, ...], found: Found) -> None:
    for word in words:
        assert word in found[0][0]["refused"][case]


def test_pipeline_parallel_without_a_pipeline_module_is_refused() -> None:
    config = DistributedConfig(backend="deepspeed", pipeline_parallel=2, num_gpus=2, batch_size=4)
    with pytest.raises(PlanError, match="pipeline_parallel=2 with backend='deepspeed'"):
        make_plan(config, JobProfile(samples=8), MACHINE, run_dir="x")
