"""The probe of a loss: a few losses of parts of the first batch, which show what its mean goes over.

A loss that is a function of outputs and target is tried on copies of both, on the host, where an index that it does not
expect is an error like any other. A model's own loss is known by its value, or else by those of halves of the batch.
"""

from __future__ import annotations

import copy
import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from distributed.core.errors import TaskError
from distributed.core.protocol.failure import is_collateral
from distributed.runtime.torch_compat import tree_flatten, tree_map, tree_unflatten
from distributed.strategies.base import Outcome
from distributed.train.checks.reachable import changes, look
from distributed.train.loss.rules import Evidence, LossPart, Mark, Rule, compare, marks_of

_ROWS = 4  # samples that a loss is tried on
_HOST_BYTES = 2 << 30  # of outputs that are copied for it
_EXACT = {torch.float64: 1e-7, torch.float32: 2e-4}  # of a model's losses of parts; those in 16 bits: see below
_ROUGH = 2e-2
_TRIED = 1e-5  # of a function's losses, which may compute in fp32 for any input
_SAME = {torch.float64: 1e-9, torch.float32: 1e-5}  # of the value of a cross entropy, if the model's loss is one
_CLASSES, _CLASS_BYTES = 32, 64 << 20  # samples with targets that run through the classes, and the size of them


def try_function(
    loss_fn: Callable[..., Any], outputs: Any, target: Any, rules: Sequence[Rule], *, first: int | None = None
) -> Evidence | None:
    """What a loss function returns for copies of some samples, and for the same with other targets.

    These are left out by any mark, or run through the classes. `first`: only the samples from there on as they are.
    """
    count = _count((outputs, target))
    if not count:
        return None
    rows = torch.linspace(0, count - 1, min(count, _ROWS)).round().long()
    if first is not None:
        rows = (torch.arange(min(count, _ROWS)) + first) % count
    if sum(tensor[:1].numel() for tensor in _tensors(outputs)) * len(rows) * 8 > _HOST_BYTES:
        return None
    outputs, target = _take((outputs, target), rows)
    if len(rows) == 1:  # a second one, with another loss
        outputs = tree_map(lambda leaf: torch.cat([leaf, -leaf]) if isinstance(leaf, torch.Tensor) else leaf, outputs)
        target = _twice(target)
    before = look({"loss": loss_fn})
    natural = _refuted(loss_fn, outputs, target, rules)
    marked = {}
    if first is None:
        marked = {mark: _refuted(loss_fn, outputs, _with_mark(target, mark), rules) for mark in marks_of(rules)}
    refuted, watched = natural, list[Mark]()
    for mark, found in marked.items():
        if refuted is None or found is None:  # it does not take such a target at all
            continue
        both = _either(refuted, found)
        if all(both):  # several terms, of which one leaves targets out: it adds up as long as there are none
            watched.append(mark)
        else:
            refuted = both
    for given in _of_all_classes(outputs, target) if first is None else ():
        found = _refuted(loss_fn, *given, rules)
        if refuted is not None and found is not None:  # classes that count less than others, or not at all
            refuted = _either(refuted, found)
    if moved := changes(before, look({"loss": loss_fn})):
        raise TaskError(
            "what the loss is a mean over cannot be found out by trying it",
            why=f"the loss keeps state that a call changes: {moved[0]}",
            do="return (loss, weight) from it, or set loss_weighting='samples' if it is a mean over the samples",
        )
    return None if refuted is None else Evidence(refuted, tuple(watched))


def _either(one: tuple[bool, ...], other: tuple[bool, ...]) -> tuple[bool, ...]:
    return tuple(a or b for a, b in zip(one, other, strict=True))


def know_by_value(outcome: Outcome, rules: Sequence[Rule]) -> Evidence | None:
    """Whether a model's own loss is the cross entropy of the logits that it returned beside it; None: none to see."""
    fitting = fitting_by_value(outcome, rules)
    if fitting is None or len({rule.kind for rule in fitting}) > 1:
        return None
    return Evidence(tuple(rule not in fitting for rule in rules), is_by_value=True)


def fitting_by_value(outcome: Outcome, rules: Sequence[Rule]) -> list[Rule] | None:
    """The rules by which it would be that: of several kinds where logits are all the same; None: none to see."""
    logits = _logits_for_target(outcome)
    if logits is None:
        return None
    value = outcome.loss.detach().item()
    errors = [_error(rule, logits, outcome.target, value) / max(abs(value), 1e-12) for rule in rules]
    best = min(errors)
    if not best <= _limit(outcome.loss):
        return []
    return [rule for rule, error in zip(rules, errors, strict=True) if error <= max(10 * best, 1e-7)]


def misfit(outcome: Outcome, rule: Rule) -> float:
    """How far a model's own loss is from this rule, in units of what rounding may do; 0: nothing to see."""
    logits = _logits_for_target(outcome)
    if logits is None:
        return 0.0
    value = outcome.loss.detach().item()
    return _error(rule, logits, outcome.target, value) / (_limit(outcome.loss) * max(abs(value), 1.0))


def _logits_for_target(outcome: Outcome) -> torch.Tensor | None:
    logits, target = logits_of(outcome.outputs), outcome.target
    if logits is None or not isinstance(target, torch.Tensor) or not Rule("targets").fits(target):
        return None
    if logits.shape[:-1] != target.shape or type(logits) not in (torch.Tensor, nn.Parameter) or not target.numel():
        return None
    return logits.detach()


def _limit(loss: torch.Tensor) -> float:
    return _SAME.get(loss.dtype, _ROUGH / 5)


def try_model(
    run: Callable[[Any], Outcome], batch: Any, size: int, rules: Sequence[Rule], *, is_rough: bool
) -> Evidence | None:
    """What a model's own losses of halves of a batch show; `run` computes one, as an evaluation would.

    One sample is half of a batch that has it twice. None where the model has none outside of training, or does not
    take a part of a batch.
    """
    batch = _twice(batch) if size == 1 else batch
    halves = torch.arange(max(size, 2)).tensor_split(2)
    try:
        first, second = run(batch), run(batch)
        outcomes = [run(_slice(batch, int(rows[0]), int(rows[-1]) + 1)) for rows in halves]
    except Exception as failed:  # the user's code, in a pass that is not the user's
        if is_collateral(failed):  # a peer is lost: no rank starts another collective
            raise
        return None
    if not all(outcome.is_own for outcome in (first, second, *outcomes)):
        return None
    pairs = zip(outcomes, halves, strict=True)
    parts = [LossPart(float(outcome.loss), len(rows), outcome.target) for outcome, rows in pairs]
    tolerance = _ROUGH if is_rough else _EXACT.get(first.loss.dtype, _ROUGH)
    whole = float(first.loss)
    if not abs(whole - float(second.loss)) <= tolerance * abs(whole) / 10:  # it draws random numbers
        return None
    refuted = compare(rules, whole, parts, tolerance)
    return None if refuted is None else Evidence(refuted, (rules[2].ignored,))


def can_cut(batch: Any, size: int, target: Any) -> bool:
    """Whether a batch has halves, or is half of one that shows as much: a sample with one target."""
    has_one = isinstance(target, torch.Tensor) and target.numel() == 1
    return (size > 1 or has_one) and _count(batch) == size


def logits_of(outputs: Any) -> torch.Tensor | None:
    """What a model returned beside its loss."""
    found = outputs.get("logits") if isinstance(outputs, dict) else getattr(outputs, "logits", None)
    if found is None and isinstance(outputs, torch.Tensor) and outputs.dim() > 1:  # the second of a tuple
        found = outputs
    return found if isinstance(found, torch.Tensor) else None


def _refuted(loss_fn: Callable[..., Any], outputs: Any, target: Any, rules: Sequence[Rule]) -> tuple[bool, ...] | None:
    if target is None:
        return None
    rows = _count((outputs, target))
    for dtype in (torch.float64, torch.float32):  # where it holds tensors of its own, they are in fp32
        given = tree_map(lambda leaf, to=dtype: _cast(leaf, to), outputs)
        aimed = tree_map(lambda leaf, to=dtype: _cast(leaf, to), target)
        try:
            tried = _fresh(loss_fn, dtype)
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                whole = [float(tried(given, aimed)) for _ in range(2)]
                parts = [
                    LossPart(float(tried(*_slice((given, aimed), row, row + 1))), 1, _slice(aimed, row, row + 1))
                    for row in range(rows)
                ]
        except Exception:  # noqa: BLE001 - the user's loss, on a batch that is not the user's
            continue
        return compare(rules, whole[0], parts, _TRIED) if whole[0] == whole[1] else None
    return None


def _with_mark(target: Any, mark: Mark) -> Any:
    """The same with half of the first sample's targets marked; None: that cannot be."""
    if not isinstance(target, torch.Tensor) or target.is_complex() or not target.dim():
        return None
    if target.is_floating_point() != isinstance(mark, float):
        return None
    changed = target.clone()
    first = changed[0].reshape(-1)
    first[: max(1, first.numel() // 2)] = mark
    changed[0] = first.reshape(changed[0].shape)
    return changed


def _of_all_classes(outputs: Any, target: Any) -> list[tuple[Any, Any]]:
    """Outputs and targets that run through the classes, wherever these may lie in the outputs."""
    if not isinstance(outputs, torch.Tensor) or not isinstance(target, torch.Tensor) or outputs.dim() < 2:
        return []
    if not Rule("targets").fits(target) or outputs.dim() != target.dim() + 1:
        return []
    found = []
    for count in dict.fromkeys((outputs.shape[1], outputs.shape[-1])):
        most = min(_CLASSES, _CLASS_BYTES // (outputs[0].numel() * 8))
        if most < 2:
            continue
        rows = torch.arange(min(most, max(len(target), count))) % len(target)
        shape = (len(rows), *target.shape[1:])
        through = (torch.arange(math.prod(shape)) % count).reshape(shape).to(target.dtype)
        found.append((outputs[rows], through))
    return found


def _error(rule: Rule, logits: torch.Tensor, target: torch.Tensor, value: float) -> float:
    """How far a loss is from the cross entropy that this rule is of."""
    if rule.kind == "samples" or not Rule("targets").fits(target) or not rule.fits(target):
        return float("inf")
    if rule.kind == "shifted":
        logits, target = logits[..., :-1, :], target[..., 1:]
    counted = target >= 0 if rule.kind == "sum" else target != rule.ignored
    valid = torch.where(counted & (target >= 0) & (target < logits.shape[-1]), target, 0)
    total = torch.zeros((), dtype=torch.float64, device=logits.device)
    for row, aimed, counts in zip(logits, valid, counted, strict=True):  # one by one: of all it would be much memory
        exact = row.double() if row.dtype == torch.float64 else row.float()
        total += (
            F.cross_entropy(exact.reshape(-1, row.shape[-1]), aimed.reshape(-1), reduction="none") * counts.reshape(-1)
        ).sum()
    expected = float(total if rule.kind == "sum" else total / counted.sum())
    return abs(expected - value) if expected == expected else float("inf")


def _fresh(loss_fn: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    """A copy whose every call begins with the state that the loss has now: one that counts its calls may use that."""
    if not isinstance(loss_fn, nn.Module) or next(loss_fn.parameters(), None) is None:
        return lambda *given: _copied(loss_fn, dtype)(*given)
    made = _copied(loss_fn, dtype)
    kept = [(buffer, buffer.clone()) for buffer in made.buffers()]  # type: ignore[attr-defined]

    def call(*given: Any) -> Any:
        for buffer, value in kept:
            buffer.copy_(value)
        return made(*given)

    return call


def _copied(loss_fn: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    """A loss whose state a trial may change."""
    if isinstance(loss_fn, nn.Module):
        return copy.deepcopy(loss_fn).to("cpu", dtype)
    if isinstance(loss_fn, types.FunctionType) and loss_fn.__closure__:
        cells = tuple(types.CellType(copy.deepcopy(cell.cell_contents)) for cell in loss_fn.__closure__)
        made = types.FunctionType(loss_fn.__code__, loss_fn.__globals__, loss_fn.__name__, loss_fn.__defaults__, cells)
        made.__kwdefaults__ = copy.deepcopy(loss_fn.__kwdefaults__)
        return made
    return loss_fn if isinstance(loss_fn, types.FunctionType) else copy.deepcopy(loss_fn)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def _count(tree: Any) -> int:
    """How many samples a tree of tensors has; 0: its tensors do not agree, or hold something else."""
    leaves = [leaf for leaf in tree_flatten(tree)[0] if not isinstance(leaf, str | bytes | int | float | type(None))]
    if not all(type(leaf) in (torch.Tensor, nn.Parameter) and leaf.dim() for leaf in leaves):
        return 0
    counts = {leaf.shape[0] for leaf in leaves}
    return counts.pop() if len(counts) == 1 else 0


def _take(tree: Any, rows: torch.Tensor) -> Any:
    """Some samples, copied to the host."""

    def take(leaf: Any) -> Any:
        return leaf.detach()[rows.to(leaf.device)].cpu() if isinstance(leaf, torch.Tensor) else leaf

    return tree_map(take, tree)


def _twice(tree: Any) -> Any:
    return tree_map(lambda leaf: torch.cat([leaf, leaf]) if isinstance(leaf, torch.Tensor) else leaf, tree)


def _slice(tree: Any, start: int, stop: int) -> Any:
    leaves, form = tree_flatten(tree)
    return tree_unflatten([leaf[start:stop] if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], form)


def _cast(leaf: Any, dtype: torch.dtype) -> Any:
    return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf
