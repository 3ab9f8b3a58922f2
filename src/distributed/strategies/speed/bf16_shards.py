"""Sharded bf16 parameters that an optimizer steps in fp32 with stochastic rounding: no rank keeps more than 16 bits.

FSDP gathers the bf16 ("low") parameters. The optimizer has its own parameters, one for this rank's rows of each; they
have memory during its step only. Ranks with the same rows round equally, ranks with other rows independently: the
random numbers are a function of the run's seed, the step and the rank's place in the shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from distributed.core.errors import PlanError
from distributed.runtime.torch_compat import foreach_copy_
from distributed.runtime.torch_module_compat import gradient_hooks
from distributed.strategies.placement import local
from distributed.strategies.speed.bf16_parameters import BUCKET, flat_like, put, round_at_random

_MIX = 0x9E3779B97F4A7C15


class _Pair(NamedTuple):
    own: nn.Parameter  # the optimizer's: a plain tensor with this rank's rows
    low: nn.Parameter  # the one that FSDP gathers
    places: list[tuple[nn.Module, str]]  # several if it is tied


class RoundedShards:
    """The bf16 shards of a model, made after sharding and before its first call. See `Bf16Parameters`."""

    def __init__(self, module: nn.Module, seed: int, place: int) -> None:
        """`place`: of this rank in the shards."""
        self._place = place
        self.generator = torch.Generator().manual_seed(seed % 2**63)  # the same on all ranks: it gives steps their seed
        found: dict[int, tuple[nn.Parameter, list[tuple[nn.Module, str]]]] = {}
        for owner in module.modules():
            for name, parameter in owner._parameters.items():
                if parameter is not None and parameter.dtype == torch.float32:
                    found.setdefault(id(parameter), (parameter, []))[1].append((owner, name))
        self._pairs = [_pair(parameter, places) for parameter, places in found.values()]
        self._trained = [pair for pair in self._pairs if pair.own.requires_grad]
        self._owns = {id(pair.low): pair.own for pair in self._pairs}
        self._wide: list[torch.Tensor] = []
        self._is_whole = False
        self._narrow()

    def own(self, parameter: nn.Parameter) -> nn.Parameter:
        """The optimizer's parameter for one of the model's."""
        return self._owns.get(id(parameter), parameter)

    def tensors(self) -> list[torch.Tensor]:
        return [local(pair.low.detach()) for pair in self._trained]

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Give the optimizer's parameters memory and fp32 gradients, after the last backward pass of a step."""
        self._wide = []
        for bucket in _buckets(self._trained):
            lows = [local(pair.low) for pair in bucket]
            flat, values = flat_like(lows)
            foreach_copy_(values, lows)
            self._wide.append(flat)
            for pair, value in zip(bucket, values, strict=True):
                pair.own.data = value
            given = [(pair, local(pair.low.grad)) for pair in bucket if pair.low.grad is not None]
            if given:
                _, gradients = flat_like([gradient for _, gradient in given])
                foreach_copy_(gradients, [gradient for _, gradient in given])
                for (pair, _), gradient in zip(given, gradients, strict=True):
                    pair.own.grad, pair.low.grad = gradient, None

    @torch.no_grad()
    def write(self) -> None:
        """Update the low parameters after the optimizer's step."""
        drawn = int(torch.randint(2**62, (), generator=self.generator))
        if self._wide:
            noise = torch.Generator(self._wide[0].device).manual_seed((drawn + self._place * _MIX) % 2**63)
            for flat in self._wide:
                round_at_random(flat, noise)
        self._copy_back()
        self._narrow()

    def follow_trained(self) -> None:
        """Train what requires a gradient in the model by now."""
        for pair in self._pairs:
            pair.own.requires_grad_(pair.low.requires_grad)
        self._trained = [pair for pair in self._pairs if pair.own.requires_grad]

    def forget(self) -> None:
        for pair in self._trained:
            pair.low.grad = None
        self._narrow()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """A scope with the optimizer's fp32 parameters in the model, to read or write; the low ones then follow."""
        if self._is_whole:
            yield
            return
        with torch.no_grad():
            for own, low, places in self._pairs:
                own.data = local(low).float()  # each in its own memory: a save continues after this
                put(own, places)
        self._is_whole = True
        try:
            yield
        finally:
            self._copy_back(self._pairs)
            for _, low, places in self._pairs:
                put(low, places)
            self._narrow()
            self._is_whole = False

    def load_generator(self, state: torch.Tensor) -> None:
        """Load the generator's state from a checkpoint, unless it is a GPU's, of a run with replicas."""
        if state.shape == self.generator.get_state().shape:
            self.generator.set_state(state.cpu())

    def close(self) -> None:
        self.forget()

    @torch.no_grad()
    def _copy_back(self, pairs: Sequence[_Pair] | None = None) -> None:
        chosen = self._trained if pairs is None else pairs
        if chosen:
            foreach_copy_([local(pair.low) for pair in chosen], [pair.own.data for pair in chosen])

    def _narrow(self) -> None:
        self._wide = []
        for own, low, _ in self._pairs:
            own.grad = None
            own.data = local(low.detach())


def _pair(parameter: nn.Parameter, places: list[tuple[nn.Module, str]]) -> _Pair:
    """Make the parameter the low one in place, so that all references to it stay valid."""
    if parameter.grad is not None or gradient_hooks(parameter)[0]:
        raise PlanError(
            f"bf16_parameters='stochastic' with a hook on the gradient of {places[0][1]}, which is sharded",
            why="the optimizer then steps its own parameters, whose gradients do not reach the hook",
            do="let the model's forward do what the hook does, or set bf16_parameters=True",
        )
    low = nn.Parameter(parameter.detach().to(torch.bfloat16), requires_grad=parameter.requires_grad)
    low.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, low)
    own = nn.Parameter(local(parameter.detach()).float(), requires_grad=parameter.requires_grad)
    return _Pair(own, parameter, places)


def _buckets(pairs: Sequence[_Pair]) -> Iterator[list[_Pair]]:
    bucket: list[_Pair] = []
    size = 0
    for pair in pairs:
        rows = local(pair.low).numel()
        if bucket and size + rows > BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append(pair)
        size += rows
    if bucket:
        yield bucket
