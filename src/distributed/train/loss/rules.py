"""Rules of weighting: what a loss may be a mean over, and which of them its values fit.

A loss of a batch is compared with those of its parts: it must be their mean, weighted by what it is a mean over. Rules
that do not come to the same are refuted; ranks add up what they have refuted, so that all follow one rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from distributed.strategies.base import LossTrial

# That people mark targets with which do not count; the classes among them are what tokenizers pad with.
IGNORED = (-100, -1, 0, 255, 1, 2, 3, 50256)
FLOAT_MARKS = (math.nan, -1.0, 0.0)  # of targets that are no classes

Mark = int | float

Kind = Literal["samples", "sum", "targets", "shifted", "elements"]


class Rule(NamedTuple):
    """`targets`: those that are not `ignored`; `shifted`: without the first of each sequence, as language models do;
    `elements`: of outputs with another number of rows than samples."""

    kind: Kind
    ignored: int = 0

    def weigh(self, target: torch.Tensor) -> torch.Tensor | None:
        """What a mean over this target goes over; None: the samples. Looks at no value.

        >>> target = torch.tensor([[1, 2, -100]])
        >>> Rule("targets", -100).weigh(target), Rule("shifted", -100).weigh(target)
        (tensor(2), tensor(1))
        """
        if self.kind == "targets":
            return (target != self.ignored).sum()
        return (target[..., 1:] != self.ignored).sum() if self.kind == "shifted" else None

    def fits(self, target: object) -> bool:
        if self.kind in ("samples", "sum", "elements"):
            return True
        has_classes = isinstance(target, torch.Tensor) and not target.is_floating_point() and not target.is_complex()
        return has_classes and target.dim() >= (1 if self.kind == "targets" else 2)  # type: ignore[attr-defined]


def rules_for(ignored: int) -> list[Rule]:
    """All of them, the likelier first; `ignored` is what the loss is known, or likely, to leave out."""
    marks = [ignored, *(mark for mark in IGNORED if mark != ignored)]
    counts = [Rule(kind, mark) for mark in marks for kind in ("targets", "shifted")]  # type: ignore[arg-type]
    return [Rule("samples"), Rule("sum"), *counts]


def marks_of(rules: Sequence[Rule]) -> list[Mark]:
    """By which targets may be left out."""
    return [*dict.fromkeys(rule.ignored for rule in rules if rule.kind == "targets"), *FLOAT_MARKS]


class LossPart(NamedTuple):
    """Of a batch: the loss of some samples."""

    loss: float
    size: int
    target: object


class Evidence(NamedTuple):
    """What one rank has found out."""

    refuted: tuple[bool, ...]  # of each rule
    watched: tuple[Mark, ...] = ()  # marks of targets with which the rules that are left may not hold
    is_by_value: bool = False  # it shows nothing about marks that the batch does not have


def compare(
    rules: Sequence[Rule], whole: float, parts: Sequence[LossPart], tolerance: float
) -> tuple[bool, ...] | None:
    """Which rules the loss of a batch refutes, given those of its parts; None: it shows nothing."""
    if not math.isfinite(whole) or len(parts) < 2:
        return None
    known = [part.loss for part in parts if math.isfinite(part.loss)]
    if not known:
        return None
    scale = max(abs(whole), *map(abs, known))
    return tuple(not abs(whole - _expected(rule, parts)) <= tolerance * scale for rule in rules)


def _expected(rule: Rule, parts: Sequence[LossPart]) -> float:
    """The loss of all parts together; not a number, where the rule cannot be theirs."""
    if not all(rule.fits(part.target) for part in parts):
        return math.nan
    weights = [_weight(rule, part) for part in parts]
    losses = [part.loss * weight for part, weight in zip(parts, weights, strict=True) if weight]
    total = 1.0 if rule.kind == "sum" else sum(weights)
    return sum(losses) / total if total else math.nan


def _weight(rule: Rule, part: LossPart) -> float:
    if rule.kind == "sum":
        return 1.0
    if rule.kind == "samples":
        return float(part.size)
    assert isinstance(part.target, torch.Tensor)
    weight = rule.weigh(part.target)
    assert weight is not None
    return float(weight)


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
