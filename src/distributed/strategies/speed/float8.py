"""FP8: the three products of a linear layer in 8 bits, with dynamic scaling per tensor.

Inputs and weights are e4m3, whose 3 bits of fraction keep the forward pass close; gradients are e5m2: within one tensor
they span more powers of two than the 18 of e4m3, and smaller values would be lost. Scales stay on the device, so that
nothing synchronizes and a step can be captured. Sums over a batch, which the optimizer gets, are accumulated in fp32;
sums over a layer's inputs, or over not too many outputs, in the fewer bits of the hardware's fast accumulation.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.autograd.function import FunctionCtx

from distributed.core.errors import PlanError
from distributed.core.plan import Decision
from distributed.runtime.torch_compat import scaled_mm
from distributed.strategies.checks.plain_modules import is_plain

_FORWARD, _GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
_SMALLEST = 2.0**-80  # of a tensor's largest number, or one of zeros would be divided by zero
_EXPONENT = 0x7F800000  # its bits in fp32
_TYPES = (torch.bfloat16, torch.float32)  # which have exponents for every scale
_MULTIPLE = 16  # what the hardware takes in each dimension
# Half the time of three products of rows × in × out is saved; looking at and casting their operands costs time that
# grows with rows × (in + out), and with in × out for the weight. By the rates of a Hopper GPU both are even where
# in × out / (in + out) is near 550 (a square layer of 1100), and at 2,000 rows where the layer is twice as large.
_WORTH = 640
_SHORT = 8192  # outputs of a layer, over which the gradient of its input may be summed in few bits
_ROWS = 2048


@dataclass(frozen=True)
class Float8Layers:
    """The linear layers of a model that run in fp8, and the others, by path."""

    chosen: tuple[str, ...]
    left: dict[str, str]  # the reason by path

    def decision(self) -> Decision:
        """The layers as text: equal paths of blocks once, and the reasons of the others."""
        names = ", ".join(_folded(self.chosen))
        total = len(self.chosen) + len(self.left)
        text = f"{len(self.chosen)} of {total} linear layers ({names})"
        for reason in sorted(set(self.left.values())):
            text += f"; in bf16, {reason}: {', '.join(_folded(p for p, why in self.left.items() if why == reason))}"
        return Decision("fp8", text)


def find_float8_layers(module: nn.Module, worth: int = _WORTH) -> Float8Layers:
    """The linear layers that gain by fp8, and why others do not.

    >>> model = nn.Sequential(nn.Linear(2048, 8192), nn.Linear(8192, 2048), nn.Linear(2048, 10))
    >>> find_float8_layers(model)
    Float8Layers(chosen=('0', '1'), left={'2': 'sizes that are no multiple of 16'})
    """
    inside = {id(child) for m in module.modules() if isinstance(m, nn.MultiheadAttention) for child in m.modules()}
    layers = {path: m for path, m in module.named_modules() if isinstance(m, nn.Linear) and id(m) not in inside}
    heads = _heads(module, layers)
    left = {path: why for path, layer in layers.items() if (why := _why_not(layer, path in heads, worth))}
    return Float8Layers(tuple(path for path in layers if path not in left), left)


def _why_not(layer: nn.Linear, is_head: bool, worth: int) -> str:
    inputs, outputs = layer.in_features, layer.out_features
    if not is_plain(layer, nn.Linear, "weight"):
        return "with a forward of their own"
    if layer.weight.dtype not in _TYPES:
        return f"with weights of {str(layer.weight.dtype).removeprefix('torch.')}"
    if is_head:
        return "the output, whose errors reach the loss at once"
    if inputs % _MULTIPLE or outputs % _MULTIPLE:
        return f"sizes that are no multiple of {_MULTIPLE}"
    return "too small to gain" if inputs * outputs < worth * (inputs + outputs) else ""


def _heads(module: nn.Module, layers: dict[str, nn.Linear]) -> set[str]:
    """The output layers: those tied to an embedding, and the last layer, if it has an output for each token."""
    embeddings = [m for m in module.modules() if isinstance(m, nn.Embedding)]
    tied = {id(embedding.weight) for embedding in embeddings}
    found = {path for path, layer in layers.items() if id(layer.weight) in tied}
    last = next(reversed(layers), None)
    if last is not None and layers[last].out_features == max((e.num_embeddings for e in embeddings), default=0):
        found.add(last)
    return found


def need_float8_layers(module: nn.Module, worth: int = _WORTH) -> Float8Layers:
    """The fp8 layers of a run with mixed_precision='fp8'; raises if there are none."""
    found = find_float8_layers(module, worth)
    if not found.chosen:
        reasons = "; ".join(f"{path} {why}" for path, why in list(found.left.items())[:3]) or "it has none"
        raise PlanError(
            "mixed_precision='fp8', and no linear layer of the model would run in it",
            why=f"fp8 layers must be large, with sizes that are multiples of {_MULTIPLE}: {reasons}",
            do="set mixed_precision='bf16'",
        )
    return found


def use_float8(module: nn.Module, *, worth: int = _WORTH, rows: int = _ROWS) -> tuple[Float8Layers, Callable[[], None]]:
    """Run the layers that gain in fp8, where autocast is on; returns them, and the function that undoes it.

    The modules, their names and their state stay unchanged. A call with fewer than `rows` rows, or with a number of
    rows that is no multiple of 16, runs as before.
    """
    found = need_float8_layers(module, worth)
    layers = [module.get_submodule(path) for path in found.chosen]

    def forward(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        count = x.numel() // x.shape[-1]
        fits = count >= rows and count % _MULTIPLE == 0 and x.dtype in _TYPES
        if not fits or not torch.is_autocast_enabled(x.device.type):
            return nn.functional.linear(x, self.weight, self.bias)
        return float8_linear(x, self.weight, self.bias, torch.get_autocast_dtype(x.device.type))

    for layer in layers:
        layer.forward = MethodType(forward, layer)  # type: ignore[method-assign]

    def undo() -> None:
        for layer in layers:
            layer.__dict__.pop("forward", None)

    return found, undo


def float8_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """`x @ weight.T + bias`, and its gradients, by products in 8 bits; the result is of `dtype`.

    >>> x, weight = torch.randn(16, 32), torch.randn(64, 32)
    >>> error = float8_linear(x, weight, None).float() - x @ weight.T
    >>> bool(error.norm() < 0.1 * (x @ weight.T).norm())
    True
    """
    flat = x.reshape(-1, x.shape[-1])
    result: torch.Tensor = _Linear.apply(flat, weight, bias, dtype)
    return result.view(*x.shape[:-1], weight.shape[0])


class _Linear(torch.autograd.Function):
    """Its operands are kept in 8 bits between forward and backward."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        small_x, scale_x = cast(x, _FORWARD)
        small_w, scale_w = cast(weight, _FORWARD)
        ctx.save_for_backward(small_x, scale_x, small_w, scale_w)
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype  # type: ignore[attr-defined]
        added = None if bias is None else bias.to(dtype)
        return _multiply(small_x, small_w.t(), scale_x, scale_w, dtype, bias=added, is_fast=True)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        small_x, scale_x, small_w, scale_w = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.dtypes
        small, scale = cast(gradient, _GRADIENT)
        is_short = gradient.shape[-1] <= _SHORT
        for_x = for_weight = for_bias = None
        if ctx.needs_input_grad[0]:
            for_x = _multiply(small, _by_columns(small_w), scale, scale_w, gradient.dtype, is_fast=is_short).to(of_x)
        if ctx.needs_input_grad[1]:  # with the precision of the accumulated gradient
            for_weight = _multiply(small.t().contiguous(), _by_columns(small_x), scale, scale_x, of_weight)
        if ctx.needs_input_grad[2] and of_bias is not None:
            for_bias = gradient.sum(0, dtype=torch.float32).to(of_bias)
        return for_x, for_weight, for_bias, None


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor in 8 bits, scaled by the smallest power of two that keeps it in range, and the inverse scale.

    A power of two changes no digit, so a number is rounded once, independently of the tensor's other numbers, compiled
    or not. An infinity or NaN makes all products with it NaN.

    >>> small, scale = cast(torch.tensor([1.0, -3.0, 1000.0]), torch.float8_e4m3fn)
    >>> (small.float() * scale).tolist(), scale.item()
    ([1.0, -3.0, 1024.0], 4.0)
    """
    largest = torch.linalg.vector_norm(tensor, float("inf"), dtype=torch.float32).clamp(min=_SMALLEST)
    power = (largest.view(torch.int32) & _EXPONENT).view(torch.float32)  # the largest that is not above it
    power = torch.where(largest <= 1.75 * power, power, 2 * power)
    scale = power * (1.75 / torch.finfo(dtype).max)  # both types end at 1.75 times a power of two
    return (tensor * scale.reciprocal()).to(dtype).contiguous(), scale


def _by_columns(tensor: torch.Tensor) -> torch.Tensor:
    """The same matrix in column-major order, which the hardware needs on the right."""
    return tensor.t().contiguous().t()


def _multiply(
    left: torch.Tensor,
    right: torch.Tensor,
    scale_left: torch.Tensor,
    scale_right: torch.Tensor,
    dtype: torch.dtype,
    *,
    bias: torch.Tensor | None = None,
    is_fast: bool = False,
) -> torch.Tensor:
    """The product of two scaled matrices; `is_fast` accumulates in fewer bits, whose errors grow with the length."""
    return scaled_mm(left, right, scale_left, scale_right, bias=bias, out_dtype=dtype, use_fast_accum=is_fast)


def _folded(paths: Any) -> list[str]:
    """The paths without the numbers of blocks, each once."""
    return list(dict.fromkeys(re.sub(r"(?<![^.])\d+(?=\.)", "*", path) for path in paths))
