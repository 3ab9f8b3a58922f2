"""What went wrong in a step, as the user is told it."""

from __future__ import annotations

from collections.abc import Sequence

from distributed.core.errors import NonFiniteLossError
from distributed.strategies.base import NonFiniteLoss


def explain_nonfinite(
    found: NonFiniteLoss, rank: int, epoch: int, step: int, indices: Sequence[int]
) -> NonFiniteLossError:
    """`indices` are those of the samples that the rank had in this step; none of a stream."""
    shown = ", ".join(str(index) for index in indices[:32]) + (" …" if len(indices) > 32 else "")
    where = f"the batch held the samples [{shown}]" if indices else "the batch came from a stream"
    return NonFiniteLossError(
        f"the loss is {found.value} at step {step} (epoch {epoch}) on rank {rank}",
        why=f"{where} of this rank; usual causes: a bad sample, too high a learning rate, fp16 overflow, also of "
        "gradients that are sent compressed",
        do="look at these samples, lower learning_rate, set gradient_clipping; on_nan=continue goes on regardless",
    )
