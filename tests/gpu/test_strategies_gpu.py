"""Ways to save memory on one GPU train what the plain way trains: recomputation, compilation, offload, meta, LoRA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.meshes import Trained, make_model, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

WAYS: dict[str, dict[str, Any]] = {
    "full": {"activation_checkpointing": True},
    "selective": {"activation_checkpointing": "selective"},
    "compiled": {"compile": True},
    "compiled_and_selective": {"compile": True, "activation_checkpointing": "selective"},
    "offloaded": {"backend": "fsdp", "cpu_offload": True},
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train("one", tmp_path_factory.mktemp("plain") / "run", device="cuda")


@pytest.mark.parametrize("way", WAYS)
def test_memory_savings_match_plain_training(way: str, plain: Trained, tmp_path: Path) -> None:
    found = train("one", tmp_path / "run", device="cuda", **WAYS[way])
    assert found.losses == pytest.approx(plain.losses, rel=1e-4)
    assert found.validation == pytest.approx(plain.validation, rel=1e-4)


def test_meta_device_model_with_lora_learns(tmp_path: Path) -> None:
    found = train("one", tmp_path / "run", make_model(meta=True), device="cuda", lora=4)
    assert found.losses[-1] < found.losses[0]


def test_fsdp_bf16_with_cpu_offload_learns(plain: Trained, tmp_path: Path) -> None:
    how = {"backend": "fsdp", "cpu_offload": True, "gradient_clipping": 1.0, "mixed_precision": "bf16"}
    found = train("one", tmp_path / "run", device="cuda", **how)
    assert found.losses[0] == pytest.approx(plain.losses[0], rel=0.02)
    assert found.losses[-1] < found.losses[0]
