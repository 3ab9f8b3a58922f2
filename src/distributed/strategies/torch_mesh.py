"""TorchMesh: PyTorch-native parallelism as sizes of one mesh; the plan's mesh selects the strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distributed.core.plan import Plan
from distributed.strategies.replicated import Replicated

if TYPE_CHECKING:
    from distributed.strategies.sharded import Sharded


def TorchMesh(plan: Plan) -> Replicated | Sharded:
    """`Replicated` where every rank holds all of the state, `Pipelined` where it holds a stage, else `Sharded`."""
    if plan.is_replicated:
        return Replicated(plan)
    if plan.mesh.pp > 1:
        from distributed.strategies.pipelined import Pipelined  # takes long to import

        return Pipelined(plan)
    from distributed.strategies.sharded import Sharded  # takes long to import

    return Sharded(plan)
