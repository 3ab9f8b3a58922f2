"""Parameters in bf16 and layers in fp8 on sharded state over NCCL: they train as in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from distributed import Trainer
from distributed.checkpoint.restore.reading import load
from distributed.testing import run_ranks
from tests.meshes import Trained, train

HAS_FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_FP8, reason="no CUDA device that multiplies in 8 bits")]

STEPS = 10
SHARED: dict[str, Any] = {"device": "cuda", "share_gpus": True, "backend": "fsdp"}
WAYS: dict[str, dict[str, Any]] = {
    "compensated": {"bf16_parameters": True},
    "stochastic": {"bf16_parameters": "stochastic"},
    "stochastic offloaded": {"bf16_parameters": "stochastic", "cpu_offload": True},
    "stochastic compiled": {"bf16_parameters": "stochastic", "compile": True},
}


def train_ways(folder: Path) -> dict[str, Trained]:
    sharded = SHARED | {"sharding": "full", "gradient_clipping": 1.0, "max_steps": STEPS}
    return {way: train("fsdp_grad_op", folder / way, **sharded | settings) for way, settings in WAYS.items()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    folder = tmp_path_factory.mktemp("low")
    one = train("one", folder / "one", device="cuda", max_steps=STEPS, gradient_clipping=1.0)
    return {"fp32": one} | run_ranks(train_ways, 2, folder, device="cuda")[0]


@pytest.mark.parametrize("way", WAYS)
def test_sharded_parameters_in_bf16_learn_as_in_fp32(way: str, trained: dict[str, Trained]) -> None:
    assert trained[way].losses == pytest.approx(trained["fp32"].losses, rel=0.03)
    weights = load(trained[way].checkpoint, ranks=()).shared["model"]
    assert {value.dtype for value in weights.values()} == {torch.float32}
    assert all(torch.equal(w, w.bfloat16().float()) for w in weights.values()) == (way != "compensated")


def fit_wide(folder: Path, **settings: Any) -> tuple[list[float], str]:
    """The losses, and all that the run has said."""
    torch.manual_seed(1)
    hidden = [nn.Sequential(nn.Linear(2048, 2048), nn.ReLU()) for _ in range(2)]
    model = nn.Sequential(nn.Linear(32, 2048), nn.ReLU(), nn.Sequential(*hidden), nn.Linear(2048, 4))
    x = torch.randn(16384, 32, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long())
    trainer = Trainer(
        model,
        loss_fn=nn.CrossEntropyLoss(),
        epochs=3,
        learning_rate=3e-4,
        mixed_precision="fp8",
        log_every_n_steps=1,
        progress=False,
        run_dir=str(folder),
        **settings,
    )
    history = trainer.fit(data)
    text = (Path(history.run_dir) / "events.jsonl").read_text()
    return [event["loss"] for event in map(json.loads, text.splitlines()) if event["event"] == "StepEnded"], text


def test_sharded_fp8_layers_match_one_process(tmp_path: Path) -> None:
    alone, said_alone = fit_wide(tmp_path / "one", num_gpus=1, batch_size=4096)
    assert "2 of 4 linear layers" in said_alone
    for way in ({}, {"compile": True, "bf16_parameters": True}):
        folder = tmp_path / ("-".join(way) or "plain")
        sharded = SHARED | {"batch_size": 2048} | way
        together, said = run_ranks(_fit_sharded, 2, folder, sharded, device="cuda")[0]
        assert "2 of 4 linear layers" in said, way
        assert together == pytest.approx(alone, rel=0.05), way
    assert alone[-1] < 0.8 * alone[0]


def _fit_sharded(folder: Path, settings: dict[str, Any]) -> tuple[list[float], str]:
    return fit_wide(folder, **settings)
