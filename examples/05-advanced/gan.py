"""A GAN: two networks, each with an optimizer and a phase of every step.

    python gan.py
    python gan.py --ranks 3
    distributed train --script gan.py --num-gpus 2

`training_step` is called once for each optimizer, with its name; meanwhile only the parameters of that one require
gradients. The noise is part of the data: so a sample has the same noise on any number of ranks, and after a resume.
"""

import torch
from alongside import numbers, train_alongside
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, softplus
from torch.utils.data import TensorDataset

from distributed import OptimizerSetup


def make_parts():
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
    return {"generator": generator, "critic": nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))}


def adversarial_step(model, batch, optimizer):
    real, noise = batch
    judged = model["critic"](model["generator"](noise))
    if optimizer == "generator":
        return softplus(-judged).mean()
    true = model["critic"](real)
    loss = binary_cross_entropy_with_logits(true, torch.ones_like(true)) + softplus(judged).mean()
    return {"loss": loss, "real": true.mean(), "fake": judged.mean()}  # all but the loss are logged


def make_optimizers(model):
    generator = torch.optim.Adam(model["generator"].parameters(), lr=1e-3, betas=(0.5, 0.9))
    critic = torch.optim.Adam(model["critic"].parameters(), lr=1e-3, betas=(0.5, 0.9))
    return {"critic": critic, "generator": OptimizerSetup(generator, every=2)}  # the generator in every second step


def by_hand(batches):
    model = nn.ModuleDict(make_parts())
    setups = make_optimizers(model)
    phases = [("critic", setups["critic"], 1), ("generator", setups["generator"].optimizer, 2)]
    for step, batch in enumerate(batches, 1):
        total = 0.0
        for name, optimizer, every in phases:
            if step % every == 0:
                model.zero_grad()
                found = adversarial_step(model, batch, name)
                loss = found["loss"] if name == "critic" else found
                loss.backward()
                optimizer.step()
                total += loss.item()
        yield total


angles = torch.linspace(0, 6.28, 500)
circle = torch.stack([angles.cos(), angles.sin()], 1) + 0.05 * numbers(500, 2, seed=1)
train_alongside(
    "GAN",
    lambda: {"model": make_parts(), "training_step": adversarial_step, "configure_optimizers": make_optimizers},
    TensorDataset(circle[torch.randperm(500, generator=torch.Generator().manual_seed(2))], numbers(500, 8, seed=3)),
    by_hand,
)
