"""The bare loop: what a good engineer writes by hand for this work, and nothing else. All are measured against it."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from distributed.bench.work import BATCH, Batch, Work, make_model, make_optimizer


def train(work: Work) -> None:
    dataset = work.dataset()
    sampler: DistributedSampler[Batch] = DistributedSampler(dataset, work.ranks, work.rank)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler, collate_fn=work.clock)
    model = DistributedDataParallel(make_model(), gradient_as_bucket_view=True)
    optimizer = make_optimizer(model.parameters())
    loss_fn = nn.CrossEntropyLoss()
    model.train()
    sampler.set_epoch(0)
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), labels)
        loss.backward()
        optimizer.step()
