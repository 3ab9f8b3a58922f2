"""Linear layers in 8 bits on a real GPU: training ends where bf16 does, nothing waits, and a step can be captured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from distributed import PyTorchDDPTrainer
from distributed.bench.workloads.gpt import Gpt, GptSize
from distributed.bench.workloads.models import text_rows
from distributed.core.env import WorkerEnv
from distributed.core.plan import BatchPlan, OptimizerPlan, Plan, PrecisionPlan
from distributed.data.loading.loader import Microbatch
from distributed.runtime.session import Session
from distributed.strategies.model.compilation import compile_blocks
from distributed.strategies.speed.float8 import float8_linear, use_float8
from distributed.strategies.torch_mesh import TorchMesh
from distributed.train.task import Task

HAS_FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_FP8, reason="no CUDA device that multiplies in 8 bits")]

SIZE = GptSize(2, 256, 4, 128, 16, 512)
STEPS, TOLERANCE = 200, 0.02  # of bf16's loss in the end


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.float() - exact.float()).norm() / exact.float().norm()).item()


def losses_of(precision: str, *, compiled: bool) -> list[float]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Gpt(SIZE).cuda()
    if precision == "fp8":
        found, _ = use_float8(model, worth=16, rows=16)
        assert len(found.chosen) == 4 * SIZE.blocks
    if compiled:
        compile_blocks(model)
    rows = [tensor.cuda() for tensor in text_rows(SIZE.batch * STEPS, size=SIZE)[:2]]  # each once: noise is not learnt
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    losses = []
    for step in range(STEPS):
        ids, labels = (tensor[step::STEPS] for tensor in rows)
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(ids, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_fp8_linear_layers_reach_the_loss_of_bf16(compiled: bool) -> None:
    ends = {}
    for precision in ("bf16", "fp8"):
        losses = losses_of(precision, compiled=compiled)
        ends[precision] = sum(losses[-10:]) / 10
        assert ends[precision] < 0.5 * losses[0]
    assert ends["fp8"] == pytest.approx(ends["bf16"], rel=TOLERANCE), ends


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_fp8_layer_and_gradients_are_close_to_fp32(compiled: bool, bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(1024, 4096, bias=bias, device="cuda")
    x = torch.randn(4, 512, 1024, device="cuda", requires_grad=True)
    gradient = torch.randn(4, 512, 4096, device="cuda") * 1e-4
    exact = layer(x)
    parameters = [x, *layer.parameters()]
    expected = torch.autograd.grad(exact, parameters, gradient)
    run = torch.compile(float8_linear, fullgraph=True) if compiled else float8_linear
    out = run(x, layer.weight, layer.bias)
    found = torch.autograd.grad(out, parameters, gradient.bfloat16())
    assert error(out, exact) < 0.05
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == theirs.dtype
        assert error(mine, theirs) < 0.1


@pytest.mark.parametrize("rows", [2048 + 8, 1024])
def test_fp8_layer_runs_unsuited_rows_in_bf16(rows: int) -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(2048, 2048, device="cuda"))
    x, fits = torch.randn(rows, 2048, device="cuda"), torch.randn(2048, 2048, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        expected, in_bf16 = layer(x), layer(fits)
        use_float8(layer)
        assert torch.equal(layer(x), expected)
        assert not torch.equal(layer(fits), in_bf16)
        assert error(layer(fits), in_bf16) < 0.05


def wide() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(32, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 4))


def digits(samples: int) -> TensorDataset:
    x = torch.randn(samples, 32, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long())


def test_fp8_step_never_synchronizes_with_the_device() -> None:
    """torch raises on every synchronization while the debug mode is on."""
    session = Session.open(WorkerEnv(), device="cuda", collectives="nccl", timeout_s=60)
    plan = Plan(
        run_dir="",
        batch=BatchPlan(2048, 1, 2),
        device="cuda",
        precision=PrecisionPlan("fp8"),
        optimizer=OptimizerPlan(clip_norm=1.0),
    )
    strategy, model = TorchMesh(plan), wide()
    strategy.setup(Task(model), session)
    assert "1 of 3 linear layers (2)" in str(strategy.decisions[0])
    x, y = digits(2048).tensors
    micro = [Microbatch((x.pin_memory(), y.pin_memory()), 0.5, 2048)] * 2
    losses = [strategy.train_step(micro).loss for _ in range(3)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        losses += [strategy.train_step(micro).loss for _ in range(5)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    values = torch.stack(losses).tolist()
    assert values[-1] < values[0]
    strategy.close()
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_captured_fp8_forward_and_backward_see_new_weights() -> None:
    torch.manual_seed(0)
    weight = torch.randn(2048, 2048, device="cuda", requires_grad=True)
    x = torch.randn(2048, 2048, device="cuda")

    def loss() -> torch.Tensor:
        return float8_linear(x, weight, None).float().square().mean()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            torch.autograd.grad(loss(), weight)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = loss()
        gradient = torch.autograd.grad(captured, weight)[0]
    with torch.no_grad():
        weight.mul_(3.0)
        x.mul_(100.0)
    graph.replay()
    expected = loss()
    assert error(captured, expected) < 1e-3
    assert error(gradient, torch.autograd.grad(expected, weight)[0]) < 1e-2


def test_fp8_products_of_representable_numbers_are_exact() -> None:
    """Of numbers that 8 bits hold exactly, every product is exact, whatever the order of sums."""
    x = torch.randint(-4, 5, (2048, 256), device="cuda").float().requires_grad_()
    weight = torch.randint(-4, 5, (512, 256), device="cuda").float().requires_grad_()
    gradient = torch.randint(-1, 2, (2048, 512), device="cuda").float()
    out = float8_linear(x, weight, None, torch.float32)
    assert torch.equal(out, functional.linear(x, weight))
    found = torch.autograd.grad(out, (x, weight), gradient)
    assert torch.equal(found[0], gradient @ weight)
    assert torch.equal(found[1], gradient.t() @ x)


def test_fit_in_fp8_learns(tmp_path: Path) -> None:
    trainer = PyTorchDDPTrainer(
        wide(),
        num_gpus=1,
        batch_size=2048,
        epochs=10,
        learning_rate=1e-3,
        mixed_precision="fp8",
        run_dir=tmp_path / "run",
    )
    history = trainer.fit(digits(8192), digits(2048))
    assert history.best_accuracy > 0.9
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["precision"]["kind"] == "fp8"
