"""Loss weights: what the mean of a loss goes over, found out once, agreed on by all ranks, and used in every step."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from distributed.core.errors import TaskError
from distributed.strategies.base import LossTrial, Outcome
from distributed.train.checks.reachable import changes, look
from distributed.train.loss.elements import elements, elements_on_device, looked_at, rows
from distributed.train.loss.probe import can_cut, fitting_by_value, know_by_value, misfit, try_function, try_model
from distributed.train.loss.refusals import RETURN, SAMPLES, changed_kind, fits_none, ignores, padded, unknown
from distributed.train.loss.rules import Evidence, Mark, Rule, Votes, count_votes, marks_of, rules_for
from distributed.train.loss.torch_losses import Entropy, adds_up, entropy_of, is_even

_OPEN_LOOKS = 16  # after which such targets are too few to show it, and to matter


@dataclass
class LossWeights:
    """Of one task on one rank. `weighting` is the setting: auto, samples or targets."""

    loss_fn: Callable[..., Any] | None
    weighting: str
    rule: Rule | None = None  # of a loss that is not torch's own; None: nothing is known, it is taken for a mean
    is_shifted: bool | None = None  # whether each position of such a loss foretells the next one; None: not known
    _matters: bool = False  # whether a step has several parts, which are weighted
    _is_sure: bool = False  # whether the rule also holds where targets are left out
    _watched: tuple[Mark, ...] = ()  # marks of targets that make the mean go over less than it is weighted for
    _open: tuple[int, ...] = ()  # marks that no batch had yet: whether the loss counts such targets is not known
    _met: torch.Tensor | None = field(default=None, repr=False)  # on a device: whether there was one of them
    _looks_closer: bool = False  # because there was
    _open_looks: int = 0
    _is_learnt: bool = False  # in an evaluation
    _unit: float | None = None  # elements a sample, where samples are weight enough
    _by_elements: bool = False  # they are not: outputs have more or fewer rows than there are samples
    _is_padded: bool = False  # nor are these: each rank's outputs have a shape of their own, with a row a sample
    _is_tried: bool = False  # whether the rule is one that a few samples have shown
    _calls: int = 0  # of a loss whose rule is one
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
                if self._is_tried and trains:
                    self._try_again(outcome)
                return outcome._replace(is_sum=True)
            if self.rule.kind == "elements":
                return self._seen(outcome._replace(weight=elements_on_device(outcome)))
            if not self.rule.fits(target):
                if not self._matters:
                    return outcome
                raise changed_kind(target)
            is_needed = self._matters or not trains
            if self._open and trains:
                self._check_open(outcome)
            if self._is_tried and trains:
                self._try_again(outcome)
            return self._seen(outcome._replace(weight=self.rule.weigh(target) if is_needed else None))
        if not trains and is_even(loss_fn) and self.weighting != "samples" and looked_at(outcome) is not None:
            return outcome._replace(weight=elements_on_device(outcome))
        is_sum = loss_fn is not None and adds_up(loss_fn)
        return self._seen(outcome._replace(is_sum=True) if is_sum else outcome)

    def settle(self, outcome: Outcome | None, batch: Any, size: int, trial: LossTrial) -> Outcome | None:
        """Before the first backward pass of a world, on every rank: find out what the mean goes over.

        `trial.matters`: whether a wrong weight would show in the gradients. Raises TaskError where it would, and what
        the loss is a mean over is not to be found out. None: this rank has no loss; `size` 0: that of a stand-in.
        """
        self._watched, self._open, self._matters = (), (), trial.matters
        self._is_tried, self._unit, self._by_elements, self._is_padded = False, None, False, False
        self.is_shifted = None
        if self.weighting == "samples" or adds_up(self.loss_fn):
            return outcome
        if trial.matters:
            self._agree_on_units(outcome, size, trial)
        if is_even(self.loss_fn):
            return self._by_their_number(outcome)
        if self.loss_fn is not None and entropy_of(self.loss_fn) is not None:
            return self._watch(outcome, trial)
        self.rule, self._is_sure = None, False
        is_own = outcome is not None and outcome.is_own
        is_known = outcome is not None and (outcome.is_given or outcome.fitted is not None)
        rules = rules_for(self.ignored)
        has_evidence = outcome is not None and size and not is_known
        found = self._first_evidence(outcome, rules, trial) if outcome is not None and has_evidence else None
        votes = count_votes(found, rules, trial, is_known=is_known, is_own=is_own)
        if votes.known:
            return self._watch(outcome, trial)
        if trial.matters and 0 < votes.denied < votes.by_value:  # of some samples only it is a cross entropy
            raise fits_none(votes.own > 0, self.weighting)
        is_tried = votes.opinions > 0 and not votes.denied
        if not is_tried and votes.own and trial.matters and trial.run is not None:
            can_try = self._can_try(trial, batch, size, None if outcome is None else outcome.target)
            found = self._try_model(trial, batch, size, rules) if can_try else None
            votes = count_votes(found, rules, trial, is_known=False, is_own=is_own)
        self._decide(votes, rules, trial)
        settled = None if outcome is None else self.of(outcome._replace(weight=None, is_sum=False), None)
        self._is_tried, self._calls = is_tried and trial.matters, 0
        return settled

    def _agree_on_units(self, outcome: Outcome | None, size: int, trial: LossTrial) -> None:
        """Whether samples are weight enough: each has as many elements in the outputs as any other of the ranks'."""
        count = None if outcome is None or outcome.is_own or not size else elements(outcome)
        mine = [0.0] * 4
        if count is not None:
            self._unit = count / size
            mine = [1.0, self._unit, self._unit**2, float(rows(outcome) == size)]
        ranks, units, squares, alike = trial.agree(torch.tensor(mine, dtype=torch.float64)).tolist()
        is_one = abs(ranks * squares - units * units) <= 1e-9 * max(units * units, 1.0)
        self._is_padded = not is_one and alike == ranks
        self._by_elements = self.weighting == "targets" or (not is_one and alike < ranks)
        if self._by_elements or not is_one:
            self._unit = None

    def check_share(self, outcome: Outcome, size: int) -> None:
        """Raise if samples are no weight for this part of a step, as they were for the first one. Reads shapes only."""
        if self._unit is None:
            return
        count = elements(outcome)
        if count is None or count == self._unit * size:
            return
        if rows(outcome) == size and entropy_of(self.loss_fn or outcome.fitted) is None:
            raise padded()
        raise TaskError(
            f"the outputs of {size} samples have {count} elements; those of the first step had {self._unit:g} a sample",
            why="the loss is a mean over them, and the parts of a step are weighted by samples",
            do="set loss_weighting='targets' (exact), or 'samples' to weight by samples all the same",
        )

    def _by_their_number(self, outcome: Outcome | None) -> Outcome | None:
        """A mean of torch's own, over the elements of the outputs: also where their number differs between samples."""
        if self._is_padded:
            raise padded()
        self.rule = Rule("elements") if self._by_elements else None
        if outcome is None or self.rule is None:
            return outcome
        return outcome._replace(weight=elements_on_device(outcome))

    def _try_again(self, outcome: Outcome) -> None:
        """After 1, 2, 4, 8 … calls: whether other samples show what the first ones did not."""
        self._calls += 1
        if self._calls & (self._calls - 1) or self.rule is None or _is_captured(outcome):
            return
        if outcome.is_own:
            is_refuted = misfit(outcome, self.rule) > 1
        else:
            assert self.loss_fn is not None
            rules = rules_for(self.ignored)
            found = try_function(self.loss_fn, outcome.outputs, outcome.target, rules, first=self._calls)
            is_refuted = found is not None and found.refuted[rules.index(self.rule)]
        if is_refuted:
            raise fits_none(outcome.is_own, self.weighting)

    def _watch(self, outcome: Outcome | None, trial: LossTrial) -> Outcome | None:
        """torch's cross entropy with one target a sample is weighted by samples, as long as none is left out."""
        entropy = None if outcome is None else entropy_of(self.loss_fn or outcome.fitted)
        if outcome is None or entropy is None or entropy.reduction != "mean":
            is_mean = outcome is not None and is_even(outcome.fitted)
            return self._by_their_number(outcome) if is_mean else outcome
        if self._by_elements:
            return outcome._replace(weight=entropy.divisor(outcome.target))
        if trial.matters and self.weighting == "auto" and self._is_by_samples(entropy, outcome.target):
            self._watched = (self.ignored,)
        return self._seen(outcome)

    def _is_by_samples(self, entropy: Entropy, target: torch.Tensor) -> bool:
        """Whether a step weights a cross entropy by its samples, which saves it a collective."""
        if self.weighting == "samples":
            return True
        if self._by_elements or self.weighting == "targets":
            return False
        if target.is_floating_point():  # probabilities of classes
            return target.dim() == 2
        return entropy.class_weights is None and target.dim() == 1

    def _first_evidence(self, outcome: Outcome, rules: list[Rule], trial: LossTrial) -> Evidence | None:
        """What is to be had without another pass through the model."""
        if outcome.is_own:
            return know_by_value(outcome, rules)
        assert self.loss_fn is not None
        try:
            return try_function(self.loss_fn, outcome.outputs, outcome.target, rules)
        except TaskError:
            if trial.matters:
                raise
            return None

    def _decide(self, votes: Votes, rules: list[Rule], trial: LossTrial) -> None:
        if not votes.opinions:
            if trial.matters:
                raise unknown(votes.own > 0)
            return
        left = votes.left_of(rules)
        if self._by_elements:
            left = [Rule("elements") if rule.kind == "samples" else rule for rule in left]
        if self.weighting == "targets":
            left = [rule for rule in left if rule.kind in ("targets", "shifted", "elements")]
        if not left and not trial.matters:
            return
        if not left:
            raise fits_none(votes.own > 0, self.weighting)
        self.rule = left[0]
        kinds = {rule.kind for rule in left} & {"targets", "shifted"}
        self.is_shifted = "shifted" in kinds if len(kinds) == 1 else None
        if self._is_padded and self.rule.kind == "samples":
            raise padded()
        counts = self.rule.kind in ("targets", "shifted")
        marks = zip(marks_of(rules), votes.watched, strict=True)
        watched = tuple(mark for mark, count in marks if count and not (counts and mark == self.rule.ignored))
        self._is_sure = counts or not watched
        if trial.matters and counts and votes.by_value:
            self._open = tuple(r.ignored for r in left if r.kind == self.rule.kind and r != self.rule)
        if trial.matters:
            self._watched = watched

    def _check_open(self, outcome: Outcome) -> None:
        """A target that no batch had until now: the value of the loss shows whether it counts."""
        met = _has(outcome.target, self._open)
        is_away = outcome.target.device.type != "cpu" and (not self._looks_closer or _is_captured(outcome))
        if is_away:  # a look at it would wait: see check
            self._met = met if self._met is None else self._met.logical_or_(met)
            return
        if not bool(met):
            return
        here = [mark for mark in self._open if bool((outcome.target == mark).any())]
        assert self.rule is not None
        own = misfit(outcome, self.rule)
        if own > 1:
            raise ignores(
                here, "in this step, which is not taken", is_tried=self.rule is not None, is_late=self._looks_closer
            )
        counted = [m for m in here if misfit(outcome, self.rule._replace(ignored=m)) > max(10 * own, 0.01)]
        self._open_looks += 1
        self._open = tuple(m for m in self._open if m not in counted) if self._open_looks < _OPEN_LOOKS else ()

    @property
    def is_sum(self) -> bool:
        """Whether the loss of a batch is the sum of its samples' losses."""
        return adds_up(self.loss_fn) if self.rule is None else self.rule.kind == "sum"

    def check(self) -> None:
        """Raise what was seen on a device since the last look; waits for it."""
        if self._met is not None and bool(self._met):
            self._met, self._looks_closer = None, True
        if self._found is not None and bool(self._found):
            raise ignores(
                self._watched,
                "in a step since the last one that was logged",
                is_tried=self.rule is not None,
                is_late=True,
            )

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
            raise ignores([self.ignored], "in the validation data", is_tried=self.rule is not None)

    def learn(self, outcome: Outcome) -> Outcome:
        """Of a validation step of the user's own: whether its loss is a cross entropy, by the first batch's value.

        It is weighted by the targets that count then, and by samples otherwise. Nothing is tried, as the step may
        collect what it has seen.
        """
        if self._is_learnt or not outcome.is_own or outcome.is_given or self.weighting == "samples":
            return outcome
        if not math.isfinite(outcome.loss.detach().item()):  # it may be a mean over nothing, which shows no rule
            rule = Rule("targets", self.ignored)
            weight = rule.weigh(outcome.target) if rule.fits(outcome.target) else None
            return outcome._replace(weight=weight) if weight is not None and not weight else outcome
        fitting = fitting_by_value(outcome, rules_for(self.ignored))
        self.rule = fitting[0] if fitting else None
        self._is_learnt = not fitting or len({rule.kind for rule in fitting}) == 1  # else the next batch shows more
        return self.of(outcome, None)

    def _can_try(self, trial: LossTrial, batch: Any, size: int, target: Any) -> bool:
        is_cut = can_cut(batch, size, target)
        if not trial.is_joint:
            return is_cut
        ranks, able = trial.agree(torch.tensor([1.0, float(is_cut)], dtype=torch.float64)).tolist()
        return bool(able == ranks)

    def _try_model(self, trial: LossTrial, batch: Any, size: int, rules: list[Rule]) -> Evidence | None:
        """With as many passes on every rank, regardless of what they show."""
        assert trial.run is not None
        own = [*trial.module.parameters(), *trial.module.buffers()]
        before = look({"model": trial.module, **trial.beside()}, own)
        found = try_model(trial.run, batch, size, rules, is_rough=trial.is_rough)
        if moved := changes(before, look({"model": trial.module, **trial.beside()}, own)):
            raise TaskError(
                "what the model's own loss is a mean over cannot be found out by trying it",
                why=f"state is kept that a call changes: {moved[0]}",
                do=f"{RETURN}; or {SAMPLES}",
            )
        return found

    def _seen(self, outcome: Outcome) -> Outcome:
        """Look for targets that are left out, where that would matter: at once on the host, on a device later."""
        target = outcome.target
        if not self._watched or not torch.is_grad_enabled():
            return outcome
        if not isinstance(target, torch.Tensor) or not target.dim():
            return outcome
        found = _has(target, self._watched)
        if target.device.type == "cpu":
            if bool(found):
                raise ignores(self._watched, "in this step, which is not taken", is_tried=self.rule is not None)
        elif self._found is None:
            self._found = found
        else:
            self._found.logical_or_(found)
        return outcome


def _has(target: torch.Tensor, marks: Sequence[Mark]) -> torch.Tensor:
    """Whether some target is one of these marks, on its device."""
    found = (target.isnan() if math.isnan(mark) else target == mark for mark in marks)
    return functools.reduce(torch.logical_or, (one.any() for one in found))


def _is_captured(outcome: Outcome) -> bool:
    """Whether this pass is written down for a graph, in which nothing can be looked at."""
    return outcome.loss.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
