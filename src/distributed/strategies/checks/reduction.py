"""Whether DDP has reduced every gradient of a step, asked before the step is taken.

A parameter that a backward pass leaves out keeps its bucket, and those after it, from being reduced: their gradients
stay this rank's own. torch says so at the next forward pass, when the ranks have already gone apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from torch.nn.parallel import DistributedDataParallel

from distributed.core.errors import TaskError

_INDICES = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")
_OF_DDP = re.compile(
    r"Expected to have finished reduction in the prior iteration|Expected to mark a variable ready only once"
    r"|Your training graph has changed in this iteration"
)
_SHOWN = 5


def reduction_check(replicated: DistributedDataParallel, rank: int) -> Callable[[], None]:
    """What raises, after the last backward pass of a step, if not all gradients were reduced. It waits for nothing."""
    reducer, module = replicated.reducer, replicated.module
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    finished, first = reducer._check_reducer_finalized, named[0][1]
    finds_unused = replicated.find_unused_parameters or replicated.static_graph

    def check() -> None:
        try:
            finished()
        except RuntimeError as unfinished:
            found = _INDICES.search(str(unfinished))
            indices = [int(index) for index in found[1].split()] if found else []
            raise left_out([named[index][0] for index in indices], rank) from unfinished
        if first.grad is None and not finds_unused:  # no gradient at all came, so that DDP has not even begun
            raise left_out([name for name, parameter in named if parameter.grad is None], rank)

    return check


def explain(error: RuntimeError, rank: int) -> None:
    """Raise torch's own errors of the same kind, which come in a forward or backward pass, as the user's to mend."""
    if _OF_DDP.search(str(error)):
        raise TaskError(
            f"DDP cannot reduce the gradients of this model on rank {rank}",
            why=str(error).splitlines()[0],
            do="set find_unused_parameters=True and static_graph=False if the model leaves parameters out in some "
            "steps; a parameter may be used by one forward pass of a step only",
        ) from error


def left_out(names: list[str], rank: int) -> TaskError:
    """Of a step that was not taken: no rank's weights have changed."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    told = f": {', '.join(names[:_SHOWN])}{more}" if names else ""
    count = f"{len(names)} parameters" if len(names) > 1 else "a parameter"
    return TaskError(
        f"{count} got no gradient on rank {rank}{told}",
        why="the model left them out in the last backward pass of this step, so that gradients were not reduced over "
        "the ranks",
        do="set find_unused_parameters=True, or freeze what is never trained with requires_grad_(False)",
    )
