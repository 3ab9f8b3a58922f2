"""Loss weights: what the mean of a loss goes over, found out once, agreed on by all ranks, and used in every step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from distributed.core.errors import TaskError
from distributed.strategies.base import Outcome, Trial
from distributed.train.loss_probe import know_by_value, try_function, try_model
from distributed.train.loss_rules import Evidence, Rule, marks_of, rules_for
from distributed.train.losses import Entropy, adds_up, entropy_of, is_even
from distributed.train.reachable import changes, look

_RETURN = 'return (loss, weight) from loss_fn, or {"loss": …, "weight": …} from the model, with what the mean goes over'
_SAMPLES = "set loss_weighting='samples' to weight by samples all the same"


class Votes(NamedTuple):
    """Numbers of ranks."""

    known: float  # whose loss says what it is a mean over
    own: float  # whose model returned it
    opinions: float  # that have found something out
    by_value: float  # and that by the value of one batch
    watched: tuple[float, ...]  # who would have each mark of targets watched for
    refuted: tuple[float, ...]  # of each rule


@dataclass
class LossWeights:
    """Of one task on one rank. `weighting` is the setting: auto, samples or targets."""

    loss_fn: Callable[..., Any] | None
    weighting: str
    rule: Rule | None = None  # of a loss that is not torch's own; None: nothing is known, it is taken for a mean
    _matters: bool = False  # whether a step has several parts, which are weighted
    _is_sure: bool = False  # whether the rule also holds where targets are left out
    _watched: tuple[int, ...] = ()  # marks of targets that make the mean go over less than it is weighted for
    _open: tuple[int, ...] = ()  # marks that no batch had yet: whether the loss counts such targets is not known
    _met: torch.Tensor | None = field(default=None, repr=False)  # on a device: whether there was one of them
    _looks_closer: bool = False  # because there was
    _found: torch.Tensor | None = field(default=None, repr=False)  # on a device: whether there was one

    @property
    def ignored(self) -> int:
        """The mark of targets that do not count."""
        entropy = entropy_of(self.loss_fn)
        found = entropy.ignore_index if entropy is not None else getattr(self.loss_fn, "ignore_index", -100)
        return found if isinstance(found, int) else -100

    def of(self, outcome: Outcome, loss_fn: Callable[..., Any] | None) -> Outcome:
        """With the weight of its mean, and whether it is a sum. `loss_fn` None: the loss is the model's own.

        In training, a weight costs a small collective a step, and is given where the samples are not weight enough. In
        an evaluation it costs nothing.
        """
        trains, target = torch.is_grad_enabled(), outcome.target
        entropy = None if loss_fn is None else entropy_of(loss_fn)
        if entropy is not None and entropy.reduction == "mean":
            if self._is_by_samples(entropy, target) and (trains or self.weighting == "samples"):
                return self._seen(outcome)
            return outcome._replace(weight=entropy.divisor(target))
        if self.rule is not None:
            if self.rule.kind == "sum":
                return outcome._replace(is_sum=True)
            if not self.rule.fits(target):
                raise self._changed(target)
            is_needed = self._matters or not trains
            if self._open and trains:
                self._check_open(outcome)
            return self._seen(outcome._replace(weight=self.rule.weigh(target) if is_needed else None))
        return self._seen(outcome._replace(is_sum=loss_fn is not None and adds_up(loss_fn)))

    def settle(self, outcome: Outcome | None, batch: Any, size: int, trial: Trial) -> Outcome | None:
        """Before the first backward pass of a world, on every rank: find out what the mean goes over.

        `trial.matters`: whether a wrong weight would show in the gradients. Raises TaskError where it would, and what
        the loss is a mean over is not to be found out. None: this rank has no loss; `size` 0: that of a stand-in.
        """
        self._watched, self._open, self._matters = (), (), trial.matters
        if self.weighting == "samples" or adds_up(self.loss_fn) or is_even(self.loss_fn):
            return outcome
        if self.loss_fn is not None and entropy_of(self.loss_fn) is not None:
            return self._watch(outcome, trial)
        if self.loss_fn is not None and not trial.matters:
            return outcome
        self.rule, self._is_sure = None, False
        is_own = outcome is not None and outcome.is_own
        is_known = outcome is not None and (outcome.is_given or outcome.fitted is not None)
        rules = rules_for(self.ignored)
        found = self._first_evidence(outcome, rules) if outcome is not None and size and not is_known else None
        votes = _add_up(found, rules, trial, is_known=is_known, is_own=is_own)
        if votes.known:
            return self._watch(outcome, trial)
        if not votes.opinions and votes.own and trial.matters and trial.run is not None:
            found = self._try_model(trial, batch, size, rules) if size else None
            votes = _add_up(found, rules, trial, is_known=False, is_own=is_own)
        self._decide(votes, rules, trial)
        return None if outcome is None else self.of(outcome._replace(weight=None, is_sum=False), None)

    def _watch(self, outcome: Outcome | None, trial: Trial) -> Outcome | None:
        """torch's cross entropy with one target a sample is weighted by samples, as long as none is left out."""
        entropy = None if outcome is None else entropy_of(self.loss_fn or outcome.fitted)
        if outcome is None or entropy is None or entropy.reduction != "mean":
            return outcome
        if trial.matters and self.weighting == "auto" and self._is_by_samples(entropy, outcome.target):
            self._watched = (self.ignored,)
        return self._seen(outcome)

    def _is_by_samples(self, entropy: Entropy, target: torch.Tensor) -> bool:
        """Whether a step weights a cross entropy by its samples, which saves it a collective."""
        if entropy.class_weights is not None or self.weighting == "targets":
            return False
        return target.dim() == 1 or self.weighting == "samples"

    def _first_evidence(self, outcome: Outcome, rules: list[Rule]) -> Evidence | None:
        """What is to be had without another pass through the model."""
        if outcome.is_own:
            return know_by_value(outcome, rules)
        assert self.loss_fn is not None
        return try_function(self.loss_fn, outcome.outputs, outcome.target, rules)

    def _decide(self, votes: Votes, rules: list[Rule], trial: Trial) -> None:
        if not votes.opinions:
            if trial.matters:
                raise self._unknown(votes.own > 0)
            return
        left = [rule for rule, count in zip(rules, votes.refuted, strict=True) if not count]
        if self.weighting == "targets":
            left = [rule for rule in left if rule.kind in ("targets", "shifted")]
        if not left:
            raise self._fits_none(votes.own > 0)
        self.rule = left[0]
        counts = self.rule.kind in ("targets", "shifted")
        watched = tuple(mark for mark, count in zip(marks_of(rules), votes.watched, strict=True) if count)
        self._is_sure = counts or not watched
        if trial.matters and counts and votes.by_value:
            self._open = tuple(r.ignored for r in left if r.kind == self.rule.kind and r != self.rule)
        elif trial.matters and not self._is_sure:
            self._watched = watched

    def _check_open(self, outcome: Outcome) -> None:
        """A target that no batch had until now: the value of the loss tells whether it counts."""
        met = _has(outcome.target, self._open)
        if outcome.target.device.type != "cpu" and not self._looks_closer:  # a look at it would wait: see check
            self._met = met if self._met is None else self._met.logical_or_(met)
            return
        if not bool(met):
            return
        here = [mark for mark in self._open if bool((outcome.target == mark).any())]
        rules = rules_for(self.ignored)
        found = know_by_value(outcome, rules)
        assert self.rule is not None
        if found is None or found.refuted[rules.index(self.rule)]:
            raise self._ignores(here, "in this step, which is not taken", is_late=self._looks_closer)
        self._open = tuple(mark for mark in self._open if mark not in here)

    def check(self) -> None:
        """Raise what was seen on a device since the last look; waits for it."""
        if self._met is not None and bool(self._met):
            self._met, self._looks_closer = None, True
        if self._found is not None and bool(self._found):
            raise self._ignores(self._watched, "in a step since the last one that was logged", is_late=True)

    def check_evaluated(self, outcome: Outcome) -> None:
        """In an evaluation values are looked at anyway."""
        is_open = outcome.weight is None and not outcome.is_sum and self.weighting == "auto" and not self._is_sure
        entropy = self.loss_fn is None or entropy_of(self.loss_fn) is not None or hasattr(self.loss_fn, "ignore_index")
        if (
            is_open
            and entropy
            and Rule("targets").fits(outcome.target)
            and bool((outcome.target == self.ignored).any())
        ):
            raise self._ignores([self.ignored], "in the validation data")

    def _try_model(self, trial: Trial, batch: Any, size: int, rules: list[Rule]) -> Evidence | None:
        assert trial.run is not None
        own = [*trial.module.parameters(), *trial.module.buffers()]
        before = look({"model": trial.module}, own)
        found = try_model(trial.run, batch, size, rules, is_rough=trial.is_rough)
        if moved := changes(before, look({"model": trial.module}, own)):
            raise TaskError(
                "what the model's own loss is a mean over cannot be found out by trying it",
                why=f"the model keeps state that a call changes: {moved[0]}",
                do=f"{_RETURN}; or {_SAMPLES}",
            )
        return found

    def _seen(self, outcome: Outcome) -> Outcome:
        """Look for targets that are left out, where that would matter: at once on the host, on a device later."""
        target = outcome.target
        if not self._watched or outcome.weight is not None or not torch.is_grad_enabled():
            return outcome
        if not Rule("targets").fits(target):
            return outcome
        found = _has(target, self._watched)
        if target.device.type == "cpu":
            if bool(found):
                raise self._ignores(self._watched, "in this step, which is not taken")
        elif self._found is None:
            self._found = found
        else:
            self._found.logical_or_(found)
        return outcome

    def _ignores(self, marks: Sequence[int], where: str, *, is_late: bool = False) -> TaskError:
        back = "resume from the last checkpoint, " if is_late else ""
        how = _RETURN if self.rule is not None else "set loss_weighting='targets' (exact)"
        return TaskError(
            f"some targets are {' or '.join(map(str, marks))}, which the loss ignores, {where}",
            why="its mean then goes over fewer targets than the parts of a step are weighted by, so they do not add up",
            do=f"{back}{how}, or with loss_weighting='samples' to weight by samples all the same",
        )

    def _unknown(self, is_own: bool) -> TaskError:
        whose = "the model's own loss" if is_own else "the loss"
        return TaskError(
            f"what {whose} is a mean over is not known",
            why="the parts of a step, on several ranks or one after the other, are weighted by it. It was not to be "
            "found out: the first batch cannot be cut, or the loss is random, or its model is shared out over ranks",
            do=f"{_RETURN}; or {_SAMPLES}",
        )

    def _fits_none(self, is_own: bool) -> TaskError:
        whose = "the model's own loss" if is_own else "the loss"
        if self.weighting == "targets":
            why = "loss_weighting is 'targets', and the losses of parts of a batch do not add up that way"
            return TaskError(f"{whose} is not a mean over the targets", why=why, do="set loss_weighting='auto'")
        return TaskError(
            f"{whose} of a batch is not the mean of the losses of its parts",
            why="neither by samples nor by targets that count; so the parts of a step do not add up to the loss that "
            "one process has on the whole batch (a mean with weights of its own, or a loss that compares samples)",
            do=f"{_RETURN}; or {_SAMPLES}",
        )

    def _changed(self, target: Any) -> TaskError:
        kind = (
            f"{target.dtype} in {target.dim()} dimensions"
            if isinstance(target, torch.Tensor)
            else type(target).__name__
        )
        return TaskError(
            f"the targets of a step are {kind}",
            why="those of the first step were classes, over which the loss is a mean",
            do=f"{_RETURN}; or {_SAMPLES}",
        )


def _has(target: torch.Tensor, marks: Sequence[int]) -> torch.Tensor:
    """Whether some target is one of these marks, on its device."""
    return functools.reduce(torch.logical_or, ((target == mark).any() for mark in marks))


def _add_up(found: Evidence | None, rules: list[Rule], trial: Trial, *, is_known: bool, is_own: bool) -> Votes:
    marks = marks_of(rules)
    mine = [float(is_known), float(is_own), 0.0, 0.0, *(0.0 for _ in marks), *(0.0 for _ in rules)]
    if found is not None:
        watched = [float(mark in found.watched) for mark in marks]
        mine[2:] = [1.0, float(found.is_by_value), *watched, *map(float, found.refuted)]
    known, own, opinions, by_value, *rest = trial.agree(torch.tensor(mine, dtype=torch.float64)).tolist()
    return Votes(known, own, opinions, by_value, tuple(rest[: len(marks)]), tuple(rest[len(marks) :]))
