"""Context parallelism: from the first block's input to the last block's output, a rank has its part of the sequence.

What comes before and after the blocks runs on the whole sequence, the same on every rank. Attention in a block is over
the keys and values of all ranks. The gradient that leaves the gathered output is multiplied by the number of ranks, so
that the mean over the group is right for every parameter: those after the blocks, which have the same gradient on every
rank, those in and before them, which have a part of it, and those that are tied to both.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from distributed.core.errors import PlanError
from distributed.strategies.blocks import main_stack
from distributed.strategies.context_attention import HALF, SequencePart, autocast_dtype
from distributed.strategies.recompute import forward_name, restore_forward

_INNER = "_forward_on_part"
_BUCKET_BYTES = 64 << 20
_TOLERANCE, _HALF_TOLERANCE = 1e-4, 2e-2  # of what the blocks add to their input, in float32; of a result in half of it
_NOTHING = torch.empty(0)


@dataclass
class _Watched:
    """What was seen of one run: into the blocks, out of them, and the result, all in float32."""

    input: torch.Tensor = _NOTHING
    output: torch.Tensor = _NOTHING
    result: torch.Tensor = _NOTHING
    dtype: torch.dtype = torch.float32
    is_half: bool = False


class ContextParallel:
    """Shares a sequence out over the ranks of a group, in the blocks of a model that does not know of it.

    The ranks must have the same input and the same random numbers; dropout in a block is then the same in every part.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, *, stack: str | None = None) -> None:
        path = main_stack(module) if stack is None else stack
        if path is None:
            raise PlanError(
                "the model has no stack of blocks to share a sequence out in",
                why="it holds no list of two or more modules of one class",
                do="set context_parallel=1",
            )
        self._module = module
        self._part = SequencePart(group)
        self._on = True
        self._watched: _Watched | None = None
        self._restores: list[Callable[[], None]] = []
        blocks = list((module.get_submodule(path) if path else module).children())
        attentions = [m for block in blocks for m in block.modules() if isinstance(m, nn.MultiheadAttention)]
        self._dim = 0 if any(not attention.batch_first for attention in attentions) else 1
        self._depth = len(blocks)
        for index, block in enumerate(blocks):
            self._patch(block, self._block_forward(block, index == 0, index == len(blocks) - 1))
        for attention in attentions:
            self._patch(attention, self._part.multihead_forward(attention, _INNER))
        for layer in module.modules():
            if isinstance(layer, nn.TransformerEncoderLayer):
                self._set(layer, "activation_relu_or_gelu", 0)  # its fused form in eval calls no attention
            elif isinstance(layer, nn.TransformerEncoder):
                self._set(layer, "use_nested_tensor", False)

    def close(self) -> None:
        """Give the model back as it was."""
        while self._restores:
            self._restores.pop()()

    @contextmanager
    def off(self) -> Iterator[None]:
        """Every rank computes the whole sequence."""
        before, self._on = self._on, False
        try:
            yield
        finally:
            self._on = before

    def finish_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Make every gradient the one of the whole sequence: the mean over the group, as a data-parallel mean would."""
        gradients = [parameter.grad for parameter in parameters.values() if parameter.grad is not None]
        local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
        for bucket in _buckets(local):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket]).div_(self._part.size)
            dist.all_reduce(flat, group=self._part.group)
            for gradient, mean in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(mean.view_as(gradient))

    def verify(self, run: Callable[[], torch.Tensor]) -> None:
        """Compare with the whole sequence on every rank, and refuse a model that this would train wrongly.

        `run` computes an output or a loss of a batch. What leaves the blocks is compared as well, and tells more.
        """
        with _evaluating(self._module):
            with self.off():
                expected = self._watch(run)
            try:
                found = self._watch(run)
            except RuntimeError as error:
                if isinstance(error, dist.DistError | torch.OutOfMemoryError):
                    raise
                raise self._part.refusal(f"a part of a sequence alone cannot pass through it: {error}") from error
        noise = torch.finfo(torch.float32).eps * math.sqrt(2 * self._depth) * expected.output.norm()
        change = (expected.output - expected.input).norm() + noise / _TOLERANCE
        errors = [(found.output - expected.output).norm() / change.clamp_min(1e-30)]
        errors += [(found.result - expected.result).norm() / expected.result.norm().clamp_min(1e-30)]
        limits = torch.tensor([_TOLERANCE, _HALF_TOLERANCE if expected.is_half else _TOLERANCE], device=change.device)
        excess = torch.stack(errors) / limits
        dist.all_reduce(excess, op=dist.ReduceOp.MAX, group=self._part.group)
        if not bool((excess <= 1).all()):
            worst = int(excess.argmax())
            off_by, limit = (excess * limits)[worst].item(), limits[worst].item()
            raise self._part.refusal(f"its output is off by {off_by:.1e} of its size, where {limit:.0e} is allowed")

    def _watch(self, run: Callable[[], torch.Tensor]) -> _Watched:
        self._watched = watched = _Watched()
        devices = list({p.device for p in self._module.parameters() if p.device.type == "cuda"})
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=devices):
                watched.result = _finite(run())
        finally:
            self._watched = None
        if watched.output is _NOTHING:
            raise self._part.refusal("its blocks were not called")
        return watched

    def _block_forward(self, block: nn.Module, is_first: bool, is_last: bool) -> Callable[..., Any]:
        names = _argument_names(getattr(block, forward_name(block)))

        def compute(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            inner: Callable[..., Any] = getattr(block, _INNER)
            if not self._on:
                return inner(*args, **kwargs)
            args, kwargs, length = self._cut(names, args, kwargs, is_first)
            with self._part.running(length):
                result = inner(*args, **kwargs)
            return _change_first(result, partial(self._part.gather_output, dim=self._dim)) if is_last else result

        def forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
            watched = self._watched
            if watched is None:
                return compute(block, args, kwargs)
            hidden = _first_tensor(args, kwargs)
            if is_first:
                watched.input, watched.dtype = _finite(hidden), hidden.dtype
                watched.is_half = hidden.dtype in HALF or autocast_dtype(hidden) is not None
            with _in_float32(block, hidden.device.type):
                result = compute(block, _map_tensors(args, _to_float32), _map_tensors(kwargs, _to_float32))
            if not is_last:
                return result
            watched.output = _finite(_first_tensor((result,), {}))
            return _change_first(result, lambda output: output.to(watched.dtype))

        return forward

    def _cut(
        self, names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any], is_first: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any], int]:
        """A block's arguments, cut to this rank's part of the sequence, and the part's length."""
        size = self._part.size
        hidden = _first_tensor(args, kwargs)
        whole = hidden.shape[self._dim] * (1 if is_first else size)
        if whole % size:
            raise PlanError(
                f"a sequence of {whole} positions cannot be shared out evenly over context_parallel={size} ranks",
                why="every rank needs a part of the same length",
                do=f"pad it to {-(-whole // size) * size} positions, or change context_parallel",
            )

        def cut(tensor: torch.Tensor, name: str) -> torch.Tensor:
            if tensor is hidden:
                return self._part.of(tensor, self._dim) if is_first else tensor
            dim = _sequence_dim(tensor, whole, self._dim, name)
            return tensor if dim is None else self._part.of(tensor, dim)

        named = zip(args, [*names, *[""] * len(args)], strict=False)
        args = tuple(_map_tensors(value, partial(cut, name=name)) for value, name in named)
        kwargs = {name: _map_tensors(value, partial(cut, name=name)) for name, value in kwargs.items()}
        return args, kwargs, whole // size

    def _patch(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        name = forward_name(module)
        setattr(module, _INNER, getattr(module, name))
        setattr(module, name, MethodType(forward, module))
        self._restores.append(lambda: restore_forward(module, forward_name(module), module.__dict__.pop(_INNER)))

    def _set(self, module: nn.Module, name: str, value: Any) -> None:
        before = getattr(module, name)
        setattr(module, name, value)
        self._restores.append(lambda: setattr(module, name, before))


def _buckets(gradients: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Gradients of one dtype and device, of some tens of megabytes together."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for gradient in gradients:
        kinds.setdefault((gradient.dtype, gradient.device), []).append(gradient)
    for alike in kinds.values():
        bucket: list[torch.Tensor] = []
        for gradient in alike:
            if bucket and sum(g.nbytes for g in bucket) + gradient.nbytes > _BUCKET_BYTES:
                yield bucket
                bucket = []
            bucket.append(gradient)
        yield bucket


def _sequence_dim(tensor: torch.Tensor, whole: int, hidden_dim: int, name: str) -> int | None:
    """Along which dimension an argument of a block belongs to positions; None for one that stays whole, like a mask."""
    shape = tuple(tensor.shape)
    if "mask" in name or tensor.dtype == torch.bool or shape[-2:] == (whole, whole):
        return None
    candidates = [hidden_dim, 0, len(shape) - 2]
    if not (tensor.is_floating_point() or tensor.is_complex()):
        candidates.append(len(shape) - 1)  # numbers of positions
    return next((dim for dim in candidates if 0 <= dim < len(shape) and shape[dim] == whole), None)


def _argument_names(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _first_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """The hidden states among a block's arguments, or in what it returns."""
    flat = [part for value in (*args, *kwargs.values()) for part in (value if isinstance(value, tuple) else (value,))]
    for value in flat:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 1:
            return value
    raise PlanError(
        "context_parallel does not fit this model: a block takes or returns no hidden states",
        why="they are looked for as the first floating-point tensor",
        do="set context_parallel=1",
    )


def _change_first(result: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """What a block returns, with its hidden states changed."""
    if isinstance(result, torch.Tensor):
        return change(result)
    hidden = _first_tensor((result,), {})
    return tuple(change(value) if value is hidden else value for value in result)


def _map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same, with every tensor in it changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(_map_tensors(part, change) for part in value)
    if type(value) is dict:
        return {name: _map_tensors(part, change) for name, part in value.items()}
    return value


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """In eval mode and exact in float32, with all put back after."""
    modes = {part: part.training for part in module.modules()}
    precision = torch.get_float32_matmul_precision()
    module.eval()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        for part, mode in modes.items():
            part.training = mode
            if isinstance(part, FSDPModule):
                part.reshard()  # or the root would stay whole until the next backward pass


@contextmanager
def _in_float32(block: nn.Module, device_type: str) -> Iterator[None]:
    """Let a block compute in float32, with copies of its tensors: in half precision errors would pass for rounding."""
    held: list[tuple[dict[str, Any], dict[str, Any]]] = []
    held += [(kind, dict(kind)) for m in block.modules() for kind in (m._parameters, m._buffers)]
    try:
        for kind, tensors in held:
            kind.update({name: _to_float32(t) for name, t in tensors.items() if t is not None})
        with torch.autocast(device_type, enabled=False):
            yield
    finally:
        for kind, tensors in held:
            kind.update(tensors)


def _to_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in HALF else tensor


def _finite(tensor: torch.Tensor) -> torch.Tensor:
    """In float32; a position that attends to nothing is not a number with and without context parallelism."""
    return tensor.detach().float().nan_to_num(0.0, 0.0, 0.0)
