"""ZeroState: what a DeepSpeed engine holds as the tree that every other strategy saves and loads, and back.

The values are the fp32 ones that the optimizer steps, in every precision of the model. ZeRO steps flat tensors of many
parameters at once, so what an optimizer counts for each parameter is one number for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from distributed.core.errors import CheckpointError, TaskError
from distributed.engines.deepspeed.flat_ranges import fill_range, range_boxes, range_shard
from distributed.engines.deepspeed.flats import Flat, Slot, flats_of, opened_part, own_range
from distributed.runtime.tensor_shard import Box, TensorShard
from distributed.strategies.base import ModelCopy, StateTree
from distributed.strategies.model.copies import COPIES
from distributed.strategies.model.optimizer_state import PLAIN, check_names, match_groups

_COUNT = "step"  # one for all elements, though it has the shape of a parameter that is a single number
_NOT_OPTIONS = ("params", "param_names", _COUNT)  # DeepSpeed's fused optimizers count in the group


class ZeroState:
    """Reads and writes one rank's part."""

    def __init__(
        self,
        module: nn.Module,
        zero: Any,
        *,
        saved: list[str],
        groups: list[list[str]],
        whole: Mapping[str, torch.Tensor],
        unused: Callable[[], frozenset[str] | None],
        is_alone: bool,
    ) -> None:
        """`saved` names what a checkpoint has of the model, `groups` the parameters of each of the optimizer's groups.

        `whole` has the fp32 values that frozen parameters had before they were made less precise. `unused` names the
        parameters that no pass uses, to which ZeRO gives a state of zeros; None: that is not known yet.
        """
        self._module, self._zero, self._saved, self._groups = module, zero, saved, groups
        self._unused, self._is_alone = unused, is_alone
        self._unused_before: frozenset[str] = frozenset()  # in the run whose state was loaded
        self._flats = flats_of(zero)
        first = {id(parameter): name for name, parameter in module.named_parameters()}
        self._first = {name: first[id(p)] for name, p in module.named_parameters(remove_duplicate=False)}
        self._names = [[first[id(slot.parameter)] for slot in slots] for slots in self._flats.members]
        self._slots = {
            name: slot
            for names, slots in zip(self._names, self._flats.members, strict=True)
            for name, slot in zip(names, slots, strict=True)
        }
        self._frozen = {name: p for name, p in module.named_parameters() if name not in self._slots}
        self._whole = {name: self._part_of_whole(name, whole[name]) for name in self._frozen if name in whole}
        kept = {index: number for number, index in enumerate(self._trained_groups())}
        self._options: list[dict[str, Any] | int] = [kept.get(index, {}) for index in range(len(groups))]

    def keep_options(self, index: int, options: dict[str, Any]) -> None:
        """Of a group without a parameter that is trained, which DeepSpeed does not keep."""
        if not isinstance(self._options[index], int):
            self._options[index] = {key: value for key, value in options.items() if key not in _NOT_OPTIONS}

    def state(self) -> StateTree:
        values, state = self._read()
        buffers = dict(self._module.named_buffers(remove_duplicate=False))
        made: dict[str, torch.Tensor | TensorShard] = {}
        for name in self._saved:
            first = self._first.get(name, name)
            if name in buffers:
                made[name] = buffers[name].detach()
            elif first in values:
                made[name] = values[first]
            else:
                values[first] = made[name] = self._read_frozen(first)
        groups = [self._read_options(index) | {"params": list(names)} for index, names in enumerate(self._groups)]
        ordered = {name: state[name] for names in self._groups for name in names if name in state}
        return {"model": made, "optimizer": {"state": ordered, "param_groups": groups}}

    @contextmanager
    def opened(self, changes: bool) -> Iterator[ModelCopy]:
        """This rank's ranges of the master values, and the buffers, by name. Every rank comes here."""
        if changes:
            self._flats.begin_writing()
        found: ModelCopy = {}
        with ExitStack() as scope:
            for index, (slots, names) in enumerate(zip(self._flats.members, self._names, strict=True)):
                flat = scope.enter_context(self._flats.opened(index, writes=changes))
                if flat.is_borrowed:
                    raise TaskError(
                        "the model's weights are in files, and a callback reads them between steps",
                        why="with offload_optimizer='nvme' they are in memory only while they are stepped",
                        do="set offload_optimizer='cpu'",
                    )
                found |= {name: _here(flat.values, slot) for slot, name in zip(slots, names, strict=True)}
            saved = set(self._saved)
            yield {name: value for name, value in (found | dict(self._module.named_buffers())).items() if name in saved}
        if changes:
            self._flats.end_writing()

    def copy_state(self, tensors: ModelCopy) -> StateTree:
        """A copy of what `opened` gives, as a checkpoint has it."""
        slots = self._slots
        return {name: self._as_saved(slots[name], t) if name in slots else t for name, t in tensors.items()}

    def load_copy(self, saved: StateTree, live: ModelCopy) -> ModelCopy:
        """This rank's ranges of a copy in a checkpoint."""
        made: ModelCopy = {}
        for name, here in live.items():
            if name in saved and name in self._slots:
                made[name] = torch.empty_like(here)
                fill_range(made[name], self._slots[name].start, saved[name])
            elif name in saved:
                made[name] = saved[name].to(here.device, copy=True)
        return made

    def whole_values(self, add: Callable[[str, torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Of every parameter, in host memory; `add` adds a tensor up over all ranks, every one of which comes here."""
        return {name: self._whole_value(name, part, add) for name, part in self._parts()}

    def _parts(self) -> Iterator[tuple[str, torch.Tensor | TensorShard]]:
        """What is here of each parameter, which is to be used before the next one is asked for."""
        for index, (slots, names) in enumerate(zip(self._flats.members, self._names, strict=True)):
            with self._flats.opened(index) as flat:
                yield from ((name, self._shard(slot, flat.values)) for slot, name in zip(slots, names, strict=True))
        yield from ((name, self._read_frozen(name)) for name in self._frozen)

    def _whole_value(
        self, name: str, part: torch.Tensor | TensorShard, add: Callable[[str, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        if isinstance(part, torch.Tensor):
            return part.to("cpu", copy=True)
        whole = torch.zeros(part.shape, dtype=part.dtype)
        for box, piece in part.pieces:
            whole[tuple(slice(start, stop) for start, stop in box)] = piece
        return add(f"values of {name}", whole).cpu()

    def boxes(self, name: str, shape: tuple[int, ...]) -> tuple[Box, ...] | None:
        """Of a tensor in a checkpoint, what this rank needs; None: all of it."""
        kind, _, path = name.partition("/")
        if kind == COPIES:
            kind, path = "model", path.partition("/")[2]
        if kind == "optimizer" and path.startswith("state/"):
            path, _, key = path.removeprefix("state/").rpartition("/")
            if key == _COUNT:
                return None
        elif kind != "model":
            return None
        slot = self._slot(self._first.get(path, path))
        if slot is None or shape != slot.shape:
            return None
        return range_boxes(slot.shape, slot.start, slot.start + slot.size)

    @torch.no_grad()
    def load(self, tree: StateTree, is_partial: bool = False) -> None:
        """What is in the tree, which may leave out some of the model if it `is_partial`. Every rank comes here."""
        model, optimizer = tree["model"], tree.get("optimizer")
        if optimizer is not None and not is_partial:  # weights that came from another program are looked at elsewhere
            self._check(model, optimizer)
        self._flats.begin_writing()
        for index, (slots, names) in enumerate(zip(self._flats.members, self._names, strict=True)):
            with self._flats.opened(index, writes=True) as flat:
                for slot, name in zip(slots, names, strict=True):
                    if name in model:
                        fill_range(_here(flat.values, slot), slot.start, model[name])
                if optimizer is not None:
                    self._write_state(flat, slots, names, optimizer["state"], self._flats.groups[index])
        if optimizer is not None:
            self._unused_before = frozenset(name for name in self._slots if name not in optimizer["state"])
        self._write_rest(model)
        self._flats.end_writing()
        if optimizer is not None:
            for index, saved in enumerate(match_groups(optimizer["param_groups"], self._groups)):
                self._write_options(index, optimizer["param_groups"][saved])

    def _read(self) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        values: dict[str, Any] = {}
        state: dict[str, dict[str, Any]] = {}
        found = self._unused()
        unused = self._unused_before if found is None else found
        for index, (slots, names) in enumerate(zip(self._flats.members, self._names, strict=True)):
            with self._flats.opened(index) as flat:
                for slot, name in zip(slots, names, strict=True):
                    values[name] = self._shard(slot, flat.values, flat.is_borrowed)
                    held = {key: self._read_value(slot, flat, value) for key, value in flat.state.items()}
                    if held and name not in unused:
                        count = self._group_of(index).get(_COUNT)
                        state[name] = held if count is None else {_COUNT: _counted(count)} | held
        return values, state

    def _read_value(self, slot: Slot, flat: Flat, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.shape == flat.values.shape:
            return self._shard(slot, value, flat.is_borrowed)
        if isinstance(value, int) and not isinstance(value, bool):
            return _counted(value)
        return value.clone() if isinstance(value, torch.Tensor) else value

    def _shard(self, slot: Slot, flat: torch.Tensor, copies: bool = False) -> torch.Tensor | TensorShard:
        here = _here(flat.detach(), slot)
        return self._as_saved(slot, here.clone() if copies else here)

    def _as_saved(self, slot: Slot, here: torch.Tensor) -> torch.Tensor | TensorShard:
        return here.view(slot.shape) if self._is_alone else range_shard(slot.shape, slot.start, here)

    def _write_state(
        self, flat: Flat, slots: list[Slot], names: list[str], saved: Mapping[str, Mapping[str, Any]], group: int
    ) -> None:
        """What a parameter has no state of is zero, as before its first step."""
        known = {key: None for name in names for key in saved.get(name, {})}
        if not known and not flat.is_borrowed:
            flat.state.clear()
        for key in known:
            held = {name: saved[name][key] for name in names if key in saved.get(name, {})}
            shaped = [slot for slot, name in zip(slots, names, strict=True) if _is_shaped(held.get(name), slot, key)]
            if not shaped:
                self._write_count(flat, key, held, group)
                continue
            if key not in flat.state:
                some = next(value for value in held.values() if value is not None)
                flat.state[key] = torch.zeros_like(flat.values, dtype=some.dtype, requires_grad=False)
            for slot, name in zip(slots, names, strict=True):
                if name in held:
                    fill_range(_here(flat.state[key], slot), slot.start, held[name])
                else:
                    _here(flat.state[key], slot).zero_()

    def _write_count(self, flat: Flat, key: str, held: Mapping[str, Any], group: int) -> None:
        """One number for all, as the optimizer in use keeps it."""
        some = next(iter(held.values()))
        different = next((name for name, value in held.items() if _number(value) != _number(some)), None)
        if different is not None:
            raise CheckpointError(
                f"{key!r} of the optimizer is {_number(held[different])} for {different}, {_number(some)} for others",
                why="DeepSpeed steps all parameters of a group together, so they must have taken as many steps",
                do="resume with the strategy that saved it, or import the weights alone: distributed checkpoint import",
            )
        options = self._zero.optimizer.param_groups[group]
        if _is_of_deepspeed(self._zero.optimizer) and key == _COUNT:
            (options if _COUNT in options or "fused" in type(self._zero.optimizer).__name__.lower() else flat.state)[
                _COUNT
            ] = int(_number(some))
        elif isinstance(some, torch.Tensor) and (options.get("capturable") or options.get("fused")):
            flat.state[key] = some.to(flat.values.device, torch.float32, copy=True)
        else:
            flat.state[key] = some.clone() if isinstance(some, torch.Tensor) else some

    def _read_frozen(self, name: str) -> torch.Tensor | TensorShard:
        slot, parameter = self._slot(name), self._frozen[name]
        if slot is None:
            return self._whole.get(name, parameter.detach())
        if name in self._whole:
            return self._shard(slot, self._whole[name])
        with opened_part(parameter) as part:
            return self._shard(slot, part, copies=True)

    def _write_rest(self, model: Mapping[str, Any]) -> None:
        """What the optimizer does not step."""
        buffers = dict(self._module.named_buffers(remove_duplicate=False))
        for name in self._saved:
            if name in buffers and name in model:
                buffers[name].copy_(model[name])
        for name, parameter in self._frozen.items():
            if name not in model:
                continue
            slot = self._slot(name)
            if slot is None:
                for target in (parameter, self._whole.get(name)):
                    if target is not None:
                        target.copy_(model[name])
                continue
            part = torch.empty(slot.size, dtype=model[name].dtype)
            fill_range(part, slot.start, model[name])
            if name in self._whole:
                self._whole[name].copy_(part)
            with opened_part(parameter, writes=True) as held:
                held[: slot.size].copy_(part)

    def _slot(self, name: str) -> Slot | None:
        """Where a parameter is; None: all of it is on every rank."""
        if name in self._slots:
            return self._slots[name]
        parameter: Any = self._frozen.get(name)
        if parameter is None or not hasattr(parameter, "ds_tensor"):
            return None
        return Slot(parameter, tuple(parameter.ds_shape), *own_range(parameter), 0)

    def _part_of_whole(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        slot = self._slot(name)
        return whole if slot is None else whole.reshape(-1)[slot.start : slot.start + slot.size].clone()

    def _trained_groups(self) -> list[int]:
        return [index for index, names in enumerate(self._groups) if any(name in self._slots for name in names)]

    def _group_of(self, flat: int) -> dict[str, Any]:
        found: dict[str, Any] = self._zero.optimizer.param_groups[self._flats.groups[flat]]
        return found

    def _live_options(self, index: int) -> dict[str, Any]:
        held = self._options[index]
        found: dict[str, Any] = self._zero.optimizer.param_groups[held] if isinstance(held, int) else held
        return found

    def _read_options(self, index: int) -> dict[str, Any]:
        live = self._live_options(index)
        return {key: PLAIN.get(key, value) for key, value in live.items() if key not in _NOT_OPTIONS}

    def _write_options(self, index: int, stored: Mapping[str, Any]) -> None:
        kept = (*_NOT_OPTIONS, *PLAIN)
        self._live_options(index).update({key: value for key, value in stored.items() if key not in kept})

    def _check(self, model: Mapping[str, Any], optimizer: StateTree) -> None:
        check_names(model, self._saved)
        match_groups(optimizer["param_groups"], self._groups)


def _here(flat: torch.Tensor, slot: Slot) -> torch.Tensor:
    return flat[slot.offset : slot.offset + slot.size]


def _is_shaped(value: Any, slot: Slot, key: str) -> bool:
    return isinstance(value, (torch.Tensor, TensorShard)) and tuple(value.shape) == slot.shape and key != _COUNT


def _number(value: Any) -> Any:
    if isinstance(value, TensorShard):
        value = value.pieces[0][1]
    return value.item() if isinstance(value, torch.Tensor) else value


def _counted(value: int) -> torch.Tensor:
    """As torch's own optimizers keep it."""
    return torch.tensor(float(value))


def _is_of_deepspeed(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.startswith("deepspeed.")
