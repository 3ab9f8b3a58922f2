"""Hugging Face Accelerate over the same work: the user's own loop, no logging."""

from __future__ import annotations

from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn

from distributed.bench.work import Work, make_model, make_optimizer


def train(work: Work) -> None:
    options = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[options])
    module = make_model()
    model, optimizer, loader = accelerator.prepare(module, make_optimizer(module.parameters()), work.loader())
    loss_fn = nn.CrossEntropyLoss()
    model.train()
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), labels)
        accelerator.backward(loss)
        optimizer.step()
