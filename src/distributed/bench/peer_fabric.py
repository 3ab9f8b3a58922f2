"""Lightning Fabric over the same work: the user's own loop, no logging."""

from __future__ import annotations

from typing import Any

from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch import nn

from distributed.bench.work import Work, make_model, make_optimizer


def train(work: Work) -> None:
    strategy = DDPStrategy(process_group_backend="gloo", gradient_as_bucket_view=True)
    fabric = Fabric(accelerator="cpu", devices=work.ranks, strategy=strategy)
    fabric.launch()
    module = make_model()
    model, optimizer = fabric.setup(module, make_optimizer(module.parameters()))
    loader: Any = fabric.setup_dataloaders(work.loader())
    loss_fn = nn.CrossEntropyLoss()
    model.train()
    loader.sampler.set_epoch(0)
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), labels)
        fabric.backward(loss)
        optimizer.step()
