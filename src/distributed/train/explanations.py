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
    return NonFiniteLossError(
        f"the loss is {found.value} at step {step} (epoch {epoch}) on {_name(ranks)}",
        why=f"{where} of {whose}; usual causes: a bad sample, too high a learning rate, fp16 overflow, also of "
        "gradients that are sent compressed",
        do="look at these samples, lower learning_rate, set gradient_clipping; or, to train on, on_nan=continue",
    )


def _name(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" … ({len(ranks)} in all)" if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"
