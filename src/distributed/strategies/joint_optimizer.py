"""JointOptimizer: the optimizers of one model as one, with one state, so that all that is done with one is done once.

Checkpoints, comparisons of replicas, schedules and resharding know one optimizer with groups and a state by parameter.
The members keep their own classes and steps; their groups are the very dicts of the joint optimizer, and so is their
state, also after a state was loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from distributed.core.choices import Interval
from distributed.core.errors import Problem, TaskError


@dataclass(frozen=True)
class OptimizerSetup:
    """An optimizer of several, with what is its own: a scheduler, how often it steps, and how its gradient is clipped.

    `every=5`: it has its phase in the steps 5, 10, 15 … Without `gradient_clipping`, that setting of the run counts.

    >>> layer = nn.Linear(1, 1)
    >>> setup = OptimizerSetup(torch.optim.SGD(layer.parameters(), lr=0.1), every=2)
    >>> [step for step in range(1, 7) if setup.is_due(step)]
    [2, 4, 6]
    """

    optimizer: torch.optim.Optimizer
    scheduler: Any = None  # a scheduler of this optimizer, or a function that makes one of it
    scheduler_interval: Interval = "epoch"  # "step": after each of its own steps
    every: int = 1
    gradient_clipping: float | None = None

    def is_due(self, step: int) -> bool:
        """`step`: the number of the run's step, from 1 on."""
        return step % self.every == 0


class JointOptimizer(torch.optim.Optimizer):
    """Steps those of its members that are due: all, or the one whose phase it is.

    >>> one, other = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    >>> setups = {name: OptimizerSetup(torch.optim.SGD(part.parameters(), lr=0.5, momentum=0.9))
    ...           for name, part in (("one", one), ("other", other))}
    >>> joint = JointOptimizer(setups)
    >>> joint.due = ("other",)
    >>> one.weight.grad = other.weight.grad = torch.ones(1, 1)
    >>> joint.step()
    >>> one.weight in joint.state, other.weight in setups["other"].optimizer.state
    (False, True)
    """

    def __init__(self, setups: Mapping[str, OptimizerSetup]) -> None:
        """Raises TaskError where the members cannot be one."""
        self.setups = dict(setups)
        self.due = tuple(self.setups)
        self._stepped: dict[str, int] = {}  # how often each has, since that was last asked for
        _refuse_overlap(self.setups)
        members = self.members
        super().__init__([group for member in members.values() for group in member.param_groups], {})
        for member in members.values():
            self.state.update(member.state)
        self._tie()

    @property
    def members(self) -> dict[str, torch.optim.Optimizer]:
        return {name: setup.optimizer for name, setup in self.setups.items()}

    @staticmethod
    def describe(kinds: Mapping[str, str]) -> str:
        """For people, what each of them is; a single one has no name.

        >>> JointOptimizer.describe({"one": "SGD", "other": "Adam"}), JointOptimizer.describe({"": "SGD"})
        ('one=SGD, other=Adam', 'SGD')
        """
        return ", ".join(f"{name}={kind}" if name else kind for name, kind in kinds.items())

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step of each member that is due."""
        assert closure is None, "a closure is of one optimizer"
        for name in self.due:
            self.setups[name].optimizer.step()
            self._stepped[name] = self._stepped.get(name, 0) + 1

    def take_stepped(self) -> dict[str, int]:
        """The members that have stepped since the last call, and how often."""
        stepped, self._stepped = self._stepped, {}
        return stepped

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Torch puts a loaded state and its groups in place of those before."""
        super().__setstate__(state)
        self._tie()

    def _tie(self) -> None:
        """Let every member have its groups, and the state of all; a member may complete what is its own."""
        first = 0
        for member in self.members.values():
            groups = self.param_groups[first : first + len(member.param_groups)]
            first += len(groups)
            own = {p: self.state[p] for group in groups for p in group["params"] if p in self.state}
            member.__setstate__({"state": own, "param_groups": groups})
            self.state.update(member.state)
            member.state = self.state


def members_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizers that are one; of a plain one itself."""
    return list(optimizer.members.values()) if isinstance(optimizer, JointOptimizer) else [optimizer]


def _refuse_overlap(setups: Mapping[str, OptimizerSetup]) -> None:
    """Raise if a parameter has two optimizers, or a member keeps its state in ways of its own."""
    plain = torch.optim.Optimizer
    problems = []
    owners: dict[nn.Parameter, str] = {}
    for name, setup in setups.items():
        member = setup.optimizer
        held = [parameter for group in member.param_groups for parameter in group["params"]]
        shared = [parameter for parameter in held if owners.setdefault(parameter, name) != name]
        if shared:
            other = owners[shared[0]]
            problems.append(
                Problem(
                    f"the optimizers {other!r} and {name!r} share {len(shared)} parameters",
                    why="each step of one would change what the other's state was made for",
                    do=f"leave them out of {name!r}, or step them with {other!r} alone",
                )
            )
        kind = type(member)
        if kind.state_dict is not plain.state_dict or kind.load_state_dict is not plain.load_state_dict:
            problems.append(
                Problem(
                    f"{kind.__name__} ({name!r}) has a state_dict of its own, and is one of several optimizers",
                    why="several optimizers are saved as one, by the state that each parameter has",
                    do="use it as the only optimizer, or let it keep its state in optimizer.state",
                )
            )
    if problems:
        raise TaskError(problems)
