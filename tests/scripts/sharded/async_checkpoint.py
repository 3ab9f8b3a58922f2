"""Checkpoints that are written while training goes on; the last one is waited for."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("cpu:gloo")
torch.manual_seed(0)
model = DDP(nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
saving = dist.new_group(backend="gloo")  # the thread that writes and DDP would otherwise wait for each other
future = None
for step in range(4):
    loss = model(torch.ones(2, 64) * (dist.get_rank() + 1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if future is not None:
        future.result()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    future = dcp.async_save(state, checkpoint_id=f"async/step-{step}", process_group=saving)
    print(f"rank {dist.get_rank()} step {step} loss {loss.item()!r}", flush=True)
future.result()
dist.barrier()
dist.destroy_process_group()
