"""The bare loop: what a good engineer writes by hand for this work, and nothing else. All are measured against it."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from distributed.bench.work import BATCH, Batch, Work, make_model, make_optimizer


def train(work: Work) -> None:
    model = DistributedDataParallel(make_model(), gradient_as_bucket_view=True)
    run(work, model, make_optimizer(model.parameters()))


def own_loader(work: Work) -> DataLoader[Batch]:
    """This rank's part of the data."""
    dataset = work.dataset()
    sampler: DistributedSampler[Batch] = DistributedSampler(dataset, work.ranks, work.rank)
    sampler.set_epoch(0)
    return DataLoader(dataset, batch_size=BATCH, sampler=sampler, collate_fn=work.clock)


def run(work: Work, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss_fn = nn.CrossEntropyLoss()
    model.train()
    for inputs, labels in own_loader(work):
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), labels)
        loss.backward()
        optimizer.step()
