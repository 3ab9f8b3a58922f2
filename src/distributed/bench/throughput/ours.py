"""Our Trainer over a workload. The clock is that of its events: a step may be one CUDA graph, which calls no Python."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from distributed.bench.throughput.job import SHARED, WorkloadJob, shared_memory
from distributed.bench.workloads.ours import fit
from distributed.core.run_dir import RunDir

_STATE = 3  # tensors for each parameter that a checkpoint holds: itself and AdamW's two


def train(job: WorkloadJob) -> nn.Module:
    model = job.make_model()
    precision = False if job.precision == "fp32" else "bf16"
    settings = {"mixed_precision": precision, "device": job.device.type} | job.settings
    if job.ranks == 1:  # it is started alone, and has no run directory yet
        os.makedirs(job.scratch, exist_ok=True)
        settings |= {"num_gpus": 1, "run_dir": tempfile.mkdtemp(dir=job.scratch)}
    with _quick_checkpoints(job, model) as place:
        history = fit(job, model, job.workload.loss_fn, settings | place)
    if job.rank == 0:  # only rank 0 writes events
        job.looked(looks(RunDir(history.run_dir).events, job.warm, job.warm + job.steps))
        shutil.rmtree(RunDir(history.run_dir).checkpoints, ignore_errors=True)  # there is one for each turn
    return model


@contextmanager
def _quick_checkpoints(job: WorkloadJob, model: nn.Module) -> Iterator[dict[str, str]]:
    """The last state is always saved, after the clock was read. Where there is room it goes to memory and not to a
    disk: that of a large model would take longer than the turn."""
    size = _STATE * sum(parameter.numel() * 4 for parameter in model.parameters())
    if job.ranks > 1 or shared_memory() < 2 * size:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="bench-", dir=SHARED) as folder:
        yield {"checkpoint_dir": folder}


def looks(events: Path, *steps: int) -> list[float]:
    """When these steps were done; their losses had been read from the device by then."""
    ended = {}
    for line in events.read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        if event["event"] == "StepEnded":
            ended[event["step"]] = event["time"]
    return [ended[step] for step in steps]
