"""Models on the meta device: memory for a rank's shards, and initial values that do not depend on the sharding.

Each module's tensors are made whole on the CPU, initialised by the module's own methods from a seed per module, and
cut. So one process and any strategy begin with the same bytes, and beside its shards a rank has one whole module at a
time. A module that initialises its children needs them whole too, so such a root needs memory for the whole model.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from distributed.core.errors import PlanError, TaskError
from distributed.runtime.session import Session
from distributed.runtime.torch_compat import TorchDispatchMode
from distributed.strategies.model.paths import join
from distributed.strategies.placement import Layout, local, rows_here

_Way = Callable[[nn.Module], Any]
_CHUNK_BYTES = 16 * 2**20  # of a tensor that are hashed at once, a multiple of 8


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
    """Allocate and initialise this rank's tensors on the meta device, after all cuts are made.

    `parameters_on` is the device of offloaded parameters. A module is initialised by its `reset_parameters()`, and then
    by `_init_weights(module)` or `init_weights(module)` of its model.

    >>> layer = nn.Linear(2, 2, device="meta")
    >>> materialize(layer, Layout(layer), torch.device("cpu"), seed=0)
    >>> layer.weight.device.type
    'cpu'
    """
    maker = _Maker(module, layout, device, seed, parameters_on or device)
    with torch.no_grad(), torch.device("cpu"), torch.random.fork_rng(devices=[]):
        maker.make(module, "", None)
    maker.finish(module)


def check_alike(module: nn.Module, session: Session) -> None:
    """Check that all ranks have made the same model, before they exchange its tensors; all ranks must call it."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    known = str([(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors])
    digests = session.gather_texts("the tensors of the model", hashlib.blake2b(known.encode()).hexdigest())
    differing = [rank for rank, text in enumerate(digests) if text != digests[0]]
    if differing:
        raise TaskError(
            f"rank {differing[0]} has another model than rank 0",
            why="the names, shapes or types of its parameters and buffers differ",
            do="make the same model on every rank, from the same settings and data",
        )


@torch.no_grad()
def send_weights(module: nn.Module, session: Session) -> None:
    """Broadcast the weights of rank 0, before anything is cut.

    Tensors that are already equal on all ranks are neither sent nor written, so shared memory stays shared.
    """
    tensors = [t.detach() for t in (*module.parameters(), *module.buffers()) if not t.is_meta and t.numel()]
    if not tensors:
        return
    sums = torch.stack([_checksum(tensor).to(session.device) for tensor in tensors])
    found = torch.stack([sums, ~sums])  # their maxima give the largest and, inverted, the smallest sums
    session.max("checksums of first weights", found)
    for tensor, differs in zip(tensors, (found[0] != ~found[1]).tolist(), strict=True):
        if differs:
            sent = session.send_from("first weights", 0, tensor.to(session.device).contiguous())
            if not session.is_main:
                tensor.copy_(sent)


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """A 64-bit hash of a tensor's bytes and their positions, on its device; words are mixed as in splitmix64."""
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
    """Records the memory that is written to, also through `tensor.data` and views."""

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
        self._missing: dict[str, list[str]] = {}  # by module: tensors without an initial value
        names: dict[int, list[str]] = {}
        tensors = dict(_tensors(module, ""))
        for name, tensor in tensors.items():
            names.setdefault(id(tensor), []).append(name)
        self._targets: dict[str, tuple[str, torch.Tensor]] = {}  # by the name whose values they get
        for known in names.values():
            here = [name for name in known if layout.is_here(name)]
            if here and tensors[here[0]].is_meta:
                self._targets[known[0]] = (here[0], tensors[here[0]])

    def make(self, module: nn.Module, path: str, way: _Way | None) -> None:
        """Initialise this module's tensors, and then its children's, unless it initialises them itself."""
        if not self._wants(module, path):
            return
        way = _initializer_of_others(module) or way
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
                why="tensors that __init__ computes have no values on the meta device, which has no memory",
                do="define reset_parameters() in these modules so that it sets all of them, or pass a built model",
            )
        assert not self._targets, f"no module has {sorted(self._targets)}"

    def _twin(self, module: nn.Module, path: str, children_on: str, device: str = "cpu") -> nn.Module:
        """The module with its original class and with whole, uninitialised tensors."""
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
        """Run the initialisation; returns the tensors that it wrote to."""
        digest = hashlib.blake2b(f"{self._seed} {path}".encode(), digest_size=8).digest()
        torch.default_generator.manual_seed(int.from_bytes(digest, "big") >> 1)
        initialize = _own_initializer(twin)
        with _Writes() as writes:
            if initialize is not None:
                initialize()
            if way is not None:
                way(twin)
        return writes.storages

    def _initialise_all(self, module: nn.Module, twin: nn.Module, path: str, way: _Way | None) -> set[int]:
        """Children first, as `Module.apply` goes."""
        written: set[int] = set()
        for (name, child), (_, child_twin) in zip(module.named_children(), twin.named_children(), strict=True):
            child_way = _initializer_of_others(child) or way
            written |= self._initialise_all(child, child_twin, join(path, name), child_way)
        return written | self._initialise(twin, path, way)

    def _place_all(self, module: nn.Module, twin: nn.Module, path: str, written: set[int]) -> None:
        self._place(module, twin, path, written)
        for name, child in module.named_children():
            child_twin = twin._modules[name]
            assert child_twin is not None
            self._place_all(child, child_twin, join(path, name), written)

    def _place(self, module: nn.Module, twin: nn.Module, path: str, written: set[int]) -> None:
        """Copy the values of a module's own tensors to their targets."""
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
        """Tensors on the meta device that are neither parameters nor buffers, without the placeholders of a pipeline
        for tensors on other ranks."""
        found = [name for name, value in module.__dict__.items() if isinstance(value, torch.Tensor) and value.is_meta]
        return [name for name in found if join(path, name) not in self._layout]


def _fill(target: torch.Tensor, value: torch.Tensor, device: torch.device) -> None:
    """Give a meta tensor this value, or its rows of it, in place, so that all references to it stay valid."""
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


def _initializer_of_others(module: nn.Module) -> _Way | None:
    """A model's method that initialises the module it is given, as those of `transformers` have."""
    methods = [getattr(module, name, None) for name in ("_init_weights", "init_weights")]
    return next((method for method in methods if callable(method) and _arguments(method) == 1), None)


def _own_initializer(module: nn.Module) -> Callable[[], Any] | None:
    names = ["reset_parameters", "_reset_parameters"]
    if _initializer_of_others(module) is None:
        names += ["init_weights", "_init_weights"]
    methods = [getattr(module, name, None) for name in names]
    return next((method for method in methods if callable(method) and _arguments(method) == 0), None)


def _arguments(method: Callable[..., Any]) -> int:
    """The number of required arguments of a function."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    known = inspect.signature(method).parameters.values()
    return sum(p.default is inspect.Parameter.empty and p.kind in kinds for p in known)


def _tensors(module: nn.Module, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(path, remove_duplicate=False)
    yield from module.named_buffers(path, remove_duplicate=False)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
