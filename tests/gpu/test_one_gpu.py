"""Training on a real GPU: the same API, no waiting for the device between logs, and both kinds of mixed precision."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distributed import PyTorchDDPTrainer
from distributed.core.env import WorkerEnv
from distributed.core.errors import NonFiniteLossError
from distributed.core.plan import BatchPlan, OptimizerPlan, Plan, PrecisionPlan
from distributed.data.loading.loader import Microbatch
from distributed.runtime.session import Session
from distributed.strategies.torch_mesh import TorchMesh
from distributed.train.task import Task
from tests.conftest import DATA, clean_environ

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def digits(samples: int = 2048) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 32, generator=generator)
    return TensorDataset(x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long())


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))


@pytest.mark.parametrize("precision", [False, True, "bf16", "fp16"])
def test_fit_on_a_gpu_learns_in_each_precision(precision: Any, tmp_path: Path) -> None:
    trainer = PyTorchDDPTrainer(
        model(),
        num_gpus=1,
        batch_size=64,
        epochs=3,
        learning_rate=0.01,
        mixed_precision=precision,
        gradient_clipping=1.0,
        tensorboard=True,
        run_dir=tmp_path / "run",
    )
    history = trainer.fit(DataLoader(digits(), shuffle=True, pin_memory=True, num_workers=2), digits(500))
    assert history.best_accuracy > 0.9
    assert next(trainer.model.parameters()).is_cuda
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["device"] == "cuda"
    assert plan["precision"]["kind"] == {False: "fp32", True: "bf16"}.get(precision, precision)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_step_never_synchronizes_with_the_device(precision: str) -> None:
    """torch raises on every synchronization while the debug mode is on."""
    session = Session.open(WorkerEnv(), device="cuda", collectives="nccl", timeout_s=60)
    plan = Plan(
        run_dir="",
        batch=BatchPlan(64, 1, 2),
        device="cuda",
        precision=PrecisionPlan(precision),
        optimizer=OptimizerPlan(clip_norm=1.0),
    )
    strategy = TorchMesh(plan)
    strategy.setup(Task(model()), session)
    x, y = digits(64).tensors
    micro = [Microbatch((x.pin_memory(), y.pin_memory()), 0.5, 64)] * 2
    losses = [strategy.train_step(micro).loss for _ in range(3)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        losses += [strategy.train_step(micro).loss for _ in range(5)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    values = torch.stack(losses).tolist()
    assert values[-1] < values[0]


def test_train_command_trains_on_a_gpu(tmp_path: Path) -> None:
    script = """
from distributed import Trainer
history = Trainer(MyModel(), epochs=2).fit(train_loader, val_loader)
print("world", history.world_size, history.steps)
"""
    (tmp_path / "train.py").write_text(DATA + script)
    command = [sys.executable, "-m", "distributed", "train", "--num-gpus", "1", "--script", "train.py"]
    result = subprocess.run(command, cwd=tmp_path, env=clean_environ(), capture_output=True, text=True, timeout=180)
    assert "world 1 28" in result.stdout, result.stdout + result.stderr


def test_more_gpus_than_the_node_has_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('never')")
    command = [sys.executable, "-m", "distributed", "train", "--num-gpus", "99", "--script", "train.py"]
    result = subprocess.run(command, cwd=tmp_path, env=clean_environ(), capture_output=True, text=True, timeout=180)
    assert result.returncode == 2
    assert "99 GPUs asked for on this node, but it has" in result.stderr
    assert not list(tmp_path.glob("runs"))


def test_nan_on_the_gpu_is_named_with_its_step_at_the_next_log(tmp_path: Path) -> None:
    data = digits(640)
    data.tensors[0][200] = float("nan")
    trainer = PyTorchDDPTrainer(
        nn.Linear(32, 4), num_gpus=1, batch_size=64, run_dir=tmp_path / "run", log_every_n_steps=5
    )
    with pytest.raises(NonFiniteLossError, match=r"the loss is nan at step 4 .*") as caught:
        trainer.fit(data)
    assert "192, 193" in str(caught.value)
