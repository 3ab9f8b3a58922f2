"""The environment of ranks that share a GPU: to NCCL each is on its own host; any torch script can run there."""

from __future__ import annotations

import socket

from distributed.core.env import LOCAL_PLACE, WorkerEnv


def on_shared_gpu(worker: WorkerEnv, gpus: int) -> dict[str, str]:
    """The variables that a rank on a shared GPU gets in place of those of a rank with its own GPU.

    NCCL refuses two ranks of one host on one GPU, and uses sockets between hosts. LOCAL_RANK names the GPU, for which
    scripts read it; this library reads the rank's place on its node from another variable.

    >>> found = on_shared_gpu(WorkerEnv(rank=3, local_rank=3, world_size=4, local_world_size=4), gpus=1)
    >>> found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"], found["DISTRIBUTED_LOCAL_PLACE"]
    ('0', '1', '3/4')
    """
    return {
        # A replacement rank in a later attempt is another host, also to the surviving ranks.
        "NCCL_HOSTID": f"{socket.gethostname()}-{worker.attempt}-rank-{worker.rank}",
        "LOCAL_RANK": str(worker.local_rank % max(1, gpus)),
        "LOCAL_WORLD_SIZE": str(min(max(1, gpus), worker.local_world_size)),
        LOCAL_PLACE: f"{worker.local_rank}/{worker.local_world_size}",
    }
