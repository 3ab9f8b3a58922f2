"""REINFORCE with a learned baseline: a step that calls backward and its two optimizers itself.

    python reinforce.py
    distributed train --script reinforce.py --num-gpus 2

A sample is an episode: the random numbers by which its actions are drawn and its world moves, so that it is the same on
any number of ranks. `backward` takes a mean over this rank's episodes, or over a weight, here the number of moves;
`step` reduces the gradients over the ranks, and steps one of the optimizers.
"""

import torch
from alongside import train_alongside
from torch import nn
from torch.nn.functional import one_hot
from torch.utils.data import TensorDataset

from distributed import Task

LENGTH, MOVES = 7, 24  # of the corridor, and of an episode at most
SLIP, DISCOUNT = 0.1, 0.95


def play(policy, chances):
    """Walk along corridors from the middle to an end: the right one is worth 1, the left one -1.

    Of each episode and move: the place, the logarithm of the action's probability, the discounted return, and whether
    the episode was still going on.
    """
    place = torch.full((len(chances),), LENGTH // 2)
    walks = torch.ones(len(chances), dtype=torch.bool)
    places, chosen, rewards, counted = [], [], [], []
    for drawn, slip in (move.unbind(1) for move in chances.unbind(1)):
        places.append(one_hot(place, LENGTH).float())
        right = policy(places[-1]).squeeze(1).sigmoid()
        goes_right = drawn < right.detach()
        chosen.append(torch.where(goes_right, right, 1 - right).log())
        counted.append(walks)
        place = torch.where(walks, place + 2 * (goes_right ^ (slip < SLIP)).long() - 1, place)
        rewards.append(walks * ((place == LENGTH - 1).float() - (place == 0).float()))
        walks = walks & (place > 0) & (place < LENGTH - 1)
    returns = [rewards[-1]]
    for reward in reversed(rewards[:-1]):
        returns.insert(0, reward + DISCOUNT * returns[0])
    return torch.stack(places, 1), torch.stack(chosen, 1), torch.stack(returns, 1), torch.stack(counted, 1)


def losses_of(model, chances):
    """The policy's, a mean over the episodes, and the baseline's, a mean over the moves; their number; the return."""
    places, chosen, returns, counted = play(model["policy"], chances)
    expected = model["baseline"](places).squeeze(2)
    gain = (returns - expected.detach()) * counted
    errors = (expected - returns).square() * counted
    return -(chosen * gain).sum(1).mean(), errors.sum() / counted.sum(), counted.sum(), returns[:, 0].mean()


def make_parts():
    torch.manual_seed(0)
    return {"policy": nn.Linear(LENGTH, 1), "baseline": nn.Linear(LENGTH, 1)}


def make_optimizers(model):
    return {
        "policy": torch.optim.Adam(model["policy"].parameters(), lr=0.02),
        "baseline": torch.optim.SGD(model["baseline"].parameters(), lr=0.5),
    }


class Reinforce(Task):
    manual_optimization = True

    def configure_optimizers(self, model):
        return make_optimizers(model)

    def training_step(self, model, batch):
        policy_loss, baseline_loss, moves, gained = losses_of(model, batch[0])
        self.zero_grad()
        self.backward(policy_loss)
        self.backward(baseline_loss, weight=moves)
        self.step("policy")
        self.step("baseline")
        self.log("return", gained)


def by_hand(batches):
    model = nn.ModuleDict(make_parts())
    optimizers = make_optimizers(model)
    for (chances,) in batches:
        policy_loss, baseline_loss, _, _ = losses_of(model, chances)
        model.zero_grad()
        (policy_loss + baseline_loss).backward()
        for optimizer in optimizers.values():
            optimizer.step()
        yield policy_loss.item() + baseline_loss.item()


episodes = TensorDataset(torch.rand(500, MOVES, 2, generator=torch.Generator().manual_seed(1)))
train_alongside("REINFORCE", lambda: {"model": Reinforce(make_parts())}, episodes, by_hand)
