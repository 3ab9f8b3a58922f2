"""An MLP divided by columns and rows, its sequence sharded between; logged through `logging`."""

import logging
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stdout)
logger = logging.getLogger(__name__)


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.in_proj = nn.Linear(10, 32)
        self.relu = nn.ReLU()
        self.out_proj = nn.Linear(32, 6)

    def forward(self, x):
        return self.out_proj(self.relu(self.in_proj(x)))


mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
rank = mesh.get_rank()
torch.manual_seed(1)
plan = {
    "in_proj": ColwiseParallel(input_layouts=Shard(0)),
    "out_proj": RowwiseParallel(output_layouts=Shard(0)),
}
model = parallelize_module(ToyModel(), mesh, plan)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.25, foreach=False)
for step in range(4):
    torch.manual_seed(step + 10 * rank)
    output = model(torch.rand(8, 10))
    loss = output.square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    logger.info("rank %d step %d loss %r", rank, step, loss.item())
full = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
if rank == 0:
    torch.save(full, "tensor_parallel.pt")
dist.destroy_process_group()
