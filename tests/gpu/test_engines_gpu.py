"""DeepSpeed on GPUs: its own half precisions, what fp32 shares with the plain way, and two ranks on NCCL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.worlds import SHARED, result, run_jobs
from tests.meshes import Trained, train

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train("one", tmp_path_factory.mktemp("plain") / "run", device="cuda")


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("offload", [{}, {"cpu_offload": True}], ids=["", "offloaded"])
def test_deepspeed_on_a_gpu_matches_plain_training(
    stage: int, offload: dict[str, Any], plain: Trained, tmp_path: Path
) -> None:
    found = train("one", tmp_path / "run", device="cuda", backend="deepspeed", zero_stage=stage, **offload)
    assert found.losses == pytest.approx(plain.losses, rel=1e-4)
    assert found.validation == pytest.approx(plain.validation, rel=1e-4)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_deepspeed_in_half_precision_learns(stage: int, precision: str, plain: Trained, tmp_path: Path) -> None:
    scale = {"scaler_init_scale": 1024.0} if precision == "fp16" else {}
    how = {"backend": "deepspeed", "zero_stage": stage, "gradient_clipping": 1.0, "mixed_precision": precision}
    found = train("one", tmp_path / "run", device="cuda", **how, **scale)
    assert found.losses[0] == pytest.approx(plain.losses[0], rel=0.02)
    assert found.losses[-1] < 0.9 * found.losses[0]


CLIPPED = {"gradient_clipping": 0.5, "samples": 21}  # the last step of an epoch has 5 samples
STAGES: dict[str, dict[str, Any]] = {f"stage {stage}": {"zero_stage": stage} for stage in (1, 2, 3)}
STAGES |= {f"stage {stage} offloaded": {"zero_stage": stage, "cpu_offload": True} for stage in (1, 2, 3)}
STAGES |= {f"stage {stage} accumulated": {"zero_stage": stage, "accumulation": 2} for stage in (1, 2, 3)}
STAGES |= {f"stage {stage} bf16": {"zero_stage": stage, "mixed_precision": "bf16"} for stage in (1, 2, 3)}
STAGES |= {f"stage {stage} lora": {"zero_stage": stage, "lora": 4} for stage in (2, 3)}
STAGES["stage 3 recomputed"] = {"zero_stage": 3, "activation_checkpointing": True}


def train_stage(folder: Path, settings: dict[str, Any]) -> Trained:
    return train("ddp", folder, backend="deepspeed", **SHARED, **CLIPPED, **settings)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("pair")
    jobs = {name: (train_stage, (folder / name.replace(" ", "-"), settings)) for name, settings in STAGES.items()}
    return run_jobs(2, jobs)[0]


@pytest.fixture(scope="module")
def clipped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    folder, how = tmp_path_factory.mktemp("clipped"), {"device": "cuda", "tf32": False, **CLIPPED}
    return {"": train("one", folder / "plain", **how), "lora": train("one", folder / "lora", lora=4, **how)}


@pytest.mark.parametrize("name", STAGES)
def test_two_deepspeed_ranks_match_one_process(name: str, pair: dict[str, Any], clipped: dict[str, Trained]) -> None:
    found, wanted = result(pair, name), clipped["lora" if name.endswith("lora") else ""]
    tolerance = 0.03 if name.endswith("bf16") else 1e-5
    assert found.losses == pytest.approx(wanted.losses, rel=tolerance)
    assert found.norms == pytest.approx(wanted.norms, rel=10 * tolerance)
    assert found.validation == pytest.approx(wanted.validation, rel=tolerance)
