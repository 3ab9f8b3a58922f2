"""The hand-written loop: what a good engineer writes for a workload, and nothing else. All are measured against it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distributed.bench.workloads.job import BenchJob


def train(job: BenchJob) -> nn.Module:
    module = job.make_model()
    model = replicate(job, module)
    run(job, model, job.make_optimizer(model.parameters()), batches(job))
    return module


def replicate(job: BenchJob, module: nn.Module) -> nn.Module:
    return DistributedDataParallel(module, gradient_as_bucket_view=True) if job.ranks > 1 else module


def batches(job: BenchJob) -> Iterable[Any]:
    """This rank's, where the model is."""
    if job.device.type == "cpu":
        return job.own_loader()
    return ([part.to(job.device, non_blocking=True) for part in row] for row in job.own_loader())


def run(job: BenchJob, model: nn.Module, optimizer: torch.optim.Optimizer, rows: Iterable[Any]) -> None:
    model.train()
    for step, row in enumerate(rows):
        job.look(step)
        optimizer.zero_grad()
        with job.autocast():
            loss = job.loss(model, row)
        loss.backward()
        optimizer.step()
