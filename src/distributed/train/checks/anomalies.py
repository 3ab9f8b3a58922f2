"""Anomalies: which operation of a step first made a number that is not finite, for the setting detect_anomaly.

In forward passes each operation's result is looked at; in backward passes autograd does so, and knows where the
operation was called. Both wait for the device at each operation, and take a step several times as long.
"""

from __future__ import annotations

import math
import os
import re
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from distributed.core.errors import NonFiniteLossError
from distributed.core.plan import Plan
from distributed.runtime.torch_compat import TorchDispatchMode, tree_leaves
from distributed.strategies.base import NonFiniteLoss
from distributed.strategies.placement import local

_IN_BACKWARD = re.compile(r"Function '(\w+?)(?:Backward\d*)?' returned nan values")
_OF_FORWARD = "Traceback of forward call"  # in the warning that comes before that error
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>.+)')
_LIBRARIES = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
    os.path.dirname(os.path.abspath(torch.__file__)),
    sysconfig.get_path("stdlib"),
)
_NOT_MADE = "no forward operation of this rank made it: it was in the batch or a weight, or came from another rank"
_SEND = "c10d.send"  # to the next stage of a pipeline, whose loss would be that of a number made here


class AnomalyWatch:
    """Looks for the operation that made the first number that is not finite in a step."""

    def __init__(self, plan: Plan, *, is_by_hand: bool = False) -> None:
        """`is_by_hand`: the passes of a step are in a loop of the user's own, forward and backward in one scope."""
        self._checks_backward = plan.precision.kind != "fp16"  # where gradients overflow, and the step is then skipped
        self._is_by_hand = is_by_hand
        self._seen = _FirstResults(skips_no_grad=is_by_hand)
        self._tracebacks: list[tuple[str, int, str]] = []

    def around(self, strategy: Any, step: Callable[..., Any]) -> Callable[..., Any]:
        """The same step of a strategy, watched."""
        strategy.forward_watch = self._seen

        def watched(*arguments: Any, **named: Any) -> Any:
            with self.watching(), self.explaining():
                return step(*arguments, **named)

        return watched

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The passes of one step."""
        self._seen.begin()
        backward = torch.autograd.set_detect_anomaly(self._checks_backward)
        with _shown_tracebacks() as self._tracebacks, backward, self._seen if self._is_by_hand else nullcontext():
            yield

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """A pass that may fail, within `watching`: NonFiniteLoss then has the operation that it began with."""
        try:
            yield
        except NonFiniteLoss as found:
            found.origin = found.origin or self._seen.origin(found.value)
            raise
        except Exception as failed:
            operation = _failed_backward(failed)
            if operation is None:
                raise
            origin = f"the backward pass of {operation}{_place(self._tracebacks)} returned it"
            raise NonFiniteLoss(math.nan, origin=origin, is_gradient=True) from failed


class _FirstResults(TorchDispatchMode):
    """The first operations whose results have NaN, or infinity, although what they were given has not."""

    supports_higher_order_operators = True

    def __init__(self, *, skips_no_grad: bool) -> None:
        """`skips_no_grad`: operations without gradients, as those of a backward pass."""
        super().__init__()
        self._skips_no_grad = skips_no_grad
        self._nan = self._inf = ""

    def begin(self) -> None:
        self._nan = self._inf = ""

    def origin(self, value: float) -> str:
        """What made the number, as far as it was an operation of this rank."""
        made = self._nan if math.isnan(value) else self._inf
        return f"it was first made by {made}" if made else _NOT_MADE

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named, name = dict(kwargs or {}), str(func)
        if name.startswith(_SEND) and self._nan and _has(torch.isnan, (args, named)):
            raise NonFiniteLoss(math.nan, origin=self.origin(math.nan))
        is_skipped = self._skips_no_grad and not torch.is_grad_enabled()
        if is_skipped or not name.startswith("aten.") or "empty" in name or (self._nan and self._inf):
            return func(*args, **named)
        kinds = [kind for kind, made in ((torch.isnan, self._nan), (torch.isinf, self._inf)) if not made]
        given = [_has(kind, (args, named)) for kind in kinds]  # before: an operation may write to what it is given
        result = func(*args, **named)
        if any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves((args, named))):
            for kind, had in zip(kinds, given, strict=True):
                if not had and _has(kind, result):
                    self._note(kind, name.split(".")[1])
        return result

    def _note(self, kind: Any, operation: str) -> None:
        frames = traceback.StackSummary.extract(traceback.walk_stack(None), lookup_lines=False)
        made = operation + _place([(frame.filename, frame.lineno or 0, frame.name) for frame in reversed(frames)])
        if kind is torch.isnan:
            self._nan = made
        else:
            self._inf = made


def _has(kind: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> bool:
    return any(bool(kind(values).any()) for values in map(_numbers, tree_leaves(tree)) if values is not None)


def _numbers(leaf: Any) -> torch.Tensor | None:
    """The numbers of a plain or a sharded tensor; None: not one whose values can be looked at."""
    if not isinstance(leaf, torch.Tensor):
        return None
    values = local(leaf)
    is_plain = type(values) in (torch.Tensor, torch.nn.Parameter) and values.layout is torch.strided
    is_wide = values.dtype.itemsize > 1  # numbers of 8 bits are looked at before and after
    has_values = is_plain and is_wide and not values.is_meta and values.numel() > 0
    return values if has_values and (values.is_floating_point() or values.is_complex()) else None


@contextmanager
def _shown_tracebacks() -> Iterator[list[tuple[str, int, str]]]:
    """The frames of the forward calls that autograd warns of; other warnings are shown as they would be."""
    found: list[tuple[str, int, str]] = []
    shown = warnings.showwarning

    def show(message: Any, *how: Any, **named: Any) -> None:
        if _OF_FORWARD in str(message):
            frames = [_FRAME.search(text) for text in str(message).splitlines()]
            found[:] = [(frame["file"], int(frame["line"]), frame["name"]) for frame in frames if frame is not None]
        else:
            shown(message, *how, **named)

    warnings.showwarning = show
    try:
        yield found
    finally:
        warnings.showwarning = shown


def _failed_backward(failed: BaseException) -> str | None:
    """The operation whose backward pass autograd found to make NaN; None: it is another error."""
    cause: BaseException | None = failed
    while cause is not None:
        if isinstance(cause, RuntimeError) and (found := _IN_BACKWARD.search(str(cause))):
            return found.group(1)
        cause = cause.__cause__ or cause.__context__
    return None


def _place(frames: Iterable[tuple[str, int, str]]) -> str:
    """Where the user's own code was, from the outermost frame to the innermost; "": nowhere."""
    own = [frame for frame in frames if not frame[0].startswith((*_LIBRARIES, "<"))]
    if not own:
        return ""
    file, line, name = own[-1]
    return f" at {os.path.basename(file)}:{line} in {name}"


def explain_nonfinite(
    found: NonFiniteLoss, ranks: Sequence[int], epoch: int, step: int, indices: Sequence[int]
) -> NonFiniteLossError:
    """`indices` are those of the samples that the ranks had in this step; none of a stream."""
    shown = ", ".join(str(index) for index in indices[:32]) + (" …" if len(indices) > 32 else "")
    where = f"the batch held the samples [{shown}]" if indices else "the batch came from a stream"
    whose = "this rank" if len(ranks) == 1 else "these ranks"
    causes = "usual causes: a bad sample, too high a learning rate, fp16 overflow, also of compressed gradients"
    look = "" if found.origin else ", set detect_anomaly=true to see which operation it came from"
    on = "" if found.origin else "; or, to train on, on_nan=continue"
    return NonFiniteLossError(
        f"{'a gradient' if found.is_gradient else 'the loss'} is {found.value} at step {step} (epoch {epoch}) on "
        f"{_name(ranks)}",
        why=f"{found.origin or causes}; {where} of {whose}",
        do=f"look at these samples{look}, lower learning_rate, set gradient_clipping{on}",
    )


def _name(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" … ({len(ranks)} in all)" if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"
