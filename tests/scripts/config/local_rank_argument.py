"""A script of the old launcher: `--local_rank` as an argument, or from the environment where none is given."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", "--local-rank", type=int, default=int(os.environ.get("LOCAL_RANK", -1)))
parser.add_argument("--lr", type=float, default=0.1)
args = parser.parse_args()
if args.local_rank != -1:
    dist.init_process_group(backend="gloo", init_method="env://")
assert args.local_rank == dist.get_rank()
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
for _ in range(3):
    loss = (model(torch.ones(1, 2) * args.local_rank) - 3).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"local rank {args.local_rank} loss {loss.item()!r}", flush=True)
if args.local_rank in (-1, 0):
    torch.save(model.module.state_dict(), "local_rank.pt")
dist.destroy_process_group()
