"""What went wrong in a step, as an error for the user."""

from __future__ import annotations

from collections.abc import Sequence

from distributed.core.errors import NonFiniteLossError
from distributed.strategies.base import NonFiniteLoss


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
