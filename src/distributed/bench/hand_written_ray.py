"""The bare loop of Ray Train: its own prepare_model in a worker that Ray placed, and nothing else."""

from __future__ import annotations

from ray.train.torch import prepare_model

from distributed.bench.hand_written import run
from distributed.bench.work import Work, make_model, make_optimizer


def train(work: Work) -> None:
    model = prepare_model(make_model(), parallel_strategy_kwargs={"gradient_as_bucket_view": True})
    run(work, model, make_optimizer(model.parameters()))
