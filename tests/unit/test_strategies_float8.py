"""Linear layers in 8 bits: near the exact numbers, visible when they are not finite, and the model as it was."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional

from distributed.bench.workloads.gpt import SIZES, Gpt, GptSize
from distributed.core.config import DistributedConfig
from distributed.core.env import WorkerEnv
from distributed.core.errors import PlanError
from distributed.core.plan import BatchPlan, MemoryPlan, OptimizerPlan, Plan, PrecisionPlan
from distributed.data.loading.loader import Microbatch
from distributed.planner.hardware import Gpu, Hardware
from distributed.planner.planning import JobProfile, make_plan
from distributed.runtime.session import Session
from distributed.strategies.model.recompute import recompute
from distributed.strategies.speed.float8 import cast, find_float8_layers, float8_linear, use_float8
from distributed.strategies.torch_mesh import TorchMesh
from distributed.train.task import Task
from tests.float8 import quick_products

SMALL = {"worth": 16, "rows": 16}  # so that layers of a few numbers are taken, too
TYPES = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.fixture(autouse=True)
def _own_products() -> Iterator[None]:
    """Torch's own products, not oneDNN's, which lacks those of two kinds of fp8 on processors without AMX."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about other devices' TF32
        with torch.backends.mkldnn.flags(enabled=False):
            yield


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.float() - exact).norm() / exact.norm()).item()


def tensors(*, bias: bool = True, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """An input, a weight, maybe a bias, and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 16, 128), (96, 128), *([(96,)] if bias else [])]
    made = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    made[0] = made[0].detach().to(dtype).requires_grad_()
    return [*made, torch.randn(4, 16, 96, generator=generator)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float8_linear_and_gradients_are_close_to_exact(bias: bool, dtype: torch.dtype) -> None:
    *given, gradient = tensors(bias=bias, dtype=dtype)
    out = float8_linear(given[0], given[1], given[2] if bias else None)
    assert out.dtype == torch.bfloat16
    out.backward(gradient.bfloat16())
    exact = [tensor.detach().float().requires_grad_() for tensor in given]
    expected = functional.linear(*exact)
    expected.backward(gradient)
    assert error(out, expected) < 0.05
    for mine, theirs in zip(given, exact, strict=True):
        assert mine.grad is not None
        assert mine.grad.dtype == mine.dtype
        assert theirs.grad is not None
        assert error(mine.grad, theirs.grad) < 0.1


@pytest.mark.parametrize("dtype", TYPES)
def test_float8_scale_is_the_least_power_of_two_in_range(dtype: torch.dtype) -> None:
    limit = torch.finfo(dtype).max
    generator = torch.Generator().manual_seed(0)
    for exponent in range(-60, 60, 3):
        tensor = torch.randn(64, generator=generator) * 2.0**exponent
        small, scale = cast(tensor, dtype)
        mantissa, _ = torch.frexp(scale)
        assert mantissa == 0.5
        largest = tensor.abs().max() / scale
        assert limit / 2 < largest <= limit
        assert error(small.float() * scale, tensor) < 0.08
    for edge in (limit, limit * (1 + 2**-20)):  # the last number that fits, and the first that does not
        small, scale = cast(torch.tensor([edge, -1.0]), dtype)
        assert scale == (1.0 if edge == limit else 2.0)
        assert small.float().isfinite().all()


def test_float8_linear_of_zeros_gives_zeros() -> None:
    x, weight = torch.zeros(16, 32, requires_grad=True), torch.randn(32, 32, requires_grad=True)
    out = float8_linear(x, weight, None)
    out.backward(torch.zeros_like(out))
    assert not out.any()
    for tensor in (x, weight):
        assert tensor.grad is not None
        assert not tensor.grad.any()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_float8_linear_keeps_inf_and_nan_visible(bad: float) -> None:
    x, weight = torch.randn(16, 32), torch.randn(32, 32)
    x[3, 4] = bad
    assert float8_linear(x, weight, None)[3].isnan().all()


def test_frozen_float8_weight_gets_no_gradient_but_passes_it() -> None:
    x, weight, gradient = tensors(bias=False)
    weight = weight.detach()
    float8_linear(x, weight, None).backward(gradient.bfloat16())
    assert weight.grad is None
    assert x.grad is not None
    assert error(x.grad, gradient @ weight) < 0.1


def test_float8_operands_are_saved_in_8_bits() -> None:
    kept: list[torch.Tensor] = []
    x, weight, bias, _ = tensors()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        float8_linear(x, weight, bias)
    assert sorted(t.numel() for t in kept if t.dim()) == sorted([x.numel(), weight.numel()])
    assert {t.element_size() for t in kept if t.dim()} == {1}


def gpt() -> Gpt:
    torch.manual_seed(0)
    return Gpt(GptSize(3, 64, 2, 32, 4, 256))


def gradients(model: nn.Module, *, autocast: bool = True) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    ids = torch.randint(256, (4, 32), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(ids, ids)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def without_bias(model: nn.Module) -> nn.Module:
    """A CPU rounds a product once more before it adds a bias in some of torch's modes, and not in others."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.bias = None  # type: ignore[assignment]
    return model


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_float8_blocks_compile_once_to_the_same_numbers(backend: str) -> None:
    torch._dynamo.reset()
    model = without_bias(gpt())
    use_float8(model, **SMALL)
    loss, expected = gradients(model)
    counter = CompileCounterWithBackend(backend)
    for block in model.blocks:  # type: ignore[union-attr]
        block.compile(backend=counter, fullgraph=True)
    compiled, found = gradients(model)
    assert counter.frame_count == 1
    assert compiled == loss
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


def test_recomputed_float8_blocks_have_the_same_gradients() -> None:
    plain, again = gpt(), gpt()
    for model in (plain, again):
        use_float8(model, **SMALL)
    recompute(again, "full")
    loss, expected = gradients(plain)
    other, found = gradients(again)
    assert other == loss
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


@pytest.mark.parametrize(
    ("rows", "autocast"), [(17, True), (16, True), (0, True), (64, False)], ids=["odd", "few", "none", "no autocast"]
)
def test_call_with_unsuited_rows_runs_without_float8(rows: int, autocast: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(64, 96))
    x = torch.randn(rows, 64)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = layer(x)
        use_float8(layer, worth=16, rows=32)
        assert torch.equal(layer(x), expected)
        with torch.autocast("cpu", torch.bfloat16):
            fits = torch.randn(32, 64)
            assert not torch.equal(layer(fits), functional.linear(fits, layer[0].weight, layer[0].bias))


def test_layers_that_gain_use_float8_and_others_are_named() -> None:
    with torch.device("meta"):
        model = Gpt(SIZES["1.3b"])
        own = nn.Linear(4096, 4096)
        own.forward = lambda x: x  # type: ignore[method-assign, assignment]
        odd = nn.ModuleDict(
            {
                "attention": nn.MultiheadAttention(2048, 8),
                "odd": nn.Linear(4096, 4100),
                "narrow": nn.Linear(8192, 64),
                "own": own,
                "good": nn.Linear(2048, 2048),
            }
        )
    found = find_float8_layers(model)
    assert len(found.chosen) == 4 * 24
    assert list(found.left) == ["head"]
    assert "96 of 97 linear layers (blocks.*.qkv, blocks.*.proj, blocks.*.fc1, blocks.*.fc2)" in str(found.decision())
    other = find_float8_layers(odd)
    assert other.chosen == ("good",)
    assert set(other.left) == {"odd", "narrow", "own"}
    assert not find_float8_layers(Gpt(SIZES["tiny"])).chosen


def test_tied_or_untied_head_is_not_put_in_float8() -> None:
    def model(outputs: int) -> nn.Module:
        with torch.device("meta"):
            inner = nn.Linear(2048, 2048)  # as wide as there are positions, which makes it no head
            parts: list[nn.Module] = [nn.Embedding(32000, 2048), nn.Embedding(2048, 2048), inner]
            return nn.Sequential(*parts, nn.Linear(2048, outputs))

    assert find_float8_layers(model(32000)).chosen == ("2",)
    assert find_float8_layers(model(4096)).chosen == ("2", "3")
    tied = model(32000)
    tied[3].weight = tied[0].weight  # type: ignore[index, union-attr]
    assert find_float8_layers(tied).chosen == ("2",)


def test_float8_keeps_state_names_and_undo_restores_the_model() -> None:
    model = gpt()
    before, expected = copy.deepcopy(model.state_dict()), gradients(model)
    _, undo = use_float8(model, **SMALL)
    assert list(model.state_dict()) == list(before)
    changed = gradients(model)
    assert not torch.equal(changed[1]["blocks.0.qkv.weight"], expected[1]["blocks.0.qkv.weight"])
    undo()
    assert not any("forward" in module.__dict__ for module in model.modules())
    again = gradients(model)
    assert again[0] == expected[0]
    assert all(torch.equal(again[1][name], gradient) for name, gradient in expected[1].items())


def test_float8_training_reaches_the_loss_of_bf16() -> None:
    ids = torch.arange(64).unsqueeze(1)
    while ids.size(1) < 17:  # each token follows from the one before
        ids = torch.cat([ids, (5 * ids[:, -1:] + 3) % 64], 1)
    ends = {}
    for precision in ("bf16", "fp8"):
        torch.manual_seed(0)
        model = Gpt(GptSize(1, 32, 2, 16, 8, 64))
        if precision == "fp8":
            use_float8(model, **SMALL)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(24):
            batch = ids[step % 8 :: 8]
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(batch[:, :-1], batch[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        ends[precision] = sum(losses[-8:]) / 8
        assert ends[precision] < 0.5 * losses[0]
    assert ends["fp8"] == pytest.approx(ends["bf16"], rel=0.05)


def plan_of(**more: Any) -> Plan:
    return Plan(
        run_dir="",
        batch=BatchPlan(2048, 1, 1),
        precision=PrecisionPlan("fp8"),
        optimizer=OptimizerPlan(learning_rate=1e-3),
        **more,
    )


@quick_products()
def test_run_reports_its_fp8_layers_and_restores_the_model() -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(1280, 1280), nn.ReLU()) for _ in range(2)]
    model = nn.Sequential(nn.Linear(16, 1280), nn.Sequential(*blocks), nn.Linear(1280, 4))
    plan, task = plan_of(memory=MemoryPlan(recompute="full")), Task(model)
    session = Session.open(WorkerEnv(), device="cpu", collectives="gloo", timeout_s=60)
    strategy = TorchMesh(plan)
    strategy.check(task)
    strategy.setup(task, session)
    assert "2 of 4 linear layers (*.*.0)" in str(strategy.decisions[0])
    x = torch.randn(2048, 16)
    micro = [Microbatch((x, (x[:, 0] > 0).long()), 1.0, 2048)]
    losses = [float(strategy.train_step(micro).loss) for _ in range(2)]
    assert losses[-1] < losses[0]
    strategy.close()
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_model_without_a_layer_for_fp8_is_refused() -> None:
    with pytest.raises(PlanError, match="no linear layer of the model would run in it") as caught:
        TorchMesh(plan_of()).check(Task(nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 10))))
    assert "mixed_precision='bf16'" in str(caught.value)


GPUS = {"hopper": Gpu("H100", compute_capability=9.0), "ampere": Gpu("A100", compute_capability=8.0)}


@pytest.mark.parametrize(
    ("gpu", "settings", "refusal"),
    [
        ("hopper", {}, ""),
        ("hopper", {"device": "cpu"}, "only with device='cuda'"),
        ("ampere", {}, "compute capability 8.0"),
        ("hopper", {"backend": "fsdp"}, ""),
        ("hopper", {"tensor_parallel": 2}, "fp8"),
        ("hopper", {"reproducible": "bitwise"}, "bitwise"),
    ],
)
def test_fp8_is_planned_only_where_it_can_run(gpu: str, settings: dict[str, Any], refusal: str) -> None:
    hardware = Hardware(gpus=(GPUS[gpu],) * 2)
    config = DistributedConfig(mixed_precision="fp8", num_gpus=2, **settings)
    if not refusal:
        plan = make_plan(config, JobProfile(32, samples=1000), hardware, run_dir="", world=WorkerEnv(world_size=2))
        assert plan.precision.kind == "fp8"
        return
    with pytest.raises(PlanError, match=refusal):
        make_plan(config, JobProfile(32, samples=1000), hardware, run_dir="", world=WorkerEnv(world_size=2))
