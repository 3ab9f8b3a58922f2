"""The bare loop of Horovod: DistributedOptimizer as its own tutorial has it, and nothing else."""

from __future__ import annotations

from torch import nn

from distributed.bench.workloads.hand_written import batches, run
from distributed.bench.workloads.job import BenchJob
from distributed.core.env import worker_env
from distributed.engines.horovod.ring import import_horovod, join_ring
from distributed.runtime.session import Session

_PLAIN = {"controller": "gloo", "cycle_ms": None, "timeline": ""}


def train(job: BenchJob) -> nn.Module:
    hvd = import_horovod()
    env = worker_env()
    assert env is not None
    ring = join_ring(Session.open(env, device="cpu", collectives="gloo", timeout_s=60), _PLAIN, 60)
    model = job.make_model()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        job.make_optimizer(model.parameters()), named_parameters=model.named_parameters()
    )
    run(job, model, optimizer, batches(job))
    ring.leave()
    return model
