"""The resume certificate: what the steps after a checkpoint came to, so that a resumed run can prove to be the same.

A run that continues after a save records digests of its state at the checkpoint and after each of the next K steps,
every rank its own. A run that resumes there takes the same steps and compares; the first component to differ is named.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from distributed.core.errors import CheckpointError
from distributed.runtime.session import Session
from distributed.train.checks.digest import digests

# In the order of cause and effect: when several differ after one step, the first of them is to blame.
COMPONENTS = (
    "position",
    "samples",
    "schedule",
    "rng",
    "scaler",
    "compression",
    "buckets",
    "synchronization",
    "loss_fn",
    "loss",
    "model",
    "optimizer",
)

Put = Callable[[str, bytes], None]
Get = Callable[[str], bytes | None]


@dataclass(frozen=True)
class Verdict:
    """What a comparison came to: of how many steps, and the first difference, if there is one.

    >>> print(Verdict(0, why="no step after it was recorded"))
    resume certificate: NOTHING COMPARED: no step after it was recorded
    """

    steps: int
    component: str = ""
    step: int = -1
    rank: int = -1
    why: str = ""  # no step was compared
    changed: tuple[str, ...] = ()  # since the checkpoint

    @property
    def passed(self) -> bool | None:
        """None: no step was compared, so nothing is proven."""
        return False if self.component else True if self.steps else None

    def __str__(self) -> str:
        more = f"; changed since the checkpoint: {'; '.join(self.changed)}" if self.changed else ""
        return f"resume certificate: {self._finding}{more}"

    @property
    def _finding(self) -> str:
        if self.component:
            return f"FAIL, {self.component!r} differs first, at step {self.step} on rank {self.rank}"
        if not self.steps:
            return f"NOTHING COMPARED: {self.why}"
        steps = f"{self.steps} steps are those" if self.steps > 1 else "1 step is that"
        return f"PASS, {steps} of the run that was not interrupted"


class ResumeCertificate:
    """Records the steps after a save, or compares them after a resume; called after every step."""

    def __init__(self, session: Session, put: Put, *, steps: int) -> None:
        self._session, self._put, self._steps = session, put, steps
        self._get: Get = lambda name: None
        self._saved_at: int | None = None
        self._compares_until: int | None = None
        self._resumed_at = -1
        self._findings: list[tuple[int, str]] = []  # (step, component) that differed here
        self._compared = 0
        self._changed: tuple[str, ...] = ()
        self._names: list[str] = []  # of the components that were compared

    def wants(self, step: int) -> bool:
        """Whether the state after this step is of interest."""
        records = self._saved_at is not None and self._saved_at <= step <= self._saved_at + self._steps
        return records or (self._compares_until is not None and step <= self._compares_until)

    def saved(self, step: int) -> None:
        """A checkpoint holds the state after `step` steps: the next ones are worth writing down."""
        if self._steps:
            self._saved_at = step

    def resumed(self, step: int, get: Get, changed: tuple[str, ...] = ()) -> bool:
        """This run begins with the state after `step` steps of another, whose records `get` reads.

        Whether there are any. `changed` is reported with the verdict.
        """
        self._get, self._changed = get, changed
        last = step - 1
        while last < step + self._steps and self._get(_name(step, self._session.rank, last + 1)) is not None:
            last += 1
        shared = torch.tensor([last], device=self._session.device)
        last = -int(self._session.max("steps to compare", -shared).item())  # what every rank can compare
        if last >= step:
            self._resumed_at, self._compares_until = step, last
        return last >= step

    def look(self, step: int, components: Mapping[str, Any]) -> Verdict | None:
        """The state after `step`. Every rank calls it for the same steps; the last comparison returns the verdict."""
        found = digests(components)
        self._session.check()
        if self._saved_at is not None and self._saved_at <= step <= self._saved_at + self._steps:
            try:
                self._put(_name(self._saved_at, self._session.rank, step), json.dumps(found).encode())
            except CheckpointError:  # a full disk, for example: there is less to compare with, and training continues
                self._saved_at = None
        if self._compares_until is None or step > self._compares_until:
            return None
        recorded = self._get(_name(self._resumed_at, self._session.rank, step))
        before = json.loads(recorded) if recorded else {}
        names = [name for name in _ordered(found) if name in before and before[name] != found[name]]
        if names == ["loss"] and "model" in before and self._session.device.type == "cuda":
            names = []  # torch's NLLLoss is not deterministic; the step that it was of came to the same weights
        self._findings += [(step, name) for name in names]
        self._compared = step - self._resumed_at  # a save looks at the same step once more
        self._names = _ordered(dict.fromkeys((*self._names, *found)))  # the state of a step has more of them
        return self.conclude() if step == self._compares_until else None

    def conclude(self) -> Verdict | None:
        """What was compared, also where the run ends before all that was recorded; None: no comparison is under way."""
        if self._compares_until is None:
            return None
        self._compares_until = None
        return self._agree(self._names)

    def _agree(self, names: list[str]) -> Verdict:
        """One verdict of all ranks: the earliest difference, by step and then by cause."""
        rows = torch.zeros(self._session.world_size, 2, dtype=torch.int64, device=self._session.device)
        if self._findings:
            step, component = min(self._findings, key=lambda found: (found[0], names.index(found[1])))
            rows[self._session.rank] = torch.tensor([step - self._resumed_at + 1, names.index(component) + 1])
        self._session.sum("resume certificate", rows)
        found = [(steps, cause, rank) for rank, (steps, cause) in enumerate(rows.tolist()) if cause]
        if not found:
            why = f"the state at step {self._resumed_at} is the one that was saved, and no step after it was recorded"
            return Verdict(self._compared, why=why, changed=self._changed)
        steps, cause, rank = min(found)
        place = names[cause - 1], self._resumed_at + steps - 1, rank
        return Verdict(self._compared, *place, changed=self._changed)


def _name(saved_at: int, rank: int, step: int) -> str:
    return f"witness/step-{saved_at:06d}/rank-{rank}-step-{step}.json"


def _ordered(components: Mapping[str, Any]) -> list[str]:
    known = [name for name in COMPONENTS if name in components]
    return known + sorted(set(components) - set(known))
