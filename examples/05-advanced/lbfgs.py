"""L-BFGS: an optimizer that evaluates the loss of all samples as often as its line search likes.

    python lbfgs.py
    distributed train --script lbfgs.py --num-gpus 2

Each evaluation is forward and backward over the batches of all ranks, and every rank sees the same loss and gradient:
so all line searches go the same way. The optimizer's history is in checkpoints. The numbers are in double precision: a
line search makes much of their last digits.
"""

import torch
from alongside import numbers, train_alongside
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 1)).double()


def make_optimizer(parameters):
    return torch.optim.LBFGS(parameters, max_iter=8, history_size=10, line_search_fn="strong_wolfe")


def by_hand(batches):
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    for x, y in batches:

        def evaluate(x=x, y=y):
            optimizer.zero_grad()
            loss = mse_loss(model(x), y)
            loss.backward()
            return loss

        yield optimizer.step(evaluate).item()


x = numbers(240, 2, seed=1).double()
train_alongside(
    "L-BFGS",
    lambda: {"model": make_model(), "loss_fn": mse_loss, "optimizer": make_optimizer},
    TensorDataset(x, (x[:, :1] * x[:, 1:]).tanh()),
    by_hand,
    batch=len(x),
    epochs=12,
)
