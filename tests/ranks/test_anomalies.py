"""detect_anomaly names the operation that made NaN, with the step, the rank and the samples, under every strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distributed
from distributed import Trainer
from distributed.core.config import DistributedConfig
from distributed.core.errors import ConfigError, NonFiniteLossError, RankFailedError
from distributed.planner.hardware import Gpu, Hardware
from distributed.planner.planning import JobProfile, make_plan
from distributed.testing import run_ranks
from tests.ranks.test_gradients import FeedForward

RANKS, SAMPLES, GLOBAL_BATCH = 2, 16, 4
BAD = range(8, 12)  # the samples of the third step


class Block(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.mlp, self.where = FeedForward(), where

    def forward(self, x: torch.Tensor, root: torch.Tensor) -> torch.Tensor:
        if self.where == "forward":
            x = x + root.log()
        if self.where == "backward":
            hidden = self.mlp(x)
            return x + hidden + (hidden * 0 + root.clamp(min=0)).sqrt() * 0  # the slope of a root at 0 is infinite
        return x + self.mlp(x)


class Net(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(where), Block("")])
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, root: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, root)
        return self.head(x)


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    root = torch.ones(SAMPLES, 1)
    root[BAD.start : BAD.stop] = -1.0
    x, y = torch.randn(SAMPLES, 4, generator=generator), torch.randn(SAMPLES, 1, generator=generator)
    return DataLoader(TensorDataset(x, root, y), batch_size=GLOBAL_BATCH // RANKS)


CASES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "accumulated": {"batch_size": 1, "gradient_accumulation_steps": 2},
    "fsdp": {"backend": "fsdp"},
    "zero1": {"zero_stage": 1},
    "tp": {"tensor_parallel": 2, "batch_size": 4},
    "bitwise": {"reproducible": "bitwise", "virtual_ranks": 2},
    "fp16": {"mixed_precision": "fp16", "scaler_init_scale": 2.0**30},  # whose first gradients overflow
}


def trainer_of(where: str, run_dir: str, settings: dict[str, Any]) -> Trainer:
    how = {"num_gpus": RANKS, "progress": False, "device": "cpu", "detect_anomaly": True}
    return Trainer(Net(where), loss_fn=nn.MSELoss(), run_dir=run_dir, **how | settings)


def own_loop(where: str, run_dir: str) -> None:
    run = distributed.start(batch_size=2, progress=False, run_dir=run_dir, detect_anomaly=True)
    model, batches = run.prepare(Net(where), loader())
    for _ in run.epochs():
        for x, root, y in batches:
            run.backward(nn.functional.mse_loss(model(x, root), y))
            run.step()


def single_steps(where: str, run_dir: str) -> None:
    trainer = trainer_of(where, run_dir, {})
    x, root, y = loader().dataset[BAD.start : BAD.stop]  # type: ignore[index]
    trainer.train_step({"x": x, "root": root}, y)


def refusals(folder: str) -> dict[str, str]:
    found = {}
    for where in ("forward", "backward"):
        for name, settings in CASES.items():
            if (name, where) != ("fp16", "backward"):
                with pytest.raises(NonFiniteLossError) as told:
                    trainer_of(where, f"{folder}/{name}-{where}", settings).fit(loader())
                found[f"{name} {where}"] = str(told.value)
        with pytest.raises(NonFiniteLossError) as told:
            own_loop(where, f"{folder}/own-{where}")
        found[f"own {where}"] = str(told.value)
        with pytest.raises(ArithmeticError) as raw:
            single_steps(where, f"{folder}/single-{where}")
        found[f"single {where}"] = str(raw.value)
    trainer_of("", f"{folder}/none", {"on_nan": "stop"}).fit(loader())
    return found


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return run_ranks(refusals, RANKS, str(tmp_path_factory.mktemp("anomalies")))


def test_operation_step_and_samples_are_named_in_forward(told: list[dict[str, str]]) -> None:
    for rank, found in enumerate(told):
        for name, text in found.items():
            if name.endswith("forward"):
                assert "made by log at test_anomalies.py:" in text, name
                assert name.startswith("single") or f"the loss is nan at step 3 (epoch 0) on rank {rank}" in text, name
        assert f"[{8 + 2 * rank}, {9 + 2 * rank}]" in found["ddp forward"]
        assert f"[{8 + rank}, {10 + rank}]" in found["accumulated forward"]


def test_operation_of_the_forward_call_is_named_in_backward(told: list[dict[str, str]]) -> None:
    for rank, found in enumerate(told):
        for name, text in found.items():
            if name.endswith("backward"):
                assert "backward pass of Sqrt at test_anomalies.py:" in text, name
                assert "in forward returned it" in text, name
                assert name.startswith("single") or f"a gradient is nan at step 3 (epoch 0) on rank {rank}" in text, (
                    name
                )


def test_stage_that_sends_nan_is_the_one_that_is_named(tmp_path: Path) -> None:
    settings = {"pipeline_parallel": 2, "batch_size": 4}
    with pytest.raises(RankFailedError, match="the loss is nan at step 3") as failed:
        trainer_of("forward", str(tmp_path / "run"), settings).fit(loader())
    assert failed.value.rank == 0  # whose stage has the block; the loss is rank 1's
    assert "made by log at test_anomalies.py:" in str(failed.value)


@pytest.mark.parametrize("against", [{"on_nan": "continue"}, {"capture": True}, {"compile": True}])
def test_setting_that_hides_operations_is_refused(against: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"detect_anomaly with {next(iter(against))}"):
        DistributedConfig(detect_anomaly=True, **against)


def test_automatic_capture_is_off_with_its_reason() -> None:
    gpu = Hardware(cpu_cores=2, gpus=(Gpu("GPU", compute_capability=9.0),))
    profile = JobProfile(loader_batch_size=4, samples=64, has_blocks=True)
    plan = make_plan(DistributedConfig(detect_anomaly=True, compile="auto"), profile, gpu, run_dir="run")
    assert (plan.speed.capture, plan.memory.compile) == ("off", False)
    reasons = {one.choice: one.reason for one in plan.decisions if "detect_anomaly" in one.reason}
    assert reasons.keys() == {"steps are not captured", "nothing compiled"}
