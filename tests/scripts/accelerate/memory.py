"""Accelerate's `find_executable_batch_size`: a loop that is run again with half the batch when memory is short."""

import torch
from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(cpu=True)

    @find_executable_batch_size(starting_batch_size=64)
    def inner_training_loop(batch_size):
        accelerator.free_memory()
        accelerator.print(f"batch size {batch_size}")
        if batch_size > 16:
            raise RuntimeError("CUDA out of memory.")
        set_seed(1)
        x = torch.randn(96, 3)
        loader = DataLoader(TensorDataset(x, x[:, :1]), batch_size=batch_size)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            accelerator.print(f"loss {loss.item()!r}", flush=True)
        accelerator.save_model(model, "found")

    inner_training_loop()
    accelerator.end_training()


if __name__ == "__main__":
    main()
