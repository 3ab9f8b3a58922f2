"""The bare loop of Horovod: DistributedOptimizer as its own tutorial has it, and nothing else."""

from __future__ import annotations

from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from distributed.bench.work import BATCH, Batch, Work, make_model, make_optimizer
from distributed.core.env import worker_env
from distributed.runtime.horovod_ring import import_horovod, join_ring
from distributed.runtime.session import Session

_PLAIN = {"controller": "gloo", "fusion_mb": None, "cycle_ms": None, "timeline": ""}


def train(work: Work) -> None:
    hvd = import_horovod()
    env = worker_env()
    assert env is not None
    ring = join_ring(Session.open(env, device="cpu", collectives="gloo", timeout_s=60), _PLAIN, 60)
    dataset = work.dataset()
    sampler: DistributedSampler[Batch] = DistributedSampler(dataset, work.ranks, work.rank)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler, collate_fn=work.clock)
    model = make_model()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(make_optimizer(model.parameters()), named_parameters=model.named_parameters())
    loss_fn = nn.CrossEntropyLoss()
    model.train()
    sampler.set_epoch(0)
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), labels)
        loss.backward()
        optimizer.step()
    ring.leave()
