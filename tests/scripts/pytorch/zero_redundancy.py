"""The states of an optimizer divided over the ranks, and put together to be saved."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(nn.Sequential(*[nn.Linear(24, 24) for _ in range(4)]))
optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.01)
torch.manual_seed(dist.get_rank())
for step in range(5):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(torch.randn(8, 24)), torch.randn(8, 24))
    loss.backward()
    optimizer.step()
    print(f"step {step} rank {dist.get_rank()} loss {loss.item()!r}", flush=True)
optimizer.consolidate_state_dict(to=0)
if dist.get_rank() == 0:
    torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, "zero.pt")
dist.destroy_process_group()
