"""Settings of the process: what a run changes in torch, what it leaves alone, and that all of it is as it was after."""

from __future__ import annotations

import copy
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from distributed.core.env import WorkerEnv
from distributed.core.plan import BatchPlan, OptimizerPlan, Plan, PrecisionPlan, SpeedPlan
from distributed.data.loading.loader import Microbatch
from distributed.runtime.session import Session
from distributed.strategies.speed.device_settings import (
    allocator_options,
    device_settings,
    tf32_products,
)
from distributed.strategies.torch_mesh import TorchMesh
from distributed.train.task import Task

MATMUL: Any = torch.backends.cuda.matmul
CUDNN: Any = torch.backends.cudnn


def seen() -> tuple[Any, ...]:
    return (
        MATMUL.fp32_precision,
        CUDNN.conv.fp32_precision,
    )


@pytest.fixture
def as_it_was() -> Iterator[None]:
    matmul, convolutions = MATMUL.fp32_precision, CUDNN.conv.fp32_precision
    yield
    MATMUL.allow_tf32, CUDNN.allow_tf32 = False, True
    MATMUL.fp32_precision, CUDNN.conv.fp32_precision = matmul, convolutions


def test_device_settings_change_nothing_on_cpu() -> None:
    before = seen()
    speed = SpeedPlan(tf32=True, expandable_segments=True)
    with device_settings(speed, torch.device("cpu")):
        assert seen() == before


KEPT = """
import resource
import torch
from distributed.core.plan import SpeedPlan
from distributed.strategies.speed.device_settings import device_settings

def step():
    [torch.ones(10 * 2**20, dtype=torch.uint8) for _ in range(16)]

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])

speed, cpu = SpeedPlan(keep_freed_memory=True), torch.device("cpu")
begun = resident()
with device_settings(speed, cpu):
    with device_settings(speed, cpu):
        for _ in range(5):
            step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        step()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    kept = resident()
print(faults, kept - begun, resident() - begun)
"""


def test_freed_memory_is_kept_until_the_run_ends() -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "LD_"))}
    told = subprocess.run([sys.executable, "-c", KEPT], capture_output=True, text=True, check=True, env=environ)
    faults, kept, after = map(int, told.stdout.split())
    step = 16 * 10 * 2**20 // resource.getpagesize()
    assert faults < 0.1 * step  # of five steps
    assert 0.9 * step < kept < 1.2 * step
    assert after < 0.1 * step


def test_tf32_is_consistent_in_both_torch_apis(as_it_was: None) -> None:
    before = seen()
    with tf32_products():
        assert (MATMUL.allow_tf32, MATMUL.fp32_precision) == (True, "tf32")
        assert (CUDNN.allow_tf32, CUDNN.conv.fp32_precision) == (True, "tf32")
        assert torch.get_float32_matmul_precision() == "high"
    assert seen() == before
    assert (MATMUL.allow_tf32, torch.get_float32_matmul_precision()) == (False, "highest")


@pytest.mark.parametrize("said", ["tf32", "ieee"])
def test_fp32_precision_set_by_the_user_is_restored(said: str, as_it_was: None) -> None:
    MATMUL.fp32_precision = said
    before = seen()
    with tf32_products():
        assert MATMUL.fp32_precision == "tf32"
    assert seen() == before


def test_users_allocator_options_are_kept() -> None:
    told = {"PYTORCH_ALLOC_CONF": "garbage_collection_threshold:0.8, expandable_segments:True"}
    assert allocator_options(told, True) == "garbage_collection_threshold:0.8,expandable_segments:True"
    assert allocator_options(told, None) == "garbage_collection_threshold:0.8,expandable_segments:True"


class Convolving(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 3))


@pytest.mark.parametrize("parameters", ["fp32", "compensated", "stochastic"])
def test_channels_last_shows_in_no_checkpoint_or_restored_model(parameters: str) -> None:
    session = Session.open(WorkerEnv(), device="cpu", collectives="gloo", timeout_s=60)
    torch.manual_seed(1)
    micro = Microbatch((torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 0])), 1.0, 4)
    trees: list[dict[str, Any]] = []
    losses: list[float] = []
    for channels_last in (False, True):
        session.seed(0)
        module, optimizer = Convolving(), OptimizerPlan(learning_rate=0.01)
        speed = SpeedPlan(channels_last=channels_last, fused_optimizer=True, parameters=parameters)
        precision = PrecisionPlan("fp32" if parameters == "fp32" else "bf16")
        plan = Plan(run_dir="", batch=BatchPlan(4), optimizer=optimizer, speed=speed, precision=precision)
        strategy = TorchMesh(plan)
        strategy.setup(Task(module), session)
        weight: torch.Tensor = module[0].weight
        assert weight.is_contiguous(memory_format=torch.channels_last) is channels_last
        if trees:
            strategy.load_state(trees[0])
            for held in strategy.optimizer.state.values():
                assert held["exp_avg"].dim() != 4 or held["exp_avg"].is_contiguous(memory_format=torch.channels_last)
        for _ in range(0 if trees else 2):
            strategy.train_step([micro])
        tree = strategy.state()
        trees.append({name: copy.deepcopy(tree[name]) for name in ("model", "optimizer")})
        losses.append(float(strategy.train_step([micro]).loss))
        strategy.close()
        assert all(parameter.is_contiguous() for parameter in module.parameters())
    assert all(torch.equal(trees[0]["model"][name], trees[1]["model"][name]) for name in trees[0]["model"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4 if parameters == "fp32" else 0.02)
