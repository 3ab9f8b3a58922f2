"""Accelerate's trigger: one rank decides to stop, and all of them do."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class EarlyStoppingCallback:
    def __init__(self, min_delta=0.0, patience=3):
        self.min_delta, self.patience = min_delta, patience
        self.counter, self.lowest = 0, float("inf")

    def check(self, value):
        if value <= self.lowest - self.min_delta:
            self.lowest, self.counter = value, 0
            return False
        self.counter += 1
        return self.counter >= self.patience


accelerator = Accelerator(cpu=True)
set_seed(3)
x = torch.randn(400, 4)
loader = DataLoader(TensorDataset(x, torch.randn(400, 1)), batch_size=4)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
callback = EarlyStoppingCallback()
for step, (inputs, targets) in enumerate(loader):
    loss = nn.functional.mse_loss(model(inputs), targets)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} rank {accelerator.process_index} loss {loss.item()!r}", flush=True)
    if accelerator.process_index == 1 and callback.check(loss.item()):
        accelerator.set_trigger()
    if accelerator.check_trigger():
        accelerator.print(f"stopped after step {step}")
        break
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    accelerator.save(accelerator.get_state_dict(model), "stopped.pt")
accelerator.end_training()
