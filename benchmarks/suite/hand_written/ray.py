"""The bare loop of Ray Train: its own prepare_model in a worker that Ray placed, and nothing else."""

from __future__ import annotations

from ray.train.torch import prepare_model
from torch import nn

from distributed.bench.workloads.hand_written import batches, run
from distributed.bench.workloads.job import BenchJob


def train(job: BenchJob) -> nn.Module:
    module = job.make_model()
    model = prepare_model(module, parallel_strategy_kwargs={"gradient_as_bucket_view": True})
    run(job, model, job.make_optimizer(model.parameters()), batches(job))
    return module
