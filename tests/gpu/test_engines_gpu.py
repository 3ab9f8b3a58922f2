"""DeepSpeed on one GPU: its own half precisions, and what fp32 shares with the plain way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.meshes import Trained, train

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train("one", tmp_path_factory.mktemp("plain") / "run", device="cuda")


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("offload", [{}, {"cpu_offload": True}], ids=["", "offloaded"])
def test_it_trains_what_the_plain_way_trains(
    stage: int, offload: dict[str, Any], plain: Trained, tmp_path: Path
) -> None:
    found = train("one", tmp_path / "run", device="cuda", backend="deepspeed", zero_stage=stage, **offload)
    assert found.losses == pytest.approx(plain.losses, rel=1e-4)
    assert found.validation == pytest.approx(plain.validation, rel=1e-4)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_learns(stage: int, precision: str, plain: Trained, tmp_path: Path) -> None:
    scale = {"scaler_init_scale": 1024.0} if precision == "fp16" else {}
    how = {"backend": "deepspeed", "zero_stage": stage, "gradient_clipping": 1.0, "mixed_precision": precision}
    found = train("one", tmp_path / "run", device="cuda", **how, **scale)
    assert found.losses[0] == pytest.approx(plain.losses[0], rel=0.02)
    assert found.losses[-1] < 0.9 * found.losses[0]
