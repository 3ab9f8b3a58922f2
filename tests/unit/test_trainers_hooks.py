"""Hooks on parameters and optimizers travel to the ranks with what they hang on."""

from __future__ import annotations

import io

import torch
from torch import nn

from distributed.trainers.pickling import PickleModule


def sent(value: object) -> object:
    """As a rank gets it."""
    file = io.BytesIO()
    torch.save(value, file, pickle_module=PickleModule, pickle_protocol=5)
    file.seek(0)
    return torch.load(file, weights_only=False)


def enlarge(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(10)


def test_parameter_hooks_are_pickled_with_their_parameter() -> None:
    layer, scale = nn.Linear(3, 1, bias=False), 0.5
    weight = layer.weight
    weight.register_hook(lambda gradient: gradient * scale + 0 * weight.detach())
    weight.register_post_accumulate_grad_hook(enlarge)
    arrived = sent(layer)
    assert isinstance(arrived, nn.Linear)
    for module in (layer, arrived):
        module(torch.ones(1, 3)).sum().backward()
        assert module.weight.grad is not None
        assert module.weight.grad.tolist() == [[5.0, 5.0, 5.0]]


def test_optimizer_hooks_are_pickled_with_their_optimizer() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)

    def shrink(stepped: torch.optim.Optimizer, *_: object) -> None:
        with torch.no_grad():
            stepped.param_groups[0]["params"][0].mul_(0.5)

    optimizer.register_step_post_hook(shrink)
    arrived = sent(optimizer)
    assert isinstance(arrived, torch.optim.SGD)
    for one in (optimizer, arrived):
        held = one.param_groups[0]["params"][0]
        held.grad = torch.ones(2)
        one.step()
        assert torch.allclose(held, torch.full((2,), 0.45))
    assert arrived.param_groups[0]["lr"] == 0.1
