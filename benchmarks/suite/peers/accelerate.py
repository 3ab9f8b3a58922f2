"""Hugging Face Accelerate over the same work: the user's own loop, no logging."""

from __future__ import annotations

from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn

from distributed.bench.workloads.job import BenchJob


def train(job: BenchJob) -> nn.Module:
    options = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    precision = "no" if job.precision == "fp32" else "bf16"
    is_cpu = job.device.type == "cpu"
    accelerator = Accelerator(cpu=is_cpu, mixed_precision=precision, kwargs_handlers=[options])
    module = job.make_model()
    model, optimizer, loader = accelerator.prepare(module, job.make_optimizer(module.parameters()), job.loader())
    model.train()
    for step, row in enumerate(loader):
        job.look(step)
        optimizer.zero_grad()
        with accelerator.autocast():
            loss = job.loss(model, row)
        accelerator.backward(loss)
        optimizer.step()
    trained: nn.Module = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    return trained
