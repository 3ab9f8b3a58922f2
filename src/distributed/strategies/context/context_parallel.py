"""Context parallelism: from the first block's input to the last block's output, a rank holds a shard of the sequence.

Layers before and after the blocks run on the whole sequence, equally on every rank. Attention in a block is over the
keys and values of all ranks. The gradient of the gathered output is multiplied by the number of ranks, so that the mean
over the group is right for every parameter: those after the blocks, which have the same gradient on every rank, those
in and before the blocks, which have a part of it, and those that are tied to both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from distributed.core.errors import PlanError
from distributed.runtime.session import Session
from distributed.runtime.torch_compat import NormBase
from distributed.runtime.world import CollectiveError
from distributed.strategies.context.arguments import (
    Arguments,
    SequenceDims,
    argument_names,
    change_first,
    first_tensor,
)
from distributed.strategies.context.attention import HALF, SequencePart, autocast_dtype
from distributed.strategies.gradient_sums import mean_gradients
from distributed.strategies.model.blocks import main_stack
from distributed.strategies.model.modes import evaluating
from distributed.strategies.model.recompute import forward_name

_INNER = "_forward_on_part"
_TOLERANCE, _HALF_TOLERANCE = 1e-4, 2e-2  # of what the blocks add to their input, in float32; of a result in half of it
_VERIFIED = 256  # positions a rank: enough to see a wrong one, and few enough for one rank to have them all in float32
_NOTHING = torch.empty(0)


@dataclass
class _Watched:
    """The records of one run: input and output of the blocks, and the result, all in float32."""

    longest: int | None  # the most positions that the blocks get; None: all
    given: torch.Tensor = _NOTHING  # to the first block
    whole: int = 0  # positions of the batch
    length: int = 0  # those that the blocks have
    input: torch.Tensor = _NOTHING
    output: torch.Tensor = _NOTHING
    result: torch.Tensor = _NOTHING
    is_half: bool = False


class ContextParallel:
    """Shards a sequence over the ranks of a group, in the blocks of a model that is not changed for it.

    The ranks must have the same input and the same random numbers; random numbers along a shard differ between ranks.
    """

    def __init__(
        self, module: nn.Module, group: dist.ProcessGroup, session: Session, *, stack: str | None = None
    ) -> None:
        path = main_stack(module) if stack is None else stack
        if path is None:
            raise PlanError(
                "the model has no stack of blocks in which a sequence could be sharded",
                why="the model holds no list of two or more modules of one class",
                do="set context_parallel=1",
            )
        self._module, self._session = module, session
        self._on = True
        self._watched: _Watched | None = None
        blocks = list((module.get_submodule(path) if path else module).children())
        _refuse_statistics(path, blocks)
        attentions = [m for block in blocks for m in block.modules() if isinstance(m, nn.MultiheadAttention)]
        self._dim = 0 if any(not attention.batch_first for attention in attentions) else 1
        self._part = SequencePart(group, self._dim)
        self._dims = SequenceDims(self._dim)
        self._depth = len(blocks)
        for index, block in enumerate(blocks):
            _patch(block, self._block_forward(block, index))
        for attention in attentions:
            _patch(attention, self._part.multihead_forward(attention, _INNER))
        for layer in module.modules():
            if isinstance(layer, nn.TransformerEncoderLayer):
                layer.activation_relu_or_gelu = 0  # its fused form in eval calls no attention
            elif isinstance(layer, nn.TransformerEncoder):
                layer.use_nested_tensor = False

    @contextmanager
    def off(self) -> Iterator[None]:
        """A scope in which every rank computes the whole sequence."""
        before, self._on = self._on, False
        try:
            yield
        finally:
            self._on = before

    def finish_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Reduce gradients to those of the whole sequence: the mean over the group, as in data parallelism."""
        mean_gradients("gradients over context ranks", parameters.values(), self._session, self._part.group)

    def verify(self, run: Callable[[], torch.Tensor], *, positions: int = _VERIFIED) -> None:
        """Compare with a run of the whole sequence on every rank, and refuse a model whose result differs.

        `run` computes an output or a loss of a batch. The output of the blocks is compared as well, which is more
        precise. The blocks get the first `positions` per rank only, unless they need the whole length of the batch.
        """
        self._dims = SequenceDims(self._dim)
        refusals: list[PlanError] = []
        with evaluating(self._module), _exactly(self._module):
            for longest in (positions * self._part.size, None):
                for _ in self._dims.choices():
                    found = self._compare(run, longest)
                    if found is True:
                        return
                    refusals += [found] if isinstance(found, PlanError) else []
                if refusals:
                    raise refusals[0]

    def _compare(self, run: Callable[[], torch.Tensor], longest: int | None) -> bool | PlanError:
        """True if both runs agree, otherwise the refusal; False if the blocks take no shorter sequence."""
        expected, found = _Watched(longest), _Watched(longest)
        try:
            with self.off():
                self._watch(run, expected)
        except (RuntimeError, ValueError, IndexError) as error:
            if expected.length == expected.whole or isinstance(error, dist.DistError | CollectiveError):
                raise
            return False
        try:
            self._watch(run, found)
        except RuntimeError as error:
            if isinstance(error, dist.DistError | CollectiveError):
                raise
            refusal = self._part.refusal(f"a shard of a sequence cannot pass through it: {error}")
            refusal.__cause__ = error
            return refusal
        except PlanError as refusal:
            return refusal
        noise = torch.finfo(torch.float32).eps * math.sqrt(2 * self._depth) * expected.output.norm()
        change = (expected.output - expected.input).norm() + noise / _TOLERANCE
        errors = [(found.output - expected.output).norm() / change.clamp_min(1e-30)]
        errors += [(found.result - expected.result).norm() / expected.result.norm().clamp_min(1e-30)]
        limits = torch.tensor([_TOLERANCE, _HALF_TOLERANCE if expected.is_half else _TOLERANCE], device=change.device)
        excess = torch.stack(errors) / limits
        self._session.max("check of shared sequences", excess, self._part.group)
        if bool((excess <= 1).all()):
            return True
        worst = int(excess.argmax())
        off_by, limit = (excess * limits)[worst].item(), limits[worst].item()
        return self._part.refusal(f"its output is off by {off_by:.1e} of its size, where {limit:.0e} is allowed")

    def _watch(self, run: Callable[[], torch.Tensor], watched: _Watched) -> None:
        self._watched = watched
        devices = list({p.device for p in self._module.parameters() if p.device.type == "cuda"})
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=devices):
                watched.result = _finite(run())
        except torch.OutOfMemoryError as error:
            raise PlanError(
                f"there is not enough memory to check that context_parallel={self._part.size} fits this model",
                why=f"before the first step each rank computes a batch as one alone would, its blocks in float32 on "
                f"{watched.length} positions: {str(error).partition(chr(10))[0]}",
                do="use a smaller batch_size, or shard the model too, with sharding=full",
            ) from error
        finally:
            self._watched = None
        if watched.output is _NOTHING:
            raise self._part.refusal("its blocks were not called")

    def _block_forward(self, block: nn.Module, index: int) -> Callable[..., Any]:
        names = argument_names(getattr(block, forward_name(block)))
        is_last = index == self._depth - 1

        def compute(block: nn.Module, given: Arguments) -> Any:
            inner: Callable[..., Any] = getattr(block, _INNER)
            if not self._on:
                return inner(*given.args, **given.kwargs)
            given, length = self._cut(index, names, given)
            with self._part.running(length), self._part.masks.running(given.hidden):
                result = inner(*given.args, **given.kwargs)
            return change_first(result, partial(self._part.gather_output, dim=self._dim)) if is_last else result

        def forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
            given, watched = Arguments(args, kwargs), self._watched
            if watched is None:
                return compute(block, given)
            given = self._begin(watched, index, names, given)
            with _in_float32(block, given.hidden.device.type):
                result = compute(block, given.map(_to_float32))
            return self._end(watched, result) if is_last else result

        return forward

    def _begin(self, watched: _Watched, index: int, names: list[str], given: Arguments) -> Arguments:
        """Record a block's input in a watched run."""
        hidden = given.hidden
        if index == 0:
            watched.given, watched.whole = hidden, hidden.shape[self._dim]
            self._check_length(watched.whole)
            watched.length = min(watched.whole, watched.longest or watched.whole)
            watched.is_half = hidden.dtype in HALF or autocast_dtype(hidden) is not None
            begun = hidden.narrow(self._dim, 0, watched.length)
            watched.input = _finite(begun)
        if watched.length == watched.whole:
            return given
        given = self._dims.shorten(index, names, given, watched.whole, watched.length)
        return given if index else given.map(lambda tensor: begun if tensor is hidden else tensor)

    def _end(self, watched: _Watched, result: Any) -> Any:
        """Record the last block's output in a watched run, with the length and precision of the first block's input."""
        watched.output = _finite(first_tensor((result,)))
        rest = watched.given.narrow(self._dim, watched.length, watched.whole - watched.length)
        return change_first(result, lambda output: torch.cat([output.to(rest.dtype), rest], self._dim))

    def _cut(self, index: int, names: list[str], given: Arguments) -> tuple[Arguments, int]:
        """A block's arguments, cut to this rank's shard of the sequence, and the shard's length."""
        hidden = given.hidden
        whole = hidden.shape[self._dim] * (1 if index == 0 else self._part.size)
        self._check_length(whole)
        given = self._dims.cut(index, names, given, whole, self._part.of)
        if index == 0:
            part = self._part.of(hidden, self._dim)
            given = given.map(lambda tensor: part if tensor is hidden else tensor)
        return given, whole // self._part.size

    def _check_length(self, whole: int) -> None:
        size = self._part.size
        if whole % size:
            raise PlanError(
                f"a sequence of {whole} positions cannot be sharded evenly over context_parallel={size} ranks",
                why=f"every rank needs a shard of the same length, and {whole} is not a multiple of {size}",
                do=f"pad it to {-(-whole // size) * size} positions, or change context_parallel",
            )


def _refuse_statistics(path: str, blocks: Sequence[nn.Module]) -> None:
    """Refuse BatchNorm and the like in blocks; a check in evaluation mode would not notice them."""
    for block in blocks:
        found = next((type(m).__name__ for m in block.modules() if isinstance(m, NormBase)), None)
        if found is not None:
            raise PlanError(
                f"a block of {path or 'the model'} has a {found} layer, with context_parallel",
                why="the layer takes statistics over positions, and each rank has only a shard of them",
                do="use LayerNorm or RMSNorm in the blocks, or set context_parallel=1",
            )


def _patch(module: nn.Module, forward: Callable[..., Any]) -> None:
    name = forward_name(module)
    setattr(module, _INNER, getattr(module, name))
    setattr(module, name, MethodType(forward, module))


@contextmanager
def _exactly(module: nn.Module) -> Iterator[None]:
    """Run in float32 without fused paths; parameters that FSDP gathered for it are resharded after."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()  # or the root would stay whole until the next backward pass


@contextmanager
def _in_float32(block: nn.Module, device_type: str) -> Iterator[None]:
    """Let a block compute in float32 on copies: in half precision, errors look like rounding."""
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
    """A tensor in float32 without NaN: a position that attends to nothing is NaN in both runs."""
    return tensor.detach().float().nan_to_num(0.0, 0.0, 0.0)
