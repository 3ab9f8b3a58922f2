"""TorchMesh: PyTorch-native parallelism as sizes of one mesh; the plan's mesh selects the strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distributed.core.plan import Plan
from distributed.strategies.asynchronous import Asynchronous
from distributed.strategies.local_steps import LocalSteps
from distributed.strategies.replicated import Replicated

if TYPE_CHECKING:
    from distributed.strategies.sharded import Sharded


def TorchMesh(plan: Plan) -> Replicated | Sharded:
    """`Replicated` or `LocalSteps` where every rank holds all of the state, `Pipelined` for stages, else `Sharded`."""
    if plan.is_replicated:
        meets = plan.replicate.synchronization
        steps_alone = meets.kind == "diloco" or (meets.is_local and plan.world_size > 1)
        if meets.kind == "asynchronous" and plan.world_size > 1 and plan.trains:
            return Asynchronous(plan)
        return LocalSteps(plan) if steps_alone and plan.trains else Replicated(plan)
    if plan.mesh.pp > 1:
        from distributed.strategies.pipelined import Pipelined  # takes long to import

        return Pipelined(plan)
    from distributed.strategies.sharded import Sharded  # takes long to import

    return Sharded(plan)
