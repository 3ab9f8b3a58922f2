"""Errors of torch in a step with several parts, raised again as errors that say what to do."""

from __future__ import annotations

import re

from distributed.core.errors import TaskError

_OF_DDP = re.compile(
    r"Expected to have finished reduction in the prior iteration|Expected to mark a variable ready only once"
    r"|Your training graph has changed in this iteration"
)
_OF_FREED = re.compile(r"storage of size 0|its data is not allocated yet")  # of a gathered parameter that was freed
_OF_KERNEL = re.compile(r"(?P<operation>\S+) does not have a deterministic implementation")
_OF_NORMALIZATION = "Expected more than 1 value per channel"


def explain(error: RuntimeError, rank: int) -> None:
    """Raise a known error of a forward or backward pass as one that the user can fix; others pass."""
    if _OF_DDP.search(str(error)):
        raise TaskError(
            f"DDP cannot reduce the gradients of this model on rank {rank}",
            why=str(error).splitlines()[0],
            do="set find_unused_parameters=True and static_graph=False if the model leaves parameters out in some "
            "steps; only one forward pass of a step may use a parameter",
        ) from error


def explain_sample(error: ValueError) -> None:
    """Raise the error of a layer that cannot normalize a part of a batch with one sample."""
    if _OF_NORMALIZATION in str(error):
        raise TaskError(
            "a layer of the model does not normalize a part of a batch that has one sample",
            why=f"the model is called separately for each part of a step, and torch reports: {error}",
            do="set a larger batch_size or fewer virtual_ranks, so that each part has several samples; if only the "
            "last batch is small, set drop_last=True",
        ) from error


def explain_kernel(error: RuntimeError) -> None:
    """Raise the error of an operation that torch has no deterministic kernel for."""
    found = _OF_KERNEL.search(str(error))
    if found is None:
        return
    raise TaskError(
        f"{found['operation']} has no deterministic kernel on this device",
        why="reproducible='bitwise' promises the same bytes in every run, and this operation adds in any order",
        do="use another operation (for a cross entropy of (N, C, …): flatten it to (N, C) and (N,)), "
        "or set reproducible='off'",
    ) from error


def explain_freed(failed: RuntimeError) -> None:
    """Raise the error of a backward pass that reads parameters which FSDP has freed."""
    if not _OF_FREED.search(str(failed)):
        return
    raise TaskError(
        "the backward pass reads parameters of the model that FSDP has freed",
        why="FSDP frees the parameters of a block after the first backward pass through it; a gradient of a gradient, "
        "as in a gradient penalty (torch.autograd.grad with create_graph=True), passes through it twice",
        do="train with all parameters on every rank: backend='pytorch-ddp', and zero_stage=1 for the optimizer state",
    ) from failed
