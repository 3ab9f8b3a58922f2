"""What surrounds the steps of a run on NCCL: loss weights, the certificate, the replica check, the whole model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from distributed import Trainer
from distributed.checkpoint.format.tree import flatten
from distributed.checkpoint.restore.reading import load
from distributed.core.errors import TaskError
from tests.gpu.worlds import ALONE, SHARED, Job, result, run_jobs
from tests.meshes import MESHES, make_data, make_model
from tests.ranks import test_loss_weights as weights
from tests.ranks import test_mesh_more as more
from tests.ranks import test_model_after_fit as model_after_fit
from tests.ranks import test_replica_check as replicas

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

WEIGHTED = [way for way in weights.WAYS if way not in ("deepspeed", "horovod")]
WORKS = {
    more.masked: ("ddp", "cp", "pp"),
    more.normed: ("ddp", "fsdp_grad_op"),
    more.grouped: ("pp", "zero1", "fsdp_grad_op"),
    more.few: ("ddp", "cp"),
}
WORK_PAIRS = [(make.__name__, mesh) for make, meshes in WORKS.items() for mesh in meshes]
RESUMED: dict[str, dict[str, Any]] = {
    "ddp": {"mixed_precision": "fp16", "scaler_init_scale": 1024.0},
    "fsdp_grad_op": {"mixed_precision": "bf16"},
    "zero1": {},
    "tp": {},
    "pp": {},
}


class Dropped(nn.Module):
    """Draws on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.dropout = make_model(), nn.Dropout(0.1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.inner(ids).transpose(1, 2)).transpose(1, 2)


def weigh(way: str, folder: Path) -> list[float]:
    kind, function, settings = weights.WAYS[way]
    return weights.fit(kind, folder / way.replace("/", "-"), function, **SHARED, **settings)


def refuse(way: str, folder: Path) -> str:
    kind, function, settings, _ = weights.REFUSED[way]
    with pytest.raises(TaskError) as refused:
        weights.fit(kind, folder / f"refused {way}", function, **SHARED, **settings)
    return str(refused.value)


def work(make: Any, mesh: str, folder: Path, settings: dict[str, Any]) -> more.Trained:
    given: more.Work = make()
    found = more.train(mesh, given._replace(settings=given.settings | settings), folder / f"{make.__name__}-{mesh}")
    return found._replace(buffers={name: buffer.cpu() for name, buffer in found.buffers.items()})


def resume(mesh: str, folder: Path) -> tuple[list[str], list[dict[str, Any]]]:
    """A run, and one that goes on from the middle of it: which tensors differ at the end, and the certificate."""
    ended = []
    for name, before in (
        ("whole", {}),
        ("again", {"resume_from_checkpoint": str(folder / mesh / "whole/step-000004")}),
    ):
        model = make_model() if mesh == "pp" else Dropped()
        options = MESHES[mesh].all_settings() | SHARED | RESUMED[mesh] | before
        trainer = Trainer(
            model,
            loss_fn=nn.CrossEntropyLoss(),
            run_dir=str(folder / mesh / f"run-{name}"),
            checkpoint_dir=str(folder / mesh / name),
            checkpoint_frequency="4 steps",
            max_steps=9,
            progress=False,
            **options,
        )
        history = trainer.fit(DataLoader(make_data(), shuffle=True, batch_size=4))
        ended.append(flatten(load(history.checkpoint, ranks=()).shared)[0])
    events = (Path(history.run_dir) / "events.jsonl").read_text().splitlines()
    compared = [event for event in map(json.loads, events) if event["event"] == "ResumeCompared"]
    return [name for name, value in ended[0].items() if not torch.equal(value, ended[1][name])], compared


def apart(folder: Path) -> dict[str, tuple[str, list[str]]]:
    double = {"gradient_accumulation_steps": 2}
    return {
        "flip": replicas.found(replicas.Flipped(10, 1), f"{folder}/flip", **double, **SHARED),
        "rates": replicas.found(nn.Linear(4, 2), f"{folder}/rates", optimizer=replicas.rank_rates, **SHARED),
        "tensor": replicas.found(replicas.Blocks(3), f"{folder}/tensor", tensor_parallel=2, **SHARED),
        "evaluation": replicas.found(replicas.Measured(), f"{folder}/evaluation", **SHARED),
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("runs")
    jobs: dict[str, Job] = {f"weights {way}": (weigh, (way, folder)) for way in WEIGHTED}
    jobs |= {f"refused {way}": (refuse, (way, folder)) for way in weights.REFUSED}
    jobs |= {
        f"{make.__name__}/{mesh}": (work, (make, mesh, folder, SHARED))
        for make, meshes in WORKS.items()
        for mesh in meshes
    }
    jobs |= {f"resumed {mesh}": (resume, (mesh, folder)) for mesh in RESUMED}
    jobs |= {"whole": (model_after_fit.train, (str(folder), SHARED)), "apart": (apart, (folder,))}
    return run_jobs(2, jobs)[0]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, more.Trained]:
    folder = tmp_path_factory.mktemp("one")
    return {make.__name__: work(make, "one", folder, ALONE) for make in WORKS}


@pytest.mark.parametrize("way", WEIGHTED)
def test_token_weighted_loss_of_each_step_matches_one_process(way: str, found: dict[str, Any]) -> None:
    assert result(found, f"weights {way}") == pytest.approx(weights.by_hand(weights.WAYS[way][0]), rel=1e-9)


@pytest.mark.parametrize("way", weights.REFUSED)
def test_loss_that_does_not_add_up_over_ranks_is_refused(way: str, found: dict[str, Any]) -> None:
    assert weights.REFUSED[way][3] in result(found, f"refused {way}")


def test_captured_steps_have_the_models_own_loss(tmp_path: Path) -> None:
    given = {"num_gpus": 1, "batch_size": weights.BATCH, "device": "cuda", "capture": True, "epochs": 5}
    losses = weights.fit("shifted", tmp_path, None, **given)
    assert "one CUDA graph from here on" in (tmp_path / "events.jsonl").read_text()
    assert losses == pytest.approx(weights.by_hand("shifted", 5), rel=1e-9)


@pytest.mark.parametrize(("make", "mesh"), WORK_PAIRS)
def test_mesh_on_nccl_matches_one_process(make: str, mesh: str, found: Any, alone: dict[str, more.Trained]) -> None:
    wanted, there = alone[make], result(found, f"{make}/{mesh}")
    assert len(there.steps) == len(wanted.steps)
    for at, (one, other) in enumerate(zip(there.steps, wanted.steps, strict=True)):
        assert one == pytest.approx(other, rel=1e-4), f"step {at + 1}"
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
    assert there.validation == pytest.approx(wanted.validation, rel=1e-5)
    for name, buffer in wanted.buffers.items():
        torch.testing.assert_close(there.buffers[name], buffer, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("mesh", RESUMED)
def test_resumed_run_has_same_bytes_and_passes_its_certificate(mesh: str, found: dict[str, Any]) -> None:
    differing, compared = result(found, f"resumed {mesh}")
    assert not differing
    assert [(verdict["passed"], verdict["steps"]) for verdict in compared] == [(True, 3)], compared


@pytest.mark.parametrize("way", model_after_fit.WAYS)
def test_rank_0_model_after_fit_has_the_checkpoint_weights(way: str, found: dict[str, Any]) -> None:
    model_after_fit.assert_whole(way, result(found, "whole")[way])


def test_diverged_replicas_are_named(found: dict[str, Any]) -> None:
    told = result(found, "apart")
    text, saved = told["flip"]
    assert "differ after step 12: parameter layer.weight" in text
    assert saved == ["step-000006"]
    assert "before the first step: optimizer option lr of group 0" in told["rates"][0]
    assert "after step 4: parameter blocks.1.norm.bias" in told["tensor"][0]
    assert "after step 20: buffer center" in told["evaluation"][0]
