"""An optimizer's groups in a checkpoint and in this run, and what of a scheduler's state goes by their order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from distributed.core.errors import CheckpointError
from distributed.strategies.model.optimizer_state import PLAIN, check_parameters, differing_options, match_groups
from distributed.train.resume.changes import Change, Effect
from distributed.train.schedule import OF_OPTIMIZERS

Groups = Sequence[Mapping[str, Any]]  # options, and in "params" the names
_BY_GROUP = ("peaks", "base_lrs", "_last_lr", "min_lrs", "max_lrs", "base_momentums", "max_momentums", "lr_lambdas")
_NOT_BY_GROUP = ("milestones", "_milestones", "_schedulers")
_MOVED = ("lr", "initial_lr", "scaled_lr", "unscaled_lr", "step", "params")  # by schedules and by us
_MOVED_BY_SOME = ("momentum", "betas")  # by schedulers that cycle
# Options that versions of torch, and libraries with the same rule, have or have not.
_NEUTRAL = {*_MOVED, *PLAIN, "param_names", "differentiable", "maximize", "decoupled_weight_decay", "amsgrad"}
_NEUTRAL |= {"bias_correction", "weight_decay"}


def other_optimizer(saved: Groups, own: Groups) -> str:
    """How the optimizer of a checkpoint that does not name it shows to be another kind; "": it does not."""
    if not saved or not own:
        return ""
    kept, mine = set(saved[0]) - _NEUTRAL, set(own[0]) - _NEUTRAL
    return "" if kept <= mine or mine <= kept else f"an optimizer with {', '.join(sorted(kept))}"


def other_groups(saved: Groups, own: Groups, schedule: Mapping[str, Any]) -> Change | None:
    """The change if saved options cannot be assigned to this run's parameter groups."""
    names = [list(group["params"]) for group in own]
    try:
        check_parameters(saved, names)
    except CheckpointError as other:
        return _refused("optimizer", saved, own, other)
    try:
        matched = match_groups(saved, names)
        _check_lists(schedule, len(saved), matched)
    except CheckpointError as other:
        return _refused("groups", saved, own, other)
    if matched != list(range(len(saved))):
        return Change("groups", _shape(saved), _shape(own), Effect.DIFFERS, note="each keeps its own options")
    return None


def _refused(name: str, saved: Groups, own: Groups, other: CheckpointError) -> Change:
    return Change(name, _shape(saved), _shape(own), Effect.BREAKS, other.problems[0])


def _shape(groups: Groups) -> str:
    """By the first parameter of each."""
    return " | ".join(f"{group['params'][0]}…" if group["params"] else "empty" for group in groups)


def option_changes(
    saved: Groups, own: Groups, bases: tuple[Any, Any], *, has_scheduler: bool, own_rates: bool
) -> Iterable[Change]:
    """Options of groups that are not those that this run's optimizer was made with. `bases`: the schedules' states."""
    effect = Effect.DIFFERS if own_rates else Effect.KEPT
    matched = match_groups(saved, [list(group["params"]) for group in own])
    for position, index in enumerate(matched):
        of = f" of group {position}" if len(own) > 1 else ""
        rates = _base(saved[index], bases[0], index), _base(own[position], bases[1], position)
        if None not in rates and rates[0] != rates[1]:
            yield Change(f"learning rate{of}", *rates, effect)
        passed = (*_MOVED, *(_MOVED_BY_SOME if has_scheduler else ()))
        for name in differing_options(saved[index], own[position]):
            if name not in passed:
                yield Change(f"{name}{of}", saved[index][name], own[position][name], effect)


def _base(group: Mapping[str, Any], schedule: Mapping[str, Any], index: int) -> float | None:
    """The rate before a schedule moved it; None: not known."""
    peaks = schedule.get("peaks")
    if peaks is not None:
        return float(peaks[index]) if index < len(peaks) else None
    return float(group["initial_lr"]) if "initial_lr" in group else None


def in_own_order(saved: Groups, own: Groups) -> list[dict[str, Any]]:
    """The groups of this run with the options of the checkpoint."""
    matched = match_groups(saved, [list(group["params"]) for group in own])
    return [{**saved[index], "params": list(mine["params"])} for mine, index in zip(own, matched, strict=True)]


def schedule_in_own_order(state: Mapping[str, Any], saved: Groups, own: Groups) -> dict[str, Any]:
    """A scheduler's state with what it keeps of each group where that group is now."""
    matched = match_groups(saved, [list(group["params"]) for group in own])
    return _reordered(state, len(saved), matched)


def with_own_lists(state: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """A scheduler's state with what this run's keeps of each group: how far it has come stays the checkpoint's."""
    found = {name: own[name] if name in _BY_GROUP and name in own else value for name, value in state.items()}
    if "_schedulers" in found and "_schedulers" in own:
        pairs = zip(found["_schedulers"], own["_schedulers"], strict=False)
        found["_schedulers"] = [with_own_lists(one, other) for one, other in pairs]
    if OF_OPTIMIZERS in found:
        mine = own.get(OF_OPTIMIZERS, {})
        found[OF_OPTIMIZERS] = {
            name: with_own_lists(found[OF_OPTIMIZERS].get(name, state), state) for name, state in mine.items()
        }
    return found


def decays(saved: Groups, schedule: Mapping[str, Any]) -> list[float]:
    """How far the rate of each group has come down from where it began."""
    found = []
    for index, group in enumerate(saved):
        base = _base(group, schedule, index)
        found.append(float(group["lr"]) / base if base else 1.0)
    return found


def _reordered(state: Mapping[str, Any], count: int, matched: Sequence[int]) -> dict[str, Any]:
    found = dict(state)
    for name, value in state.items():
        if name in _BY_GROUP and isinstance(value, list) and len(value) == count:
            found[name] = [value[index] for index in matched]
        elif name == "_schedulers":
            found[name] = [_reordered(inner, count, matched) for inner in value]
    return found


def _check_lists(state: Mapping[str, Any], count: int, matched: Sequence[int]) -> None:
    """Refuse lists as long as there are groups: whether they follow the groups' order is not known."""
    if list(matched) == list(range(count)):
        return
    if OF_OPTIMIZERS in state:
        raise CheckpointError(
            "the optimizers' groups are in another order than in the checkpoint, and there are several schedulers",
            why="each of them keeps numbers of its own optimizer's groups, whose order is not known",
            do="configure the optimizers in the order that they had, with the groups that they had",
        )
    for name, value in state.items():
        if name == "_schedulers":
            for inner in value:
                _check_lists(inner, count, matched)
        elif name not in (*_BY_GROUP, *_NOT_BY_GROUP) and isinstance(value, list | tuple) and len(value) == count:
            raise CheckpointError(
                f"the optimizer's groups are in another order than in the checkpoint, and its scheduler keeps {name!r}",
                why=f"{name!r} has {count} entries, as there are groups; whether they go by their order is not known",
                do="pass the groups in the order that they had",
            )
