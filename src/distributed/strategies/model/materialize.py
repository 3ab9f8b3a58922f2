"""Models on the meta device: memory for what a rank holds, and first values that do not depend on how it is shared out.

Each module's tensors are made whole on the CPU, initialised by the module's own means from a seed of its own, and cut.
So one process and any strategy begin with the same bytes, and beside its part a rank has one module whole at a time. A
module that initialises its children has them whole with it, so a root that does so needs memory for all of the model.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from distributed.core.errors import PlanError
from distributed.strategies.fully_sharded import rows_here
from distributed.strategies.gradient_sums import local
from distributed.strategies.layout import Layout
from distributed.strategies.paths import join

_Way = Callable[[nn.Module], Any]
_CHUNK_BYTES = 16 * 2**20  # of what is looked at together, a multiple of 8


def is_meta(module: nn.Module) -> bool:
    """Whether any tensor of a model has no memory yet.

    >>> is_meta(nn.Linear(2, 2, device="meta"))
    True
    """
    return any(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()])


def materialize(
    module: nn.Module,
    layout: Layout,
    device: torch.device,
    seed: int,
    *,
    parameters_on: torch.device | None = None,
) -> None:
    """Give every tensor that is here and on the meta device memory and its first values, after all cuts are made.

    `parameters_on` is where parameters go that are offloaded. A module is initialised by its `reset_parameters()`, and
    then by `_init_weights(module)` or `init_weights(module)` of the model that it is in.

    >>> layer = nn.Linear(2, 2, device="meta")
    >>> materialize(layer, Layout(layer), torch.device("cpu"), seed=0)
    >>> layer.weight.device.type
    'cpu'
    """
    maker = _Maker(module, layout, device, seed, parameters_on or device)
    with torch.no_grad(), torch.device("cpu"), torch.random.fork_rng(devices=[]):
        maker.make(module, "", None)
    maker.finish(module)


@torch.no_grad()
def send_weights(module: nn.Module, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Give every rank of `group` (None: of the world) the values of its first one; before anything is cut.

    What all of them have already is neither sent nor written, so that memory which they share stays shared.
    """
    source = 0 if group is None else dist.get_global_rank(group, 0)
    tensors = [t.detach() for t in (*module.parameters(), *module.buffers()) if not t.is_meta and t.numel()]
    if not tensors:
        return
    sums = torch.stack([_checksum(tensor).to(device) for tensor in tensors])
    found = torch.stack([sums, ~sums])  # of which the largest are the largest and, turned round, the smallest sums
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    for tensor, differs in zip(tensors, (found[0] != ~found[1]).tolist(), strict=True):
        if differs:
            sent = tensor.to(device).contiguous()
            dist.broadcast(sent, src=source, group=group)
            if dist.get_rank() != source:
                tensor.copy_(sent)


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """64 bits of a tensor's bytes and their places, where the tensor is; words are mixed as splitmix64 does."""
    content = tensor.contiguous().reshape(-1).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for at in range(0, len(content), _CHUNK_BYTES):
        chunk = content[at : at + _CHUNK_BYTES]
        padded = chunk.new_zeros(-(-len(chunk) // 8) * 8)
        padded[: len(chunk)] = chunk
        words = padded.view(torch.int64)
        places = torch.arange(at // 8 + 1, at // 8 + 1 + len(words), device=tensor.device)
        words += places.mul_(-7046029254386353131)
        for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
            words ^= words >> shift
            words *= factor
        total += (words ^ (words >> 31)).sum()
    return total


class _Writes(TorchDispatchMode):
    """Notes the memory that is written to, also through `tensor.data` and views."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | (kwargs or {})
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = given.get(argument.name)
                for tensor in written if isinstance(written, list | tuple) else [written]:
                    if isinstance(tensor, torch.Tensor):
                        self.storages.add(_storage(tensor))
        return func(*args, **(kwargs or {}))


class _Maker:
    def __init__(
        self, module: nn.Module, layout: Layout, device: torch.device, seed: int, parameters_on: torch.device
    ) -> None:
        self._layout, self._device, self._seed, self._parameters_on = layout, device, seed, parameters_on
        self._blank: dict[int, torch.Tensor] = {}  # whole tensors before they are initialised, by their storage
        self._missing: dict[str, list[str]] = {}  # by module: what nothing has given a value
        names: dict[int, list[str]] = {}
        tensors = dict(_tensors(module, ""))
        for name, tensor in tensors.items():
            names.setdefault(id(tensor), []).append(name)
        self._targets: dict[str, tuple[str, torch.Tensor]] = {}  # by whose values: who gets them
        for known in names.values():
            here = [name for name in known if layout.is_here(name)]
            if here and tensors[here[0]].is_meta:
                self._targets[known[0]] = (here[0], tensors[here[0]])

    def make(self, module: nn.Module, path: str, way: _Way | None) -> None:
        """Of this module, and then of those in it, unless it initialises them itself."""
        if not self._wants(module, path):
            return
        way = _way_for_others(module) or way
        self._blank = {}
        twin = self._twin(module, path, "meta")
        children = {_storage(tensor) for _, child in twin.named_children() for _, tensor in _tensors(child, "")}
        written = self._initialise(twin, path, way)
        if written & children:
            twin = self._twin(module, path, "cpu")
            self._place_all(module, twin, path, self._initialise_all(module, twin, path, way))
            return
        self._place(module, twin, path, written)
        for name, child in module.named_children():
            self.make(child, join(path, name), way)

    def _wants(self, module: nn.Module, path: str) -> bool:
        names = [name for name, _ in _tensors(module, path)]
        if any(name in self._targets for name in names):
            return True
        is_here = not names or any(self._layout.is_here(name) for name in names)
        return is_here and any(self._meta_attributes(each, name) for name, each in module.named_modules(prefix=path))

    def finish(self, module: nn.Module) -> None:
        if self._missing:
            kinds = {path: type(module.get_submodule(path)).__name__ for path in self._missing}
            listed = "\n".join(f"    {path} ({kinds[path]}): {', '.join(m)}" for path, m in self._missing.items())
            raise PlanError(
                f"a model on the meta device has tensors that nothing gives a first value:\n{listed}",
                why="they were computed in __init__, which ran without memory",
                do="define reset_parameters() in these modules so that it sets all of them, or pass a built model",
            )
        assert not self._targets, f"no module has {sorted(self._targets)}"

    def _twin(self, module: nn.Module, path: str, children_on: str, device: str = "cpu") -> nn.Module:
        """The module as it was made: of its own class, with whole tensors that hold nothing yet."""
        kind = type(module).__mro__[2] if isinstance(module, FSDPModule) else type(module)
        twin: nn.Module = object.__new__(kind)
        twin.__dict__.update(module.__dict__)
        twin._parameters, twin._buffers, twin._modules = {}, {}, {}
        for name, parameter in module._parameters.items():
            empty = None if parameter is None else self._empty(join(path, name), parameter, device)
            twin._parameters[name] = None if empty is None else nn.Parameter(empty, requires_grad=False)
        for name, buffer in module._buffers.items():
            twin._buffers[name] = None if buffer is None else self._empty(join(path, name), buffer, device)
        for name, child in module._modules.items():
            child_path = join(path, name)
            twin._modules[name] = None if child is None else self._twin(child, child_path, children_on, children_on)
        return twin

    def _empty(self, name: str, tensor: torch.Tensor, device: str) -> torch.Tensor:
        blank = torch.empty(self._layout.shape(name), dtype=tensor.dtype, device=device)
        self._blank[_storage(blank)] = blank
        return blank

    def _initialise(self, twin: nn.Module, path: str, way: _Way | None) -> set[int]:
        """What it wrote to."""
        digest = hashlib.blake2b(f"{self._seed} {path}".encode(), digest_size=8).digest()
        torch.default_generator.manual_seed(int.from_bytes(digest, "big") >> 1)
        own = _own_way(twin)
        with _Writes() as writes:
            if own is not None:
                own()
            if way is not None:
                way(twin)
        return writes.storages

    def _initialise_all(self, module: nn.Module, twin: nn.Module, path: str, way: _Way | None) -> set[int]:
        """Children first, as `Module.apply` goes."""
        written: set[int] = set()
        for (name, child), (_, child_twin) in zip(module.named_children(), twin.named_children(), strict=True):
            child_way = _way_for_others(child) or way
            written |= self._initialise_all(child, child_twin, join(path, name), child_way)
        return written | self._initialise(twin, path, way)

    def _place_all(self, module: nn.Module, twin: nn.Module, path: str, written: set[int]) -> None:
        self._place(module, twin, path, written)
        for name, child in module.named_children():
            child_twin = twin._modules[name]
            assert child_twin is not None
            self._place_all(child, child_twin, join(path, name), written)

    def _place(self, module: nn.Module, twin: nn.Module, path: str, written: set[int]) -> None:
        """The values of a module's own tensors, to where they are wanted."""
        if isinstance(module, nn.RNNBase):
            module._flat_weight_refs.clear()  # weak ones, with which a tensor cannot be swapped
        for name, whole in [*twin._parameters.items(), *twin._buffers.items()]:
            if whole is None or join(path, name) not in self._targets:
                continue
            is_blank = _storage(whole) in self._blank and _storage(whole) not in written
            if whole.is_meta or (whole.numel() and is_blank):
                self._missing.setdefault(path, []).append(name)
            here, target = self._targets.pop(join(path, name))
            on = self._parameters_on if isinstance(target, nn.Parameter) else self._device
            _fill(target, self._layout.take(here, whole), on)
        if isinstance(module, nn.RNNBase):
            module._init_flat_weights()
        for name in self._meta_attributes(module, path):
            value = twin.__dict__[name]
            if value.is_meta:
                self._missing.setdefault(path, []).append(name)
            else:
                setattr(module, name, value.to(self._device))

    def _meta_attributes(self, module: nn.Module, path: str) -> list[str]:
        """Tensors that are neither parameters nor buffers, and that were made without memory; not those that a pipeline
        has left in place of what is on other ranks."""
        found = [name for name, value in module.__dict__.items() if isinstance(value, torch.Tensor) and value.is_meta]
        return [name for name in found if join(path, name) not in self._layout]


def _fill(target: torch.Tensor, value: torch.Tensor, device: torch.device) -> None:
    """Give a tensor without memory this value, or its rows of it; it stays the same object for all who hold it."""
    if isinstance(target, DTensor):
        low, high = rows_here(target)
        fresh: torch.Tensor = torch.empty_like(target, device=device)
        local(fresh).copy_(value[low:high])
    else:
        fresh = torch.empty(value.shape, dtype=target.dtype, device=device).copy_(value)
    if isinstance(target, nn.Parameter):
        fresh = nn.Parameter(fresh, requires_grad=target.requires_grad)
    fresh.__dict__.update(target.__dict__)
    torch.utils.swap_tensors(target, fresh)


def _way_for_others(module: nn.Module) -> _Way | None:
    """A model's method that initialises the module it is given, as those of `transformers` have."""
    methods = [getattr(module, name, None) for name in ("_init_weights", "init_weights")]
    return next((method for method in methods if callable(method) and _arguments(method) == 1), None)


def _own_way(module: nn.Module) -> Callable[[], Any] | None:
    names = ["reset_parameters", "_reset_parameters"]
    if _way_for_others(module) is None:
        names += ["init_weights", "_init_weights"]
    methods = [getattr(module, name, None) for name in names]
    return next((method for method in methods if callable(method) and _arguments(method) == 0), None)


def _arguments(method: Callable[..., Any]) -> int:
    """How many it must be given."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    known = inspect.signature(method).parameters.values()
    return sum(p.default is inspect.Parameter.empty and p.kind in kinds for p in known)


def _tensors(module: nn.Module, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(path, remove_duplicate=False)
    yield from module.named_buffers(path, remove_duplicate=False)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
