"""Accelerate's LocalSGD: ranks step alone, and their parameters are averaged every few steps."""

import torch
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
set_seed(11)
x = torch.randn(128, 5)
loader = DataLoader(TensorDataset(x, x @ torch.randn(5, 1)), batch_size=8, shuffle=True)
model = nn.Linear(5, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=4, enabled=True) as local_sgd:
    for step, (inputs, targets) in enumerate(loader):
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            local_sgd.step()
        print(f"step {step} rank {accelerator.process_index} loss {loss.item()!r}", flush=True)
torch.save(accelerator.unwrap_model(model).state_dict(), f"local-{accelerator.process_index}.pt")
accelerator.end_training()
