"""What else is asked for on a mesh, on NCCL: short steps, adapters, recomputation, offload, compilation, 16 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.worlds import ALONE, SHARED, result, run_jobs
from tests.meshes import MESHES, Trained, make_model, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SHORT = {"samples": 21}  # steps of 8, 8 and 5 samples: most ranks have less in the last
FP16 = {"mixed_precision": "fp16", "gradient_clipping": 1.0, "scaler_init_scale": 1024.0}
COMPILED = ["ddp", "fsdp_grad_op", "zero1", "tp", "pp", "fsdp", "hybrid", "dp_tp", "pp_dp", "pp_tp"]
OFFLOAD = {"cpu_offload": True, "gradient_clipping": 0.5}
# What is asked for, of which model, on which meshes, and which way of one process trains the same.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any], list[str], str]] = {
    "plain": ({}, {}, ["ddp", "fsdp_grad_op", "zero1", "cp", "pp", "fsdp", "hybrid", "pp_dp", "fsdp_cp"], "plain"),
    "deep": ({}, {"blocks": 4}, ["pp_interleaved", "pp_zero_bubble"], "deep"),
    "tied": ({}, {"tied": True}, ["fsdp_grad_op", "tp", "pp", "pp_tp"], "tied"),
    "meta": ({}, {"meta": True}, ["ddp", "fsdp", "tp"], "meta"),
    "recomputed": ({"activation_checkpointing": True}, {}, ["ddp", "fsdp_grad_op", "tp", "pp"], "plain"),
    "selective": ({"activation_checkpointing": "selective"}, {}, ["fsdp", "tp"], "plain"),
    "offloaded": (OFFLOAD, {}, ["fsdp_grad_op", "fsdp", "hybrid"], "clipped"),
    "lora": ({"lora": {"rank": 4}}, {}, ["ddp", "fsdp_grad_op", "tp", "pp"], "lora"),
    "adapters": ({"lora": {"rank": 4}, "save_adapters_only": True}, {}, ["fsdp"], "lora"),
    "compiled": ({"compile": True}, {}, COMPILED, "plain"),
    "bf16": ({"mixed_precision": "bf16"}, {}, ["zero1", "cp", "pp", "fsdp", "hybrid", "dp_tp", "pp_tp"], "bf16"),
    "fp16": (FP16, {}, ["ddp", "fsdp_grad_op", "tp", "pp"], "fp16"),
}
ONE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "deep": ({}, {"blocks": 4}),
    "tied": ({}, {"tied": True}),
    "meta": ({}, {"meta": True}),
    "clipped": ({"gradient_clipping": 0.5}, {}),
    "lora": ({"lora": {"rank": 4}}, {}),
    "bf16": ({"mixed_precision": "bf16"}, {}),
    "fp16": (FP16, {}),
}
PAIRS = [(way, mesh) for way, (_, _, meshes, _) in WAYS.items() for mesh in meshes]
LOW = {"bf16": 0.03, "fp16": 0.01}


def run(mesh: str, folder: Path, model: dict[str, Any], settings: dict[str, Any]) -> Trained:
    return train(mesh, folder, make_model(**model), **SHORT, **settings)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    folder = tmp_path_factory.mktemp("one")
    return {way: run("one", folder / way, model, ALONE | settings) for way, (settings, model) in ONE.items()}


class Worlds:
    """Made when a test first asks for their number of ranks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found: dict[int, dict[str, Any]] = {}

    def trained(self, way: str, mesh: str) -> Trained:
        ranks = MESHES[mesh].ranks
        if ranks not in self._found:
            mates = [(way, mesh) for way, mesh in PAIRS if MESHES[mesh].ranks == ranks]
            jobs = {
                f"{way}/{mesh}": (run, (mesh, self._folder / f"{way}-{mesh}", WAYS[way][1], SHARED | WAYS[way][0]))
                for way, mesh in mates
            }
            self._found[ranks] = run_jobs(ranks, jobs)[0]
        found: Trained = result(self._found[ranks], f"{way}/{mesh}")
        return found


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    return Worlds(tmp_path_factory.mktemp("nccl"))


@pytest.mark.parametrize(("way", "mesh"), PAIRS)
def test_losses_of_mesh_features_match_one_process(
    way: str, mesh: str, worlds: Worlds, alone: dict[str, Trained]
) -> None:
    found, wanted = worlds.trained(way, mesh), alone[WAYS[way][3]]
    tolerance = LOW.get(way, 1e-5)
    assert len(wanted.losses) == 6
    assert wanted.losses[-1] < wanted.losses[0]
    assert found.losses == pytest.approx(wanted.losses, rel=tolerance)
    assert found.norms == pytest.approx(wanted.norms, rel=10 * tolerance)
    assert found.validation == pytest.approx(wanted.validation, rel=tolerance)
