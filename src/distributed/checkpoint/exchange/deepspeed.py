"""DeepSpeed folders: fp32 weights and the optimizer's state, put together from the parts that its ranks wrote.

Neither DeepSpeed nor any code of the files is needed or run. A part is read when it is used, one tensor at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from distributed.checkpoint.exchange.dcp import as_sizes
from distributed.checkpoint.exchange.deepspeed_files import Folder, Part, open_folder
from distributed.checkpoint.exchange.safe_unpickle import Inert, InertFile, Stored
from distributed.core.errors import CheckpointError

_HALVES = (torch.float16, torch.bfloat16)
_PLAIN = (str, int, float, bool, type(None))
_Places = dict[str, list[tuple[int, int, int]]]  # of each parameter: rank, where its run begins there, its length


@dataclass(frozen=True)
class Gathered:
    """A tensor that lies in runs of elements in several files, and has not been read yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    runs: tuple[tuple[InertFile, Stored, int, int], ...]

    def read(self) -> torch.Tensor:
        parts = [file.tensor(stored).reshape(-1)[start : start + length] for file, stored, start, length in self.runs]
        flat = parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.empty(0)
        return flat.to(self.dtype).reshape(self.shape)


@dataclass(frozen=True)
class DeepSpeedState:
    """What a folder holds: a state dict of weights, an optimizer's state by parameters' names, and what was not had."""

    model: Mapping[str, Gathered]
    optimizer: Mapping[str, Any] | None
    step: int
    about: Mapping[str, Any]
    why_no_optimizer: str = ""
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Unit:
    """Parameters that lie one after another in one flat tensor, which the ranks have parts of."""

    number: int  # by which the optimizer's groups know it
    shapes: dict[str, tuple[int, ...]]
    places: _Places
    masters: list[Part]  # of each rank
    states: list[dict[Any, Any]]  # of each rank: parts, and numbers

    def gather(self, name: str, parts: list[Part]) -> Gathered:
        runs = tuple((*parts[rank], start, length) for rank, start, length in self.places[name])
        return Gathered(self.shapes[name], _widened(parts[0][1].dtype), runs)


class _NoOptimizer(Exception):
    """The optimizer's state is there in no form that can be had right; the weights are not concerned."""


def read_deepspeed(source: str) -> DeepSpeedState:
    """The newest tag of a folder that DeepSpeed saved to, the tag's folder itself, or a universal one."""
    try:
        folder = open_folder(source)
    except OSError as failed:
        raise CheckpointError(f"{source} cannot be read", why=failed.strerror or str(failed)) from failed
    try:
        return _read(folder)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as bad:
        raise folder.damaged(f"{type(bad).__name__}: {str(bad)[:200]}") from bad


def placeholders(tree: Any, readers: dict[int, Gathered], made: dict[int, torch.Tensor] | None = None) -> Any:
    """A tree with a tensor of one element's memory for each that is not read yet; `readers` has these by its id.

    One that has several names is one placeholder: the names are tied.
    """
    made = {} if made is None else made
    if isinstance(tree, Gathered):
        if id(tree) not in made:
            made[id(tree)] = torch.zeros((), dtype=tree.dtype).expand(tree.shape)
            readers[id(made[id(tree)])] = tree
        return made[id(tree)]
    if isinstance(tree, Mapping):
        return {key: placeholders(value, readers, made) for key, value in tree.items()}
    return [placeholders(value, readers, made) for value in tree] if isinstance(tree, list) else tree


def _read(folder: Folder) -> DeepSpeedState:
    model = folder.models[0].tree
    about = {"zero_stage": folder.stage, "ranks": folder.ranks, "version": str(model.get("ds_version"))[:40]}
    (step,) = as_sizes((model.get("global_steps", 0),))
    if not folder.stage:
        weights, left_out = _weights(folder, {}, {})
        why = "without ZeRO, DeepSpeed saves it without the parameters' names"
        if any(isinstance(stored, Stored) and stored.dtype in _HALVES for stored in model["module"].values()):
            why += ", and the fp32 weights too: these are the 16-bit ones"
        return DeepSpeedState(weights, None, step, about, why, left_out)
    units = _universal_units(folder, folder.universal) if folder.universal else _units(folder)
    masters = {name: unit.gather(name, unit.masters) for unit in units for name in unit.shapes}
    weights, left_out = _weights(folder, masters, _frozen(folder))
    try:
        optimizer, why = _optimizer(folder, units), ""
    except _NoOptimizer as lacking:
        optimizer, why = None, str(lacking)
    return DeepSpeedState(weights, optimizer, step, about, why, left_out)


def _weights(
    folder: Folder, masters: Mapping[str, Gathered], frozen: Mapping[str, Gathered]
) -> tuple[dict[str, Gathered], tuple[str, ...]]:
    """The state dict: masters of what is trained, and else what the module's own state dict holds."""
    model = folder.models[0]
    module, shared = model.tree["module"], model.tree.get("shared_params") or {}
    found = dict(masters) | dict(frozen)
    state: dict[str, Gathered] = {}
    left_out: list[str] = []
    wholes: dict[Stored, Gathered] = {}  # two names of the same bytes are tied
    for name in dict.fromkeys([*module, *found, *shared]):
        first = shared.get(name, name)
        stored = module.get(first, module.get(name))
        if first not in found and isinstance(stored, Stored):
            if folder.stage == 3 and name not in model.tree["buffer_names"]:
                raise folder.damaged(f"there are no parts of the parameter {name}")
            found[first] = wholes.setdefault(stored, _whole(model, stored))
        if first in found:
            state[str(name)] = found[first]
        else:
            left_out.append(str(name))
    if not state:
        raise folder.damaged(f"{model.path.name} holds no weights")
    return state, tuple(left_out)


def _whole(file: InertFile, stored: Stored) -> Gathered:
    return Gathered(stored.shape, _widened(stored.dtype), ((file, stored, 0, stored.numel),))


def _widened(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in _HALVES else dtype


def _frozen(folder: Folder) -> dict[str, Gathered]:
    """Parameters that are not trained: in stage 3 each rank has a part of each, in others the module has them whole."""
    shapes = folder.models[0].tree.get("frozen_param_shapes")
    if folder.stage != 3 or not shapes:
        return {}
    found = {}
    for name, shape in shapes.items():
        sizes = as_sizes(shape)
        parts = [(file, _tensor(folder, file.tree["frozen_param_fragments"][name], name)) for file in folder.models]
        each = _each(math.prod(sizes), folder.ranks)
        for file, part in parts:
            if part.numel != each:
                raise folder.damaged(f"{file.path.name} has {part.numel} elements of {name}, and should have {each}")
        runs = ((*part, 0, length) for part, length in zip(parts, _shares(math.prod(sizes), folder.ranks), strict=True))
        found[name] = Gathered(sizes, _widened(parts[0][1].dtype), tuple(runs))
    return found


def _units(folder: Folder) -> list[_Unit]:
    shapes = [{str(name): as_sizes(shape) for name, shape in group.items()} for group in folder.param_shapes]
    held = [file.tree["optimizer_state_dict"] for file in folder.optimizers]
    key = "fp32_flat_groups" if folder.stage == 3 else "single_partition_of_fp32_groups"
    paddings = held[0].get("param_alignment_paddings") or [[0] * len(group) for group in shapes]
    units = []
    for number, group in enumerate(shapes):
        masters = []
        for file, state in zip(folder.optimizers, held, strict=True):
            if len(state[key]) != len(shapes):
                raise folder.damaged(
                    f"{file.path.name} has {len(state[key])} groups of parameters, the model {len(shapes)}"
                )
            masters.append((file, _tensor(folder, state[key][number], f"group {number} of {file.path.name}")))
        if folder.stage == 3:
            places = _places_by_parameter(folder, group, masters)
        else:
            places = _places_by_group(folder, group, masters, as_sizes(paddings[number]))
        states = [_state_of(file, state, number) for file, state in zip(folder.optimizers, held, strict=True)]
        units.append(_Unit(number, group, places, masters, states))
    return units


def _places_by_group(
    folder: Folder, shapes: Mapping[str, tuple[int, ...]], masters: list[Part], paddings: tuple[int, ...]
) -> _Places:
    """Stages 1 and 2: all parameters in a row, padded at the end, cut among the ranks."""
    bounds = [0]
    for _, part in masters:
        bounds.append(bounds[-1] + part.numel)
    places, offset = {}, 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        end = offset + math.prod(shape)
        places[name] = [
            (rank, max(offset, low) - low, min(end, high) - max(offset, low))
            for rank, (low, high) in enumerate(pairwise(bounds))
            if max(offset, low) < min(end, high)
        ]
        offset = end + padding
    align = 2 * folder.ranks  # what DeepSpeed pads a group to; some versions save the padding, some do not
    if offset > bounds[-1] or -(-offset // align) != -(-bounds[-1] // align):
        raise _does_not_add_up(folder, next(iter(shapes), ""), offset, bounds[-1])
    return places


def _places_by_parameter(folder: Folder, shapes: Mapping[str, tuple[int, ...]], masters: list[Part]) -> _Places:
    """Stage 3: every parameter is padded and cut among the ranks for itself."""
    places: _Places = {}
    offset = 0
    for name, shape in shapes.items():
        lengths = _shares(math.prod(shape), folder.ranks)
        places[name] = [(rank, offset, length) for rank, length in enumerate(lengths) if length]
        offset += _each(math.prod(shape), folder.ranks)
    for _, part in masters:
        if part.numel != offset:
            raise _does_not_add_up(folder, next(iter(shapes), ""), offset, part.numel)
    return places


def _universal_units(folder: Folder, common: InertFile) -> list[_Unit]:
    """Every parameter has a folder, with a file for its weights and for each tensor of its state."""
    units = []
    for number, group in enumerate(folder.param_shapes):
        for name, shape in group.items():
            numel = math.prod(as_sizes(shape))
            state: dict[Any, Any] = {}
            for key, file in folder.parameter_files(str(name)).items():
                value = file.tree["param"] if isinstance(file.tree, dict) else file.tree
                state[key] = (file, value) if isinstance(value, Stored) else value
            master = state.pop("fp32")
            if not _is_part(master) or master[1].numel != numel:
                raise folder.damaged(f"the weights of {name} are not of {numel} elements")
            step = _state_of(common, common.tree, number).get("step")
            if "step" not in state and step is not None:  # of stage 3, whose parameters have no file for it
                state["step"] = step
            units.append(_Unit(number, {str(name): as_sizes(shape)}, {str(name): [(0, 0, numel)]}, [master], [state]))
    return units


def _optimizer(folder: Folder, units: list[_Unit]) -> dict[str, Any]:
    """As our checkpoints have it: state by parameters' names, and groups with the names of theirs."""
    held = folder.universal.tree if folder.universal else _base(folder.optimizers[0].tree["optimizer_state_dict"])
    groups = held.get("param_groups") if isinstance(held, dict) else None
    members: dict[int, list[_Unit]] = {}
    for unit in units:
        members.setdefault(unit.number, []).append(unit)
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise _NoOptimizer("the files hold no param_groups")
    numbers = [number for group in groups for number in group.get("params", ())]
    if sorted(numbers) != sorted(members):
        raise _NoOptimizer("its param_groups are not those of the weights")
    state: dict[str, Any] = {}
    for group in groups:
        for unit in (unit for number in group["params"] for unit in members[number]):
            for name in unit.shapes:
                values = _values(folder, unit, name)
                if values and "step" not in values and isinstance(group.get("step"), int):
                    values["step"] = torch.tensor(float(group["step"]))  # DeepSpeed's FusedAdam counts in the group
                if values:
                    state[name] = values
    named = [
        _options(group)
        | {"params": [name for number in group["params"] for unit in members[number] for name in unit.shapes]}
        for group in groups
    ]
    return {"state": state, "param_groups": named}


def _values(folder: Folder, unit: _Unit, name: str) -> dict[str, Any]:
    """A parameter's state: what has its elements is gathered; a number must be the same on all ranks."""
    if any(list(state) != list(unit.states[0]) for state in unit.states):
        raise folder.damaged(f"the ranks have different state for {name}")
    values: dict[str, Any] = {}
    for key in unit.states[0]:
        parts = [state[key] for state in unit.states]
        if all(_is_part(part) and part[1].shape for part in parts):
            for (_, stored), (_, master) in zip(parts, unit.masters, strict=True):
                if stored.numel < master.numel:
                    raise _does_not_add_up(folder, f"{key} of {name}", master.numel, stored.numel)
            values[str(key)] = unit.gather(name, parts)
            continue
        numbers = {_number(part, key) for part in parts}
        if len(numbers) > 1:
            raise folder.damaged(
                f"the ranks' files are of different saves: {key} of {name} is {' and '.join(map(str, sorted(numbers)))}"
            )
        # Each parameter has a tensor of its own: an optimizer counts each one up.
        values[str(key)] = torch.tensor(float(numbers.pop())) if key == "step" else numbers.pop()
    return values


def _number(value: Any, key: Any) -> float:
    if _is_part(value) and value[1].numel == 1:
        return float(value[0].tensor(value[1]).item())
    if isinstance(value, int | float):
        return value
    raise _NoOptimizer(f"its state holds {str(key)[:40]}, which is neither a tensor of a parameter's size nor a number")


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    options = {str(key): value for key, value in group.items() if key not in ("params", "step")}
    for key, value in options.items():
        if not all(isinstance(item, _PLAIN) for item in (value if type(value) in (list, tuple) else [value])):
            raise _NoOptimizer(f"{key[:40]} of its param_groups is no plain value")
    return options


def _base(state: Mapping[str, Any]) -> Any:
    return state.get("base_optimizer_state", state.get("optimizer_state_dict"))


def _state_of(file: InertFile, state: Mapping[str, Any], number: int) -> dict[Any, Any]:
    base = _base(state)
    values = base["state"].get(number) if isinstance(base, dict) and isinstance(base.get("state"), dict) else None
    if not isinstance(values, dict):
        return {}
    return {key: (file, value) if isinstance(value, Stored) else value for key, value in values.items()}


def _is_part(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], InertFile)


def _tensor(folder: Folder, value: Any, what: str) -> Stored:
    if not isinstance(value, Stored):
        kind = getattr(value, "named", "") if isinstance(value, Inert) else type(value).__name__
        raise folder.damaged(f"{what} is no tensor but a {kind}")
    return value


def _each(numel: int, ranks: int) -> int:
    return -(-numel // ranks)


def _shares(numel: int, ranks: int) -> Iterable[int]:
    """How many elements of a tensor each rank has, the padding of the last ones left out.

    >>> list(_shares(5, 4))
    [2, 2, 1, 0]
    """
    each = _each(numel, ranks)
    return [min(each, max(0, numel - rank * each)) for rank in range(ranks)]


def _does_not_add_up(folder: Folder, name: str, needed: int, held: int) -> CheckpointError:
    return folder.damaged(f"the group of {name} needs {needed} elements, and the files hold {held}")
