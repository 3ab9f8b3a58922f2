"""What users add to a training: a step, a callback, an average or a loop of their own, and the same by hand."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import distributed
from distributed import Callback, Task, Trainer, callbacks
from distributed.bench.workloads.hand_written import batches, replicate
from distributed.bench.workloads.job import BenchJob

_DECAY = 0.999


def train_own_step(job: BenchJob) -> nn.Module:
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        return job.loss(model, batch)

    return _fit(job, job.make_model(), training_step=step, optimizer=job.make_optimizer)


def train_own_task(job: BenchJob) -> nn.Module:
    """A Task with a step of its own, which logs one value in each step."""
    loss = nn.CrossEntropyLoss()

    class Logging(Task):
        def training_step(self, model: nn.Module, batch: Any) -> torch.Tensor:
            inputs, target = batch
            outputs = model(inputs)
            self.log("largest", outputs.detach()[0, 0])
            found: torch.Tensor = loss(outputs, target)
            return found

    return _fit(job, Logging(job.make_model(), optimizer=job.make_optimizer))


def train_with_callback(job: BenchJob) -> nn.Module:
    class Steps(Callback):
        count = 0

        def on_step_end(self, run: Any) -> None:
            self.count += 1

    return _fit_plain(job, callbacks=[Steps()])


def train_with_ema(job: BenchJob) -> nn.Module:
    return _fit_plain(job, callbacks=[callbacks.EMA(_DECAY)])


def train_in_own_loop(job: BenchJob) -> nn.Module:
    run = distributed.start(epochs=1, tensorboard=True, backend=job.engine, log_every_n_steps=job.log_every)
    module = job.make_model()
    model, optimizer, loader = run.prepare(module, job.make_optimizer(module.parameters()), job.loader())
    for _ in run.epochs():
        for row in loader:
            loss = job.loss(model, row)
            run.backward(loss)
            run.step(optimizer)
    return module


def train_by_steps(job: BenchJob) -> nn.Module:
    model = job.make_model()
    trainer = Trainer(model, loss_fn=nn.CrossEntropyLoss(), optimizer=job.make_optimizer, backend=job.engine)
    for inputs, target in batches(job):
        trainer.train_step(inputs, target)
    return model


def train_by_hand_with_means(job: BenchJob) -> nn.Module:
    """What `train_step` also does: the samples and the mean loss of all ranks, in each step."""
    module = job.make_model()
    model = replicate(job, module)
    optimizer = job.make_optimizer(model.parameters())
    model.train()
    for row in batches(job):
        size = torch.tensor(float(len(row[0])))
        dist.all_reduce(size)
        optimizer.zero_grad()
        loss = job.loss(model, row)
        (loss * (len(row[0]) * job.ranks / size)).backward()
        optimizer.step()
        mean = loss.detach() / job.ranks
        dist.all_reduce(mean)
        mean.item()
    return module


def train_by_hand_with_lerp(job: BenchJob) -> nn.Module:
    """The arithmetic of an average alone, over lists that are made once."""
    module = job.make_model()
    values = [parameter.detach() for parameter in module.parameters()]
    averages = [value.clone() for value in values]
    return _by_hand(job, module, lambda: torch._foreach_lerp_(averages, values, 1 - _DECAY))


def train_by_hand_with_average(job: BenchJob) -> nn.Module:
    """The average as torch's own helper keeps it."""
    module = job.make_model()
    averaged = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(_DECAY))
    return _by_hand(job, module, lambda: averaged.update_parameters(module))


def _by_hand(job: BenchJob, module: nn.Module, then: Any) -> nn.Module:
    model = replicate(job, module)
    optimizer = job.make_optimizer(model.parameters())
    model.train()
    for row in batches(job):
        optimizer.zero_grad()
        job.loss(model, row).backward()
        optimizer.step()
        then()
    return module


def _fit_plain(job: BenchJob, **settings: Any) -> nn.Module:
    return _fit(job, job.make_model(), loss_fn=nn.CrossEntropyLoss(), optimizer=job.make_optimizer, **settings)


def _fit(job: BenchJob, model: Any, **settings: Any) -> nn.Module:
    """As the plain contender does, but for what is given."""
    trainer = Trainer(
        model, epochs=1, tensorboard=True, backend=job.engine, log_every_n_steps=job.log_every, **settings
    )
    trainer.fit(job.loader())
    trained: nn.Module = trainer.model
    return trained
