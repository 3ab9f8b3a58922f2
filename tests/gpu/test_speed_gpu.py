"""Free speed on a real GPU: each switch does what it says, computes the same or nearly so, and is undone in the end."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from distributed import Trainer
from distributed.core.env import WorkerEnv
from distributed.core.plan import BatchPlan, MemoryPlan, OptimizerPlan, Plan, PrecisionPlan, SpeedPlan
from distributed.data.loading.loader import Microbatch
from distributed.runtime.session import Session
from distributed.strategies.replicated import Replicated
from distributed.strategies.speed.device_settings import device_settings
from distributed.strategies.speed.fused import why_not_fused
from distributed.train.task import Task

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CUDA = torch.device("cuda", 0)
CUDNN = "aten::_scaled_dot_product_cudnn_attention"
is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


class Block(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.layers = nn.Embedding(32, 128), nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(128, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).transpose(1, 2)


class Convolving(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Flatten(),
            nn.Linear(16 * 36, 4),
        )  # fmt: skip


def words(samples: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 8, (samples, 64), generator=torch.Generator().manual_seed(2))
    return ids, ids.roll(-1, 1)


def pictures(samples: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(samples, 3, 8, 8, generator=generator), torch.randint(0, 4, (samples,), generator=generator)


@contextmanager
def training(
    module: nn.Module, speed: SpeedPlan, precision: str = "bf16", memory: MemoryPlan | None = None, **task: Any
) -> Iterator[Replicated]:
    session = Session.open(WorkerEnv(), device="cuda", collectives="nccl", timeout_s=60)
    session.seed(0)
    plan = Plan(
        run_dir="",
        batch=BatchPlan(8),
        device="cuda",
        precision=PrecisionPlan(precision, scaler_init_scale=1024.0),
        optimizer=OptimizerPlan(learning_rate=0.003, clip_norm=1.0),
        memory=memory or MemoryPlan(),
        speed=speed,
    )
    strategy = Replicated(plan)
    strategy.setup(Task(module, nn.CrossEntropyLoss(), **task), session)
    try:
        yield strategy
    finally:
        strategy.close()


def steps(strategy: Replicated, batch: tuple[torch.Tensor, torch.Tensor], count: int) -> list[float]:
    micro = Microbatch(tuple(tensor.cuda() for tensor in batch), 1.0, len(batch[0]))
    return [float(strategy.train_step([micro]).loss) for _ in range(count)]


def test_tf32_is_on_only_during_a_run() -> None:
    torch.manual_seed(0)
    a = torch.randn(512, 512, device="cuda")
    exact = (a.double() @ a.double()).float()

    def error() -> float:
        return float((a @ a - exact).abs().max())

    before = error()
    with device_settings(SpeedPlan(tf32=True), CUDA):
        assert error() > 10 * before
    assert error() == before


def test_expandable_segments_are_on_only_during_a_run() -> None:
    def grows() -> bool:
        torch.cuda.empty_cache()
        more = torch.cuda.memory_reserved() + 2**20  # than fits into what other tests have left
        tensor = torch.empty(more, dtype=torch.uint8, device="cuda")
        place = tensor.data_ptr()
        found = [
            segment.get("is_expandable", False)
            for segment in torch.cuda.memory_snapshot()
            if segment["address"] <= place < segment["address"] + segment["total_size"]
        ]
        return bool(found[0])

    assert not grows()
    with device_settings(SpeedPlan(expandable_segments=True), CUDA):
        assert grows()
    assert not grows()


MAKERS = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.003),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.003),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.03, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
}


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("kind", MAKERS)
def test_fused_optimizers_take_the_same_steps(kind: str, precision: str) -> None:
    losses = {}
    for fused in (False, True):
        module = Attending()
        optimizer = MAKERS[kind](module.parameters())
        with training(module, SpeedPlan(fused_optimizer=fused), precision, optimizer=optimizer) as strategy:
            losses[fused] = steps(strategy, words(), 5)
            if fused and kind != "adagrad":  # which has no such kernel on a GPU in every version
                assert optimizer.param_groups[0]["fused"]
            if fused and kind in ("adam", "adamw"):
                assert all(state["step"].is_cuda for state in optimizer.state.values())
        assert optimizer.param_groups[0]["fused"] is None
        assert all(not state["step"].is_cuda for state in optimizer.state.values() if "step" in state)
    assert losses[True] == pytest.approx(losses[False], rel=1e-3 if precision == "fp32" else 0.02)


def test_parameters_on_two_devices_are_not_fused() -> None:
    parameters = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1, device="cuda"))]
    assert "several devices" in why_not_fused(torch.optim.AdamW(parameters))


@pytest.mark.parametrize("make", [Attending, Convolving])
@pytest.mark.parametrize("kind", ["compensated", "stochastic"])
def test_bf16_parameters_learn_as_fp32_do(kind: str, make: Any) -> None:
    batch = words() if make is Attending else pictures()
    losses = {}
    for parameters in ("fp32", kind):
        module = make()
        speed = SpeedPlan(parameters=parameters, fused_optimizer=True, channels_last=True)
        with training(module, speed) as strategy:
            losses[parameters] = steps(strategy, batch, 30)
            state = strategy.state()
            assert {value.dtype for value in state["model"].values() if value.is_floating_point()} == {torch.float32}
        assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    assert losses["fp32"][-1] < 0.8 * losses["fp32"][0]
    assert losses[kind] == pytest.approx(losses["fp32"], abs=0.1)


@pytest.mark.parametrize("kind", ["compensated", "stochastic"])
def test_step_with_bf16_parameters_never_synchronizes(kind: str) -> None:
    with training(Attending(), SpeedPlan(parameters=kind, fused_optimizer=True)) as strategy:
        micro = Microbatch(tuple(tensor.cuda() for tensor in words()), 1.0, 8)
        for _ in range(3):
            strategy.train_step([micro])
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                strategy.train_step([micro])
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", ["compensated", "stochastic"])
def test_captured_bf16_step_draws_new_rounding_at_every_replay(kind: str) -> None:
    micro = Microbatch(tuple(tensor.cuda() for tensor in words()), 1.0, 8)
    ended = []
    for seed, captured in enumerate((False, False, True)):
        torch.cuda.manual_seed(seed)
        with training(Attending(), SpeedPlan(parameters=kind, fused_optimizer=True)) as strategy:
            for group in strategy.optimizer.param_groups:
                group["capturable"] = True
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    strategy.step([micro], False)
            torch.cuda.current_stream().wait_stream(side)
            if captured:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    strategy.step([micro], False)
            for _ in range(5):
                graph.replay() if captured else strategy.step([micro], False)
            ended.append({name: value.clone() for name, value in strategy.state()["model"].items()})
    start = Attending().cuda().state_dict()
    eager, again, replayed = ended
    for name, value in replayed.items():
        whole, noise = (eager[name] - start[name]).norm(), (eager[name] - again[name]).norm()  # of rounding by chance
        assert (value - eager[name]).norm() <= 0.1 * whole + 2 * noise, name


def test_captured_run_with_bf16_parameters_matches_eager(tmp_path: Path) -> None:
    ended = []
    for capture in (True, False):
        module = Attending()
        trainer = Trainer(
            module,
            loss_fn=nn.CrossEntropyLoss(),
            num_gpus=1,
            batch_size=8,
            epochs=10,
            bf16_parameters=True,
            capture=capture,
            run_dir=tmp_path / str(capture),
            progress=False,
        )
        trainer.fit(TensorDataset(*words(32)))
        ended.append(module.state_dict())
    start = Attending().cuda().state_dict()
    for name, value in ended[0].items():
        whole = (ended[1][name] - start[name]).norm()
        assert (value - ended[1][name]).norm() <= 0.1 * whole, name


def _note_format(formats: list[bool], layer: nn.Module, inputs: Any, output: torch.Tensor) -> None:
    formats.append(output.is_contiguous(memory_format=torch.channels_last))


def test_channels_last_is_used_but_not_seen_in_checkpoints() -> None:
    losses, trees = {}, {}
    for last in (False, True):
        module = Convolving()
        with training(module, SpeedPlan(channels_last=last, fused_optimizer=True)) as strategy:
            formats: list[bool] = []
            module[0].register_forward_hook(partial(_note_format, formats))
            if last:
                strategy.load_state(trees[False])
            else:
                steps(strategy, pictures(), 3)
            tree = strategy.state()
            trees[last] = {name: copy.deepcopy(tree[name]) for name in ("model", "optimizer")}
            losses[last] = steps(strategy, pictures(), 3)
            assert formats[-1] is last
        assert all(parameter.is_contiguous() for parameter in module.parameters())
    assert all(torch.equal(trees[True]["model"][name], value) for name, value in trees[False]["model"].items())
    assert losses[True] == pytest.approx(losses[False], abs=0.05)
