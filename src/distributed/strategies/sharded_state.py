"""ShardedState: the state of a sharded model, by the names of the whole model.

A tensor that every rank holds whole is a tensor in it, as for a replicated model. A tensor that is sharded, or that
only some ranks hold, is a TensorShard; every rank's tree has the same names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from distributed.core.plan import ReplicatePlan
from distributed.runtime.tensor_shard import Box, TensorShard
from distributed.strategies.base import ModelCopy
from distributed.strategies.checks.replica_tensors import Named, optimizer_state, shared_buffers
from distributed.strategies.model.copies import COPIES, wide
from distributed.strategies.model.optimizer_state import PLAIN, check_names, load_state, match_groups, options_of
from distributed.strategies.placement import Layout

StateTree = dict[str, Any]


@dataclass
class ShardedState:
    """Reads and writes the tensors of one rank."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    layout: Layout
    names: Collection[str]  # of the whole model's tensors that are saved
    copied: Collection[str]  # of those that a copy of the model has
    groups: list[list[str]]  # of the whole optimizer's parameters, by their names
    is_plain: Callable[[str], bool]  # whether every rank has all of a tensor
    stores: Callable[[str], bool]  # whether this rank saves its shard of a tensor
    stores_state: Callable[[str], bool]  # whether this rank saves its shard of a parameter's optimizer state
    owns: Callable[[str], bool]  # whether this rank has the optimizer's state of a parameter
    splits_optimizer: bool  # whether ranks that have a parameter may not have its state
    gather_texts: (
        Callable[[str], list[str]] | None
    )  # a text of each rank to all; None: all have state of the same names
    _shared_outline: str = field(default="", init=False)
    _elsewhere: dict[str, dict[str, Any]] = field(default_factory=dict, init=False)

    def state(self) -> StateTree:
        return {"model": self._model(), "optimizer": self._optimizer()}

    def load(self, tree: StateTree) -> None:
        live = self._live()
        self._check_names(tree["model"])
        with torch.no_grad():
            for name, value in tree["model"].items():
                if self.layout.is_here(name):
                    self._fill(name, value, live[name])
        if "optimizer" in tree:
            self._load_optimizer(tree["optimizer"])

    def local(self, plan: ReplicatePlan) -> Named:
        """This rank's tensors, by the name of the whole tensor and the box; replicas have the same names."""
        names = {name: f"buffer {name}" for name, _ in shared_buffers(self.module, plan)}
        names |= {name: f"parameter {name}" for name, _ in self.module.named_parameters()}
        live = self._live()
        for name, title in names.items():
            if name not in self.layout:  # made after the layout
                yield title, live[name]
            elif self.layout.is_here(name):
                yield from self.boxed(title, name, live[name])
        for name, key, value in optimizer_state(self.optimizer, self.module):
            title = f"optimizer state {key} of {name}"
            if isinstance(value, torch.Tensor) and tuple(value.shape) == self._local_shape(name):
                yield from self.boxed(title, name, value)
            else:
                yield title, value

    def boxed(self, title: str, name: str, tensor: torch.Tensor) -> Named:
        """What lies here of a tensor of this name, each part under a title with its place."""
        for box, piece in self.layout.shard(name, tensor.detach()).pieces:
            if piece.numel():
                yield f"{title} {box}" if not self.layout.is_whole(name) else title, piece

    def boxes(self, name: str, shape: tuple[int, ...]) -> tuple[Box, ...] | None:
        """The ranges of a checkpoint's tensor that this rank needs; None: all of it."""
        kind, _, path = name.partition("/")
        if kind == COPIES:
            kind, path = "model", path.partition("/")[2]
        if kind == "model":
            return None if path not in self.layout or self.is_plain(path) else self.layout.boxes(path)
        if not name.startswith("optimizer/state/"):
            return None
        parameter, _, _ = path.removeprefix("state/").rpartition("/")
        if parameter not in self.layout:
            return None
        if not self.layout.is_here(parameter) or not self.owns(parameter):
            return ()
        return self.layout.boxes(parameter) if shape == self.layout.shape(parameter) else None

    def _live(self) -> dict[str, torch.Tensor]:
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        return parameters | dict(self.module.named_buffers(remove_duplicate=False))

    def _model(self) -> dict[str, Any]:
        return self._named(self.names, self._live())

    def copy(self, tensors: ModelCopy) -> dict[str, Any]:
        """A copy of the model as a checkpoint has it; every rank's has the same names."""
        return self._named([name for name in self.names if name in self.copied], tensors, widens=True)

    def load_copy(self, saved: StateTree, live: ModelCopy) -> ModelCopy:
        """This rank's part of a copy; `live`: of the model."""
        made: dict[int, torch.Tensor] = {}
        for name, here in live.items():
            if id(here) not in made and name in saved:
                made[id(here)] = torch.empty_like(here, dtype=saved[name].dtype)
                self._fill(name, saved[name], made[id(here)])
        return {name: made[id(here)] for name, here in live.items() if id(here) in made}

    def _named(self, names: Collection[str], live: ModelCopy, *, widens: bool = False) -> dict[str, Any]:
        made: dict[str, TensorShard] = {}  # a tied weight is one tensor under several names

        def value(name: str) -> torch.Tensor | TensorShard:
            if self.is_plain(name):
                return live[name].detach()
            first = self.layout.first_name(name)
            if first not in made:
                made[first] = self._shard(name, live.get(name), widens)
            return made[first]

        return {name: value(name) for name in names}

    def _shard(self, name: str, tensor: torch.Tensor | None, widens: bool = False) -> TensorShard:
        if tensor is None or not self.layout.is_here(name):
            absent = self.layout.shard(name, None)
            return replace(absent, dtype=wide(absent.dtype)) if widens else absent
        return _stored(self.layout.shard(name, tensor.detach()), self.stores(name))

    def _optimizer(self) -> StateTree:
        named = dict(self.module.named_parameters())
        names = {id(parameter): name for name, parameter in named.items()}
        held = {names[id(parameter)]: values for parameter, values in self.optimizer.state.items()}
        shapes = {name: tuple(named[name].shape) for name in held}
        elsewhere = self._others(held, shapes)
        state = {}
        for name in (name for group in self.groups for name in group):
            if name in held:
                shape = shapes[name]
                state[name] = {key: self._state_value(name, value, shape) for key, value in held[name].items()}
            elif name in elsewhere:
                state[name] = elsewhere[name]
        options = [
            {key: PLAIN.get(key, value) for key, value in group.items() if key not in ("params", "param_names")}
            for group in self.optimizer.state_dict()["param_groups"]
        ]
        groups = [option | {"params": list(members)} for option, members in zip(options, self.groups, strict=True)]
        return {"state": state, "param_groups": groups}

    def _state_value(self, name: str, value: Any, shape: tuple[int, ...]) -> Any:
        """`shape`: of the parameter, as it is here."""
        if not isinstance(value, torch.Tensor):
            return value
        is_shaped = tuple(value.shape) == shape
        if is_shaped and (not self.is_plain(name) or self.splits_optimizer):
            return _stored(self.layout.shard(name, value), self._stores_state(name))
        if self.is_plain(name) and not self.splits_optimizer:
            return value
        box = tuple((0, length) for length in value.shape)
        return TensorShard(tuple(value.shape), value.dtype, ((box, value),), self._stores_scalar(name))

    def _others(
        self, held: Mapping[str, Mapping[str, Any]], shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, dict[str, Any]]:
        """The structure of other ranks' optimizer state, without its values; every rank must call it."""
        if self.gather_texts is None:
            return {}
        mine = json.dumps({name: self._outline(name, values, shapes[name]) for name, values in held.items()})
        changed = any(
            text == "changed" for text in self.gather_texts("" if mine == self._shared_outline else "changed")
        )
        if changed:
            outlines = [json.loads(text) for text in self.gather_texts(mine)]
            merged = {name: keys for outline in outlines for name, keys in outline.items()}
            self._shared_outline = mine
            self._elsewhere = {
                name: {key: _from_outline(entry) for key, entry in keys.items()} for name, keys in merged.items()
            }
        return self._elsewhere

    def _outline(self, name: str, values: Mapping[str, Any], local_shape: tuple[int, ...]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                is_shaped = tuple(value.shape) == local_shape
                shape = self.layout.shape(name) if is_shaped else tuple(value.shape)
                found[key] = {"dtype": str(value.dtype).removeprefix("torch."), "shape": shape}
            else:
                found[key] = {"value": value}
        return found

    def _stores_state(self, name: str) -> bool:
        return self.layout.stores(name) and self.stores_state(name)

    def _stores_scalar(self, name: str) -> bool:
        """Whether this rank saves a scalar of a sharded parameter's state: the rank of the first shard does."""
        boxes = self.layout.boxes(name)
        is_first = bool(boxes) and all(start == 0 for start, _ in boxes[0])
        return self._stores_state(name) and (is_first or self.layout.is_whole(name))  # one without elements has no box

    def _local_shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.module.get_parameter(name).shape)

    def _load_optimizer(self, tree: StateTree) -> None:
        matched = match_groups(tree["param_groups"], self.groups)
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        mine = [names[id(p)] for group in self.optimizer.param_groups for p in group["params"]]
        positions = {name: index for index, name in enumerate(mine)}
        state = {}
        for name, index in positions.items():
            if name in tree["state"] and self.owns(name):
                state[index] = {key: self._local_value(name, value) for key, value in tree["state"][name].items()}
        own = self.optimizer.state_dict()["param_groups"]
        groups = [options_of(tree["param_groups"][index], mine) for mine, index in zip(own, matched, strict=True)]
        load_state(self.optimizer, {"state": state, "param_groups": groups})

    def _local_value(self, name: str, value: Any) -> Any:
        if not isinstance(value, TensorShard):
            return value
        if value.shape != self.layout.shape(name):
            return value.pieces[0][1]
        local = torch.empty_like(self.module.get_parameter(name), dtype=value.dtype, requires_grad=False)
        with torch.no_grad():
            self.layout.take_shard(name, value, local)
        return local

    def _fill(self, name: str, value: torch.Tensor | TensorShard, target: torch.Tensor) -> None:
        if isinstance(value, TensorShard):
            self.layout.take_shard(name, value, target)
        else:
            target.copy_(value)

    def _check_names(self, saved: Mapping[str, Any]) -> None:
        check_names(saved, self.names)


def _stored(found: TensorShard, stores: bool) -> TensorShard:
    """`stores`: whether this rank saves it, should the layout have it so."""
    return found if stores or not found.stores else replace(found, stores=False)


def _from_outline(entry: Mapping[str, Any]) -> Any:
    if "value" in entry:
        return entry["value"]
    return TensorShard(tuple(entry["shape"]), getattr(torch, entry["dtype"]), (), False)
