"""How a run resumes from a checkpoint of a run that differs: what is refused, reported, loaded, or left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distributed.checkpoint.restore.restoring import Restored
from distributed.core.errors import CheckpointError, first_of
from distributed.train.resume.changes import Change, Effect, Meta, changes, unknown
from distributed.train.resume.groups import (
    decays,
    in_own_order,
    option_changes,
    other_groups,
    other_optimizer,
    schedule_in_own_order,
    with_own_lists,
)

StateTree = dict[str, Any]
_RATES = ("lr", "initial_lr")


@dataclass(frozen=True)
class Resuming:
    """A checkpoint as it is to be loaded, and what has changed since it was saved."""

    tree: StateTree = field(repr=False)
    changes: tuple[Change, ...] = ()
    notes: tuple[str, ...] = ()
    takes_loss: bool = True
    decays: tuple[float, ...] = ()  # of this run's groups, where their rates are its own

    @property
    def lines(self) -> list[str]:
        return [f"changed since the checkpoint: {change}" for change in self.changes] + list(self.notes)

    @property
    def others(self) -> list[Change]:
        """Changes that make it another run."""
        return [change for change in self.changes if change.effect in (Effect.BREAKS, Effect.DIFFERS)]


def resume_from(
    shared: StateTree,
    before: Meta,
    now: Meta,
    *,
    path: str,
    groups: Sequence[Mapping[str, Any]],
    schedule: Mapping[str, Any],
    allowed: Sequence[str],
    own_rates: bool,
) -> Resuming:
    """`groups` and `schedule` are this run's own, as they were made. Raises with all that is not allowed at once."""
    saved, state = shared["optimizer"]["param_groups"], shared["schedule"]
    found = changes(_with_guesses(before, saved, groups, state, now), now, shared["progress"], path=path)
    if "optimizer" not in {change.name for change in found}:
        regrouped = other_groups(saved, groups, state)
        found += [] if regrouped is None else [regrouped]
    refused = [change for change in found if change.effect is Effect.BREAKS and change.name not in allowed]
    if refused:
        raise CheckpointError([change.refusal(path) for change in refused])
    broken = {change.name for change in found if change.effect is Effect.BREAKS}
    if not broken & {"optimizer", "groups"}:
        how = {"has_scheduler": "peaks" not in state, "own_rates": own_rates}
        found += option_changes(saved, groups, (state, schedule), **how)
    notes = _notes(before, allowed, found)
    return _taken(shared, found, broken=broken, groups=groups, schedule=schedule, notes=notes)


def _taken(
    shared: StateTree,
    found: Sequence[Change],
    *,
    broken: set[str],
    groups: Sequence[Mapping[str, Any]],
    schedule: Mapping[str, Any],
    notes: Sequence[str],
) -> Resuming:
    tree, saved, state = dict(shared), shared["optimizer"]["param_groups"], shared["schedule"]
    came_down: list[float] = []
    if broken & {"optimizer", "groups"}:  # the rates are this run's, as far down as those of the checkpoint were
        of_saved = decays(saved, state)
        came_down = [of_saved[0] if len(set(of_saved)) == 1 else 1.0] * len(groups)
        tree["schedule"] = with_own_lists(state, schedule)
        if "optimizer" in broken:
            del tree["optimizer"]
        else:
            tree["optimizer"] = shared["optimizer"] | {"param_groups": [dict(group) for group in groups]}
    else:
        tree["optimizer"] = shared["optimizer"] | {"param_groups": in_own_order(saved, groups)}
        tree["schedule"] = schedule_in_own_order(state, saved, groups)
    if "scheduler" in broken:  # this run's begins, with the rates that it was made for
        tree["schedule"] = dict(schedule)
        if "optimizer" in tree:
            tree["optimizer"] = tree["optimizer"] | {"param_groups": _with_own_rates(tree["optimizer"], groups)}
    return Resuming(tree, tuple(found), tuple(notes), "loss" not in broken, tuple(came_down))


def _with_own_rates(optimizer: StateTree, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    pairs = zip(optimizer["param_groups"], groups, strict=True)
    plain = [({key: value for key, value in group.items() if key not in _RATES}, mine) for group, mine in pairs]
    return [group | {key: mine[key] for key in _RATES if key in mine} for group, mine in plain]


def _with_guesses(
    before: Meta,
    saved: Sequence[Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    state: Mapping[str, Any],
    now: Meta,
) -> Meta:
    """What a checkpoint does not say of itself, and its state shows."""
    run = dict(before.get("run", {}))
    if "optimizer" not in run and (other := other_optimizer(saved, groups)):
        run["optimizer"] = other
    if "scheduler" not in run and ("peaks" in state) != (not now["run"]["scheduler"]):
        run["scheduler"] = "" if "peaks" in state else "of its own"
    return {**before, "run": run}


def _notes(before: Meta, allowed: Sequence[str], found: Sequence[Change]) -> list[str]:
    notes = []
    if missing := unknown(before):
        notes.append(f"the checkpoint does not say its {', '.join(missing)}: taken to be this run's")
    if idle := [name for name in allowed if name not in {change.name for change in found}]:
        notes.append(f"allow_change={','.join(idle)} has no effect: it has not changed since the checkpoint")
    return notes


def refuse_other_model(restored: Restored) -> None:
    """Raise if a checkpoint is of another model than this run's."""
    report = restored.report
    of_model = [
        *(f"{name} is only in this model" for name in report.missing if name.startswith("model/")),
        *(f"{name} is only in the checkpoint" for name in report.unexpected if name.startswith("model/")),
        *(text for text in report.mismatched if text.startswith("model/")),
    ]
    if of_model:
        raise CheckpointError(
            f"the checkpoint {restored.path} is of another model",
            why=first_of(of_model, between="; "),
            do="pass the model that was trained, or another checkpoint_dir",
        )
