"""Votes: what the ranks have found out of a loss, added up in one sum, so that all of them decide alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from distributed.strategies.base import LossTrial
from distributed.train.loss.rules import Evidence, Rule, marks_of


class Votes(NamedTuple):
    """Numbers of ranks."""

    known: float  # whose loss says what it is a mean over
    own: float  # whose model returned it
    opinions: float  # that have found something out
    by_value: float  # and that by the value of one batch
    denied: float  # which is no cross entropy
    watched: tuple[float, ...]  # who would have each mark of targets watched for
    refuted: tuple[float, ...]  # of each rule

    def left_of(self, rules: Sequence[Rule]) -> list[Rule]:
        """The rules that no rank has refuted."""
        return [rule for rule, count in zip(rules, self.refuted, strict=True) if not count]


def count_votes(found: Evidence | None, rules: list[Rule], trial: LossTrial, *, is_known: bool, is_own: bool) -> Votes:
    marks = marks_of(rules)
    mine = [float(is_known), float(is_own), 0.0, 0.0, 0.0, *(0.0 for _ in marks), *(0.0 for _ in rules)]
    if found is not None:
        watched = [float(mark in found.watched) for mark in marks]
        denied = float(found.is_by_value and all(found.refuted))
        mine[2:] = [1.0, float(found.is_by_value), denied, *watched, *map(float, found.refuted)]
    known, own, opinions, by_value, denied, *rest = trial.agree(torch.tensor(mine, dtype=torch.float64)).tolist()
    return Votes(
        known=known,
        own=own,
        opinions=opinions,
        by_value=by_value,
        denied=denied,
        watched=tuple(rest[: len(marks)]),
        refuted=tuple(rest[len(marks) :]),
    )
