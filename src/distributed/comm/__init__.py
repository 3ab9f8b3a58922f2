"""What crosses the wire: named collectives with deadlines, all-reduces written out, compressed gradients.

The names are resolved on first use, so importing this module imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed.comm.algorithms.choice import AlgorithmChoice as AlgorithmChoice
    from distributed.comm.collectives.backends import CollectiveBackend as CollectiveBackend
    from distributed.comm.collectives.backends import backend as backend
    from distributed.comm.collectives.messages import recv as recv
    from distributed.comm.collectives.messages import send as send
    from distributed.comm.collectives.moves import all_gather as all_gather
    from distributed.comm.collectives.moves import all_to_all as all_to_all
    from distributed.comm.collectives.moves import barrier as barrier
    from distributed.comm.collectives.moves import broadcast as broadcast
    from distributed.comm.collectives.moves import gather as gather
    from distributed.comm.collectives.moves import scatter as scatter
    from distributed.comm.collectives.reductions import all_reduce as all_reduce
    from distributed.comm.collectives.reductions import auto_choices as auto_choices
    from distributed.comm.collectives.reductions import reduce as reduce
    from distributed.comm.collectives.reductions import reduce_scatter as reduce_scatter
    from distributed.comm.compression.gradient_compression import GradientCompression as GradientCompression
    from distributed.comm.custom import CustomCommunication as CustomCommunication
    from distributed.comm.groups.places import Handle as Handle
    from distributed.comm.groups.places import check_shapes as check_shapes

_PUBLIC = {
    "AlgorithmChoice": "distributed.comm.algorithms.choice",
    "CollectiveBackend": "distributed.comm.collectives.backends",
    "CustomCommunication": "distributed.comm.custom",
    "GradientCompression": "distributed.comm.compression.gradient_compression",
    "Handle": "distributed.comm.groups.places",
    "all_gather": "distributed.comm.collectives.moves",
    "all_reduce": "distributed.comm.collectives.reductions",
    "all_to_all": "distributed.comm.collectives.moves",
    "auto_choices": "distributed.comm.collectives.reductions",
    "backend": "distributed.comm.collectives.backends",
    "barrier": "distributed.comm.collectives.moves",
    "broadcast": "distributed.comm.collectives.moves",
    "check_shapes": "distributed.comm.groups.places",
    "gather": "distributed.comm.collectives.moves",
    "recv": "distributed.comm.collectives.messages",
    "reduce": "distributed.comm.collectives.reductions",
    "reduce_scatter": "distributed.comm.collectives.reductions",
    "scatter": "distributed.comm.collectives.moves",
    "send": "distributed.comm.collectives.messages",
}
__all__ = [*_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'distributed.comm' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return __all__
