"""What a loss is a mean over: read from torch's own, found out by trying for others, refused where it is none."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from distributed.core.errors import TaskError
from distributed.strategies.base import LossTrial, Outcome
from distributed.train.loss.probe import know_by_value, try_function
from distributed.train.loss.rules import Rule, rules_for
from distributed.train.loss.torch_losses import adds_up, entropy_of, is_even
from distributed.train.loss.weights import LossWeights
from distributed.train.metrics import class_hits
from distributed.train.task import Task

RULES = rules_for(-100)
CLASS_WEIGHTS = torch.rand(5, generator=torch.Generator().manual_seed(2)).double() + 0.5


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).double()


def classes(count: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, count, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("ignored", [-100, 255, 2])
@pytest.mark.parametrize("positions", [(), (4, 4)])
def test_cross_entropy_of_micro_batches_adds_up(ignored: int, positions: tuple[int, ...]) -> None:
    x, y = random(8, 5, *positions), classes(5, 8, *positions)
    y[random(8, *positions) < -0.5] = ignored
    for weight, smoothing in itertools.product((None, CLASS_WEIGHTS), (0.0, 0.1)):
        module = nn.CrossEntropyLoss(weight, ignore_index=ignored, label_smoothing=smoothing)
        function = functools.partial(F.cross_entropy, weight=weight, ignore_index=ignored, label_smoothing=smoothing)
        for loss in (module, function, nn.NLLLoss(weight, ignore_index=ignored)):
            entropy = entropy_of(loss)
            assert entropy is not None
            parts = [(loss(x[a:b], y[a:b]), entropy.divisor(y[a:b])) for a, b in ((0, 3), (3, 8))]
            total = sum(value * by for value, by in parts) / sum(by for _, by in parts)  # type: ignore[operator,misc]
            assert total.item() == pytest.approx(loss(x, y).item(), abs=1e-12)


class Focal(nn.CrossEntropyLoss):
    """Of torch's class, with a forward of its own: a mean over the samples."""

    def forward(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        each = F.cross_entropy(outputs, target, reduction="none", ignore_index=self.ignore_index)
        return ((1 - torch.exp(-each)) ** 2 * each).mean()


def test_subclass_of_a_torch_loss_is_not_taken_for_it() -> None:
    assert entropy_of(Focal()) is None
    assert entropy_of(functools.partial(F.cross_entropy, random(2, 3))) is None
    assert not is_even(Focal())
    assert is_even(functools.partial(F.mse_loss, reduction="mean"))
    assert adds_up(nn.MSELoss(reduction="sum"))


SEQUENCE, AIMED = random(8, 6, 11), classes(11, 8, 6)
FEW, KINDS = random(8, 5), classes(5, 8)
VALUES, WANTED = random(8, 3), random(3, 8).T
FOUND: dict[str, tuple[Callable[..., Any], Any, Any, Rule | None]] = {
    "cross entropy": (lambda o, t: F.cross_entropy(o, t), FEW, KINDS, Rule("targets", -100)),
    "of one sample": (lambda o, t: F.cross_entropy(o, t), FEW[:1], KINDS[:1], Rule("targets", -100)),
    "tokens": (lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten()), SEQUENCE, AIMED, Rule("targets", -100)),
    "the next token": (
        lambda o, t: F.cross_entropy(o[:, :-1].flatten(0, 1), t[:, 1:].flatten()),
        SEQUENCE,
        AIMED,
        Rule("shifted", -100),
    ),
    "padding": (
        lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten(), ignore_index=0),
        SEQUENCE,
        AIMED,
        Rule("targets", 0),
    ),
    "a mean of means": (
        lambda o, t: F.cross_entropy(o.mT, t, reduction="none").mean(1).mean(),
        SEQUENCE,
        AIMED,
        Rule("samples"),
    ),
    "focal": (Focal(), FEW, KINDS, Rule("samples")),
    "squares": (lambda o, t: (o - t).square().mean(), VALUES, WANTED, Rule("samples")),
    "a sum": (lambda o, t: (o - t).square().sum(), VALUES, WANTED, Rule("sum")),
    "two terms": (
        lambda o, t: F.cross_entropy(o["a"], t) + o["b"].mean(),
        {"a": FEW, "b": VALUES},
        KINDS,
        Rule("samples"),
    ),
    "class weights": (lambda o, t: F.cross_entropy(o, t, weight=CLASS_WEIGHTS), FEW, KINDS, None),
    "samples compared": (lambda o, t: F.cross_entropy(o @ t.T, torch.arange(len(o))), VALUES, WANTED, None),
    "a mask": (lambda o, t: ((o - t).square() * (t > 0)).sum() / (t > 0).sum(), VALUES, WANTED, None),
}


@pytest.mark.parametrize("kind", FOUND)
def test_loss_function_weighting_is_found_by_trial(kind: str) -> None:
    loss_fn, outputs, target, expected = FOUND[kind]
    evidence = try_function(loss_fn, outputs, target, RULES)
    assert evidence is not None
    left = [rule for rule, refuted in zip(RULES, evidence.refuted, strict=True) if not refuted]
    assert (left[0] if left else None) == expected


def test_ignore_index_absent_from_the_first_batch_is_found() -> None:
    unpadded = AIMED.clamp(min=1)
    for mark in (0, 2):
        evidence = try_function(
            lambda o, t, mark=mark: F.cross_entropy(o.flatten(0, 1), t.flatten(), ignore_index=mark),
            SEQUENCE,
            unpadded,
            RULES,
        )
        assert evidence is not None
        left = [rule for rule, refuted in zip(RULES, evidence.refuted, strict=True) if not refuted]
        assert left == [Rule("targets", mark)]


def test_trial_does_not_change_the_state_of_a_loss() -> None:
    calls = 0

    def counting(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return (outputs - target).square().mean() * min(1.0, calls / 10)

    try_function(counting, VALUES, WANTED, RULES)
    assert calls == 0


TOTAL = [0.0]


def remembers(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    TOTAL[0] += 1
    return (outputs - target).square().mean()


def test_loss_whose_state_a_trial_would_change_is_refused() -> None:
    with pytest.raises(TaskError, match=r"TOTAL\[0\] changes"):
        try_function(remembers, VALUES, WANTED, RULES)


@pytest.mark.parametrize("kind", ["targets", "shifted"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weighting_of_a_models_own_loss_is_found_by_value(kind: str, dtype: torch.dtype) -> None:
    logits, labels = SEQUENCE.to(dtype), AIMED.clone()
    labels[:, 4:] = -100
    exact = logits if dtype == torch.float64 else logits.float()
    seen, aimed = (exact, labels) if kind == "targets" else (exact[:, :-1], labels[:, 1:])
    loss = F.cross_entropy(seen.flatten(0, 1), aimed.flatten())
    evidence = know_by_value(Outcome(loss, {"logits": logits}, labels, is_own=True), RULES)
    assert evidence is not None
    assert next(rule for rule, out in zip(RULES, evidence.refuted, strict=True) if not out) == Rule(kind, -100)  # type: ignore[arg-type]
    other = know_by_value(Outcome(1.01 * loss, {"logits": logits}, labels, is_own=True), RULES)
    assert other is not None
    assert all(other.refuted)


@pytest.mark.parametrize("weighting", ["auto", "targets"])
def test_validation_loss_shows_its_weight_by_a_later_batch(weighting: str) -> None:
    """Not by logits that are all the same, as at the beginning, nor by a batch in which no target counts."""
    labels = AIMED.clone()
    labels[:, 4:] = -100
    weights, counted = LossWeights(None, weighting), []
    for logits, target in ((SEQUENCE, torch.full_like(AIMED, -100)), (SEQUENCE * 0, labels), (SEQUENCE, labels)):
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten())
        with torch.no_grad():
            outcome = weights.learn(Outcome(loss, {"logits": logits}, target, is_own=True))
        weights.check_evaluated(outcome)
        counted.append(outcome.weight)
    assert counted == [0, 4 * len(AIMED), 4 * len(AIMED)]


def alone(matters: bool = True) -> LossTrial:
    return LossTrial(lambda votes: votes, matters, nn.Linear(1, 1), None, is_joint=False, is_rough=False)


def test_ignored_target_refuses_a_step_of_several_parts() -> None:
    target = KINDS.clone()
    target[3] = -100
    for loss_fn in (nn.CrossEntropyLoss(), F.cross_entropy):
        task = Task(nn.Identity(), loss_fn)
        outcome = task.run(task.model, (FEW, KINDS))
        settled = task.settle(outcome, (FEW, KINDS), 8, alone())
        assert settled is not None
        assert settled.weight is None
        with pytest.raises(TaskError, match="in this step, which is not taken"):
            task.run(task.model, (FEW, target))
        with torch.no_grad():
            assert float(task.run(task.model, (FEW, target)).weight) == 7  # type: ignore[arg-type]
    task = Task(nn.Identity(), nn.CrossEntropyLoss())
    task.settle(task.run(task.model, (FEW, target)), (FEW, target), 8, alone(matters=False))
    assert task.run(task.model, (FEW, target)).weight is None  # one part: no weight is needed


class Owning(nn.Module):
    """Returns its loss and its logits, as language models do."""

    def __init__(self, ignored: int) -> None:
        super().__init__()
        self.ignored = ignored

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            "loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=self.ignored),
            "logits": logits,
        }


def test_later_ignored_target_of_own_loss_is_counted_or_refused() -> None:
    first = {"logits": SEQUENCE, "labels": AIMED.clamp(min=1)}
    later = {"logits": SEQUENCE, "labels": AIMED.clone()}
    later["labels"][:, 4:] = 0
    for ignored in (-100, 0):
        task = Task(Owning(ignored))
        settled = task.settle(task.run(task.model, first), first, 8, alone())
        assert settled is not None
        assert float(settled.weight) == 48  # type: ignore[arg-type]
        if ignored == 0:  # no batch had told
            with pytest.raises(TaskError, match="some targets are 0, which the loss ignores"):
                task.run(task.model, later)
        else:
            assert float(task.run(task.model, later).weight) == 48  # type: ignore[arg-type]


def test_unknown_loss_weighting_is_refused_only_if_it_matters() -> None:
    class Own(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.square().mean()

    task = Task(Own())
    outcome = task.run(task.model, VALUES)
    assert task.settle(outcome, VALUES, 8, alone(matters=False)) == outcome
    with pytest.raises(TaskError, match="the model's own loss is a mean over is not known"):
        task.settle(outcome, VALUES, 8, alone())
    run = alone()._replace(run=lambda batch: task.run(task.model, batch))
    settled = task.settle(outcome, VALUES, 8, run)
    assert settled is not None
    assert settled.weight is None


def test_loss_that_does_not_add_up_is_refused_unless_declared() -> None:
    task = Task(nn.Identity(), FOUND["samples compared"][0])
    outcome = task.run(task.model, (VALUES, WANTED))
    with pytest.raises(TaskError, match="is not"):
        task.settle(outcome, (VALUES, WANTED), 8, alone())
    declared = Task(nn.Identity(), FOUND["samples compared"][0], loss_weighting="samples")
    assert declared.settle(outcome, (VALUES, WANTED), 8, alone()) == outcome


MEANS: dict[str, Any] = {
    "torch's own": nn.MSELoss(),
    "a function": lambda o, t: (o - t).square().mean(),
    "the default": None,
    "cross entropy": nn.CrossEntropyLoss(),
    "of probabilities": lambda o, t: F.cross_entropy(o, t.softmax(1)),
}


@pytest.mark.parametrize("kind", MEANS)
def test_mean_over_several_rows_per_sample_is_weighted_by_rows(kind: str) -> None:
    """As a collate_fn makes them that puts graphs or boxes of all samples one after the other."""
    task = Task(nn.Identity(), MEANS[kind])
    batch = (FEW, KINDS) if kind == "cross entropy" else (VALUES, WANTED)
    settled = task.settle(task.run(task.model, batch), batch, 3, halved_elsewhere())
    assert settled is not None
    per_row = 1 if kind == "cross entropy" else 3
    for rows in (8, 5):
        outcome = task.run(task.model, tuple(tensor[:rows] for tensor in batch))
        assert float(outcome.weight) == rows * per_row  # type: ignore[arg-type]


def halved_elsewhere() -> LossTrial:
    """With another rank, whose samples have half as many elements each, and not one row a sample."""

    def agree(votes: torch.Tensor) -> torch.Tensor:
        if len(votes) == 4:
            ranks, units, squares, alike = votes.tolist()
            return torch.tensor([2 * ranks, 1.5 * units, 1.25 * squares, alike], dtype=torch.float64)
        return 2 * votes

    return alone()._replace(agree=agree)


def test_step_whose_rows_do_not_match_its_samples_is_refused() -> None:
    for loss_fn in (nn.MSELoss(), MEANS["a function"], None):
        task = Task(nn.Identity(), loss_fn)
        task.settle(task.run(task.model, (VALUES, WANTED)), (VALUES, WANTED), 8, alone())
        task.check_share(task.run(task.model, (VALUES[:4], WANTED[:4])), 4)
        with pytest.raises(TaskError, match="loss_weighting='targets'"):
            task.check_share(task.run(task.model, (VALUES, WANTED)), 4)
        with pytest.raises(TaskError, match="pad all samples to one length"):
            task.check_share(task.run(task.model, (VALUES[:, :2], WANTED[:, :2])), 8)


def test_uneven_padding_across_ranks_is_refused_if_it_counts() -> None:
    agree = halved_elsewhere().agree
    padded = alone()._replace(
        agree=lambda votes: agree(votes) * torch.tensor([1.0, 1.0, 1.0, 2.0]) if len(votes) == 4 else agree(votes)
    )
    by_targets = Task(nn.Identity(), FOUND["tokens"][0])
    settled = by_targets.settle(by_targets.run(nn.Identity(), (SEQUENCE, AIMED)), (SEQUENCE, AIMED), 8, padded)
    assert settled is not None
    assert float(settled.weight) == 48  # type: ignore[arg-type]
    for loss_fn in (nn.MSELoss(), MEANS["a function"], None):
        task = Task(nn.Identity(), loss_fn)
        outcome = task.run(task.model, (VALUES, WANTED))
        with pytest.raises(TaskError, match="pad all samples to one length"):
            task.settle(outcome, (VALUES, WANTED), 8, padded)


def test_later_batch_that_contradicts_the_trial_is_refused() -> None:
    first = torch.zeros(8, dtype=torch.int64)
    weights = torch.ones(64).double()
    weights[50] = 9.0  # of a class that is not among those tried
    task = Task(nn.Identity(), lambda o, t: F.cross_entropy(o, t, weight=weights))
    outputs = random(8, 64)
    task.settle(task.run(task.model, (outputs, first)), (outputs, first), 8, alone())
    later = first.clone()
    later[::2] = 50
    with pytest.raises(TaskError, match="is not the mean of the losses of its parts"):
        task.run(task.model, (outputs, later))


def test_loss_of_each_sample_is_refused() -> None:
    task = Task(nn.Linear(4, 5), nn.CrossEntropyLoss(reduction="none"))
    batch = random(6, 4).float(), classes(5, 6)
    with pytest.raises(TaskError, match=r"the loss has the shape \[6\]"):
        task.settle(task.run(task.model, batch), batch, 6, alone(matters=False))


def test_loss_that_claims_to_be_a_sum_is_tried() -> None:
    class Claims(nn.Module):
        reduction = "sum"

        def forward(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return F.mse_loss(outputs, target)

    task = Task(nn.Identity(), Claims())
    settled = task.settle(task.run(task.model, (VALUES, WANTED)), (VALUES, WANTED), 8, alone())
    assert settled is not None
    assert not settled.is_sum


def test_tuple_that_is_not_loss_and_weight_is_refused() -> None:
    adaptive = nn.AdaptiveLogSoftmaxWithLoss(5, 11, cutoffs=[4]).double()
    with pytest.raises(TaskError, match="ASMoutput"):
        Task(nn.Identity(), adaptive).run(nn.Identity(), (FEW, KINDS))
    weighed = Task(nn.Identity(), lambda o, t: (F.cross_entropy(o, t), 8)).run(nn.Identity(), (FEW, KINDS))
    assert float(weighed.weight) == 8  # type: ignore[arg-type]


def measured(outputs: Any, target: torch.Tensor, loss_fn: Any = None, **outcome: Any) -> float | None:
    found = Task(nn.Identity(), loss_fn).measure(Outcome(torch.zeros(()), outputs, target, **outcome), len(target))
    return float(found["accuracy"].total) / float(found["accuracy"].weight) if "accuracy" in found else None


def test_accuracy_uses_the_class_dim_of_the_loss() -> None:
    y = classes(10, 6, 10)
    last = F.one_hot(y, 10).double()  # as many classes as positions
    assert measured(last.mT, y, nn.CrossEntropyLoss()) == 1.0
    assert measured(last.mT, y, functools.partial(F.cross_entropy, label_smoothing=0.1)) == 1.0
    assert measured(last, y, lambda outputs, target: 0.0) is None  # nobody knows
    images = F.one_hot(y[:, :, None].expand(-1, -1, 3), 10).double()
    assert measured({"logits": images}, y[:, :, None].expand(-1, -1, 3), is_own=True) == 1.0


class Language(nn.Module):
    """Returns its loss: of the next token or of this one, perhaps with something added."""

    def __init__(self, *, shifts: bool, more: float = 0.0) -> None:
        super().__init__()
        self.shifts, self.more = shifts, more

    def forward(self, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = F.one_hot(labels.roll(-1, 1) if self.shifts else labels, 11).double()
        given, wanted = (logits[:, :-1], labels[:, 1:]) if self.shifts else (logits, labels)
        return {"loss": F.cross_entropy(given.flatten(0, 1), wanted.flatten()) + self.more, "logits": logits}


@pytest.mark.parametrize("matters", [True, False])
@pytest.mark.parametrize("shifts", [True, False])
def test_accuracy_is_of_what_the_loss_is_of(shifts: bool, matters: bool) -> None:
    def of(task: Task, batch: Any) -> float | None:
        outcome = task.settle(task.run(task.model, batch), batch, 8, alone(matters=matters))
        assert outcome is not None
        found = task.measure(outcome, 8)
        return float(found["accuracy"].total / found["accuracy"].weight) if "accuracy" in found else None

    assert of(Task(Language(shifts=shifts)), {"labels": AIMED}) == 1.0
    if not matters:  # with several ranks, such a loss is refused
        assert of(Task(Language(shifts=shifts, more=0.5)), {"labels": AIMED}) is None

    def loss_fn(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        given, wanted = (outputs[:, :-1], target[:, 1:]) if shifts else (outputs, target)
        return F.cross_entropy(given.flatten(0, 1), wanted.flatten())

    outputs = F.one_hot(AIMED.roll(-1, 1) if shifts else AIMED, 11) + 0.1 * random(8, 6, 11)
    assert of(Task(nn.Identity(), loss_fn), (outputs, AIMED)) == 1.0


def test_sum_of_a_function_is_known_on_one_rank() -> None:
    task = Task(nn.Identity(), lambda outputs, target: (outputs - target).square().sum())
    outcome = task.settle(task.run(task.model, (VALUES, WANTED)), (VALUES, WANTED), 8, alone(matters=False))
    assert outcome is not None
    assert outcome.is_sum
    assert task.sums_loss


class Judged(nn.Module):
    """A classifier with a loss of its own."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": F.cross_entropy(logits, labels, reduction=self.reduction), "logits": logits}


@pytest.mark.parametrize("samples", [1, 8])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_sum_of_a_model_is_told_from_a_mean(reduction: str, samples: int) -> None:
    """One sample alone has the same of both."""
    batch = {"logits": FEW[:samples], "labels": KINDS[:samples]}
    task = Task(Judged(reduction))
    run = alone()._replace(run=lambda given: task.run(task.model, given))
    outcome = task.settle(task.run(task.model, batch), batch, samples, run)
    assert outcome is not None
    assert outcome.is_sum == (reduction == "sum")
    assert task.sums_loss == outcome.is_sum


def test_sum_of_a_model_is_known_on_one_rank() -> None:
    batch = {"logits": FEW, "labels": KINDS}
    task = Task(Judged("sum"))
    outcome = task.settle(task.run(task.model, batch), batch, 8, alone(matters=False))
    assert outcome is not None
    assert outcome.is_sum


def test_accuracy_skips_targets_the_loss_ignores() -> None:
    y = classes(5, 8, 4, 4)
    outputs = F.one_hot(y, 5).permute(0, 3, 1, 2).double()
    y[:, :2] = 255
    assert measured(outputs, y, nn.CrossEntropyLoss(ignore_index=255)) == 1.0
    assert measured(outputs, y, nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, ignore_index=255)) == 1.0
    single = KINDS.clone()
    single[::2] = -100
    assert measured(F.one_hot(KINDS, 5).double(), single, nn.CrossEntropyLoss()) == 1.0


def test_accuracy_of_a_language_model_compares_next_tokens() -> None:
    hits = class_hits(F.one_hot(AIMED.roll(-1, 1), 11).double(), AIMED, class_dim=-1, is_shifted=True)
    assert hits is not None
    assert hits.total == hits.weight == 8 * 5
