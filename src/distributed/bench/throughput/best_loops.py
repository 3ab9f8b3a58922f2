"""Hand-written loops as fast as they get: what all trainers are compared with."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from distributed.bench.throughput.job import WorkloadJob
from distributed.bench.workloads.hand_written import replicate, run

_EAGER = 3  # steps before a CUDA graph is captured, as torch's documentation has it


def train_best(job: WorkloadJob) -> nn.Module:
    module = job.make_model()
    if job.device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
        if any(isinstance(part, nn.Conv2d) for part in module.modules()):
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model = replicate(job, module)
    run(job, model, job.make_optimizer(model.parameters()), _cut_batches(job))
    return module


def train_floor(job: WorkloadJob) -> nn.Module:
    """One process, one device."""
    model = job.make_model()
    model.train()
    optimizer = job.make_optimizer(model.parameters())
    rows = _cut_batches(job)
    static = [part.clone() for part in next(_cut_batches(job))]

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=job.precision != "fp32", cache_enabled=False):
            loss = job.loss(model, static)
        loss.backward()
        optimizer.step()

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(_EAGER):
            _fill(static, next(rows))
            optimizer.zero_grad()
            step()
    torch.cuda.current_stream().wait_stream(aside)
    optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for number, row in enumerate(rows, _EAGER):
        job.look(number)
        _fill(static, row)
        graph.replay()
    torch.cuda.synchronize()
    return model


def _fill(static: list[torch.Tensor], row: list[torch.Tensor]) -> None:
    for into, part in zip(static, row, strict=True):
        into.copy_(part)


def _cut_batches(job: WorkloadJob) -> Iterator[list[torch.Tensor]]:
    """Pieces of rows that lie on the device: there is nothing to gather or to send. The same global batches as those of
    the data loader."""
    rows, size = job.rows(), job.workload.batch
    placed = [part.to(job.device) for part in rows]
    pieces = len(rows[0]) // size
    for step in range(job.all_steps):
        start = (step * job.ranks + job.rank) % pieces * size
        yield [part[start : start + size] for part in placed]
