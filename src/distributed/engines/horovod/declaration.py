"""Horovod as an engine: what it can, and where its parts are."""

from __future__ import annotations

from collections.abc import Mapping

from distributed.core.engines.engine import Engine, LauncherTraits, PeerLoss, Support
from distributed.strategies.declaration import REPLICAS


def _announces(environ: Mapping[str, str]) -> bool:
    """Torch's variables, where they are set too, are those of a launcher that this rank ran."""
    needed = {"HOROVOD_RANK", "HOROVOD_GLOO_RENDEZVOUS_ADDR"}
    return needed <= environ.keys() and not {"RANK", "WORLD_SIZE"} <= environ.keys()


HOROVOD = Engine(
    "distributed.engines.horovod.engine:HorovodEngine",
    needs="horovod.torch",
    install="make horovod",
    does="Horovod's ring, on gloo or MPI",
    can=REPLICAS
    | {
        "unused": Support(),
        "compression": Support("fp16"),
        "adasum": Support("over MPI; checkpoints have rank 0's optimizer state"),
        "fusion": Support(),
        "timeline": Support(),
        "mpi": Support("where the wheel was built with it"),
        "regroup": Support("on gloo, unless a cycle time is set"),
    },
    owns_reduction=True,
    # Also what ranks get that hand it tensors which differ.
    peer_losses=(PeerLoss(("HorovodInternalError",), unless="mismatched"),),
    plans="distributed.engines.horovod.plan:plan_engine",
    launcher=LauncherTraits(
        "horovodrun",
        announces=_announces,
        reads_env="distributed.engines.horovod.env:read_env",
        meets="distributed.engines.horovod.world:find_meeting",
        links="distributed.engines.horovod.world:horovod_line",
        regroups=True,
    ),
    # A script's own `hvd.init()` would start MPI, which has not started these ranks and can be started once.
    environ={"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"},
)
