"""A model of two stages, one on each rank, trained by the 1F1B schedule of micro-batches."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

dist.init_process_group("gloo")
rank, stages = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
width = 16
stage_module = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
stage = PipelineStage(stage_module, rank, stages, torch.device("cpu"))
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.MSELoss())
optimizer = torch.optim.SGD(stage_module.parameters(), lr=0.5)
inputs = torch.randn(16, width, generator=torch.Generator().manual_seed(9))
for step in range(4):
    losses = []
    optimizer.zero_grad()
    if rank == 0:
        schedule.step(inputs)
    else:
        schedule.step(target=inputs.tanh(), losses=losses)
        print(f"step {step} loss {torch.stack(losses).mean().item()!r}", flush=True)
    optimizer.step()
torch.save(stage_module.state_dict(), f"stage-{rank}.pt")
dist.barrier()
dist.destroy_process_group()
