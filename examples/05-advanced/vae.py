"""A variational autoencoder: a loss of two terms, values logged from inside, and a count that the task keeps.

    python vae.py
    distributed train --script vae.py --num-gpus 2

The weight of the second term grows with the number of steps. The task counts them, and says in `state` what of it a
checkpoint keeps: a run that resumes, or a rank that takes another one's place, continues with that count.
"""

import torch
from alongside import numbers, train_alongside
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from distributed import Task

WARM_UP = 30  # steps


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 4))
        self.decoder = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 6))


def terms(model, batch):
    """The error of what is restored, and how far the codes are from a normal distribution; means over the samples."""
    x, noise = batch
    mean, log_variance = model.encoder(x).chunk(2, 1)
    restored = model.decoder(mean + (log_variance / 2).exp() * noise)
    divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean()
    return mse_loss(restored, x), divergence


class VariationalTask(Task):
    steps = 0

    def training_step(self, model, batch):
        self.steps += 1
        error, divergence = terms(model, batch)
        self.log("error", error)
        self.log("divergence", divergence)
        return error + 0.1 * min(1, self.steps / WARM_UP) * divergence

    def validation_step(self, model, batch):
        error, divergence = terms(model, batch)
        return {"loss": error + 0.1 * divergence, "error": error}

    def state(self):
        return {"steps": self.steps}

    def load_state(self, state):
        self.steps = state["steps"]


def make_optimizer(parameters):
    return torch.optim.Adam(parameters, lr=1e-2)


def by_hand(batches):
    model = Autoencoder()
    optimizer = make_optimizer(model.parameters())
    for step, batch in enumerate(batches, 1):
        error, divergence = terms(model, batch)
        loss = error + 0.1 * min(1, step / WARM_UP) * divergence
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


def make_data(samples, seed):
    """Points near a surface, and the noise of each sample's code."""
    return TensorDataset(
        (numbers(samples, 2, seed=seed) @ numbers(2, 6, seed=9)).tanh(), numbers(samples, 2, seed=seed + 1)
    )


train_alongside(
    "VAE",
    lambda: {"model": VariationalTask(Autoencoder(), optimizer=make_optimizer)},
    make_data(500, seed=1),
    by_hand,
    validation=make_data(100, seed=3),
)
