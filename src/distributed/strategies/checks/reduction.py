"""Whether DDP has reduced every gradient of a step, checked before the optimizer steps.

A parameter that a backward pass leaves out keeps its bucket, and those after it, from being reduced: their gradients
stay this rank's own. torch reports that at the next forward pass, when the replicas have already diverged.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distributed.core.errors import TaskError, first_of
from distributed.runtime.torch_compat import reduction_finished

_INDICES = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")
_SHOWN = 5


def reduction_check(replicated: DistributedDataParallel, model: nn.Module, rank: int) -> Callable[[], None]:
    """A check that raises after a step's last backward pass if a gradient was not reduced; never synchronizes."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    finished, first = reduction_finished(replicated), named[0][1]
    finds_unused = replicated.find_unused_parameters or replicated.static_graph

    def check() -> None:
        try:
            finished()
        except RuntimeError as unfinished:
            found = _INDICES.search(str(unfinished))
            indices = [int(index) for index in found[1].split()] if found else []
            raise left_out([named[index][0] for index in indices], rank) from unfinished
        if first.grad is None and not finds_unused:  # there is no gradient at all, so DDP has not begun to reduce
            raise left_out([name for name, parameter in named if parameter.grad is None], rank)

    return check


def left_out(names: list[str], rank: int) -> TaskError:
    """The error for parameters without a gradient; the step was not taken, so no weight has changed."""
    named = f": {first_of(names, _SHOWN)}" if names else ""
    count = f"{len(names)} parameters" if len(names) > 1 else "a parameter"
    return TaskError(
        f"{count} got no gradient on rank {rank}{named}",
        why="the model left them out in the last backward pass of this step, so that gradients were not reduced over "
        "the ranks",
        do="set find_unused_parameters=True, or freeze parameters that are never trained with requires_grad_(False)",
    )
