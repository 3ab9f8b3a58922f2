"""The bare loop of Horovod: DistributedOptimizer as its own tutorial has it, and nothing else."""

from __future__ import annotations

from distributed.bench.hand_written import run
from distributed.bench.work import Work, make_model, make_optimizer
from distributed.core.env import worker_env
from distributed.runtime.horovod_ring import import_horovod, join_ring
from distributed.runtime.session import Session

_PLAIN = {"controller": "gloo", "fusion_mb": None, "cycle_ms": None, "timeline": ""}


def train(work: Work) -> None:
    hvd = import_horovod()
    env = worker_env()
    assert env is not None
    ring = join_ring(Session.open(env, device="cpu", collectives="gloo", timeout_s=60), _PLAIN, 60)
    model = make_model()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(make_optimizer(model.parameters()), named_parameters=model.named_parameters())
    run(work, model, optimizer)
    ring.leave()
