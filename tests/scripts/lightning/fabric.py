"""A loop of the user's own over Lightning's Fabric: setup, backward, save and load."""

import os

import torch
from lightning.fabric import Fabric, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CHECKPOINT = "fabric.ckpt"


def main():
    fabric = Fabric(accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", 1)), strategy="ddp")
    fabric.launch()
    seed_everything(4, verbose=False)
    x = torch.randn(64, 5)
    model = nn.Sequential(nn.Linear(5, 10), nn.Tanh(), nn.Linear(10, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(x, x.prod(1, keepdim=True)), 8, shuffle=True))
    state = {"model": model, "optimizer": optimizer, "epoch": 0}
    if os.path.exists(CHECKPOINT):
        fabric.load(CHECKPOINT, state)
        fabric.print(f"goes on with epoch {state['epoch']}")
    for epoch in range(state["epoch"], state["epoch"] + 2):
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
        mean = fabric.all_reduce(loss.detach(), reduce_op="mean")
        fabric.print(f"epoch {epoch} loss {mean.item()!r}", flush=True)
        state["epoch"] = epoch + 1
    fabric.save(CHECKPOINT, state)


if __name__ == "__main__":
    main()
