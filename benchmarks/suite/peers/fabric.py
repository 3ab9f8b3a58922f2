"""Lightning Fabric over the same work: the user's own loop, no logging."""

from __future__ import annotations

from typing import Any

from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch import nn

from distributed.bench.workloads.job import BenchJob


def train(job: BenchJob) -> nn.Module:
    backend = "gloo" if job.device.type == "cpu" else "nccl"
    ddp = DDPStrategy(process_group_backend=backend, gradient_as_bucket_view=True)
    precision: Any = "32-true" if job.precision == "fp32" else "bf16-mixed"
    fabric = Fabric(
        accelerator=job.device.type, devices=job.ranks, strategy=ddp if job.ranks > 1 else "auto", precision=precision
    )
    fabric.launch()
    module = job.make_model()
    model, optimizer = fabric.setup(module, job.make_optimizer(module.parameters()))
    loader: Any = fabric.setup_dataloaders(job.loader())
    model.train()
    if job.ranks > 1:
        loader.sampler.set_epoch(0)
    for step, row in enumerate(loader):
        job.look(step)
        optimizer.zero_grad()
        loss = job.loss(model, row)
        fabric.backward(loss)
        optimizer.step()
    return module
