"""Optimizers and their state where parameters are permuted, complex, of other types, or held in parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from distributed.core.errors import PlanError, TaskError
from distributed.strategies.data_parallel.fsdp import shard
from distributed.strategies.data_parallel.gradient_norm import GradientNorm
from distributed.strategies.data_parallel.zero1 import rebind
from distributed.strategies.model.optimizer_state import load_named_state, named_state
from distributed.strategies.placement import Layout
from distributed.strategies.speed.memory_format import lay_out_state


class Holder(nn.Module):
    def __init__(self, **parameters: torch.Tensor) -> None:
        super().__init__()
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for index, p in enumerate(model.parameters()):
        p.grad = torch.empty_like(p).copy_(torch.arange(p.numel()).view(p.shape) + index + p.detach())
    optimizer.step()


def test_loaded_state_has_the_strides_of_its_parameter() -> None:
    """A fused optimizer pairs elements as they lie in memory."""
    weight = torch.randn(3, 4, dtype=torch.float64).t()
    models = [Holder(weight=weight.clone(memory_format=torch.preserve_format)) for _ in range(2)]
    whole, resumed = (torch.optim.AdamW(model.parameters(), fused=True) for model in models)
    step(models[0], whole)
    saved = named_state(whole, models[0])
    saved["state"]["weight"] = {key: value.clone().contiguous() for key, value in saved["state"]["weight"].items()}
    with torch.no_grad():
        models[1].weight.copy_(models[0].weight)
    load_named_state(resumed, models[1], saved)
    lay_out_state(resumed)
    for model, optimizer in zip(models, (whole, resumed), strict=True):
        assert not model.weight.is_contiguous()
        step(model, optimizer)
    assert torch.equal(models[0].weight, models[1].weight)


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD])
def test_scalar_optimizer_state_keeps_its_dtype(kind: type[Any]) -> None:
    model = Holder(weight=torch.ones(4, dtype=torch.float64))
    optimizer = kind(model.parameters())
    step(model, optimizer)
    saved = named_state(optimizer, model)
    resumed = kind(model.parameters())
    load_named_state(resumed, model, saved)
    wanted, found = optimizer.state[model.weight], resumed.state[model.weight]
    assert {key: value.dtype for key, value in found.items()} == {key: value.dtype for key, value in wanted.items()}
    assert all(torch.equal(found[key], value) for key, value in wanted.items())


def test_fresh_adagrad_is_rebound_but_a_used_one_is_refused() -> None:
    model, parts = (Holder(weight=torch.ones(4), phase=torch.ones(2, dtype=torch.complex64)) for _ in range(2))
    names = {id(p): name for name, p in model.named_parameters()}
    optimizer = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.5)
    rebind(optimizer, names, parts, Layout(parts))
    assert set(optimizer.state) == set(parts.parameters())
    assert optimizer.state[parts.weight]["sum"].tolist() == [0.5] * 4
    assert optimizer.state[parts.phase]["sum"].tolist() == [0.5 + 0.5j] * 2
    used = torch.optim.Adagrad(model.parameters())
    step(model, used)
    with pytest.raises(TaskError, match="state of an earlier training"):
        rebind(used, names, parts, Layout(parts))


def test_norm_of_complex_gradients_matches_torch() -> None:
    model = Holder(weight=torch.zeros(2), phase=torch.zeros(2, dtype=torch.complex64))
    model.weight.grad = torch.tensor([1.0, 2.0])
    model.phase.grad = torch.tensor([3.0 + 4.0j, 0.0 - 2.0j])
    wanted = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    gradient = GradientNorm(dict(model.named_parameters()), Layout(model), lambda name: 1, None)
    assert gradient.clip(1.0) == pytest.approx(wanted.item())
    clipped = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert clipped.item() == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ({"one": torch.ones(2), "other": torch.ones(2, dtype=torch.float64)}, "of several types"),
        ({"one": torch.ones(2), "none": torch.empty(0, 3)}, "without elements"),
    ],
)
def test_parameters_that_cannot_be_sharded_are_refused_by_name(parameters: dict[str, torch.Tensor], told: str) -> None:
    model = Holder(**parameters)
    options: dict[str, Any] = {"blocks": (), "reshard_after_forward": True, "precision": "fp32", "cpu_offload": False}
    with pytest.raises(PlanError, match=told) as refused:
        shard(model, Layout(model), None, device=torch.device("cpu"), **options)  # type: ignore[arg-type]
    assert list(parameters)[1] in str(refused.value)
