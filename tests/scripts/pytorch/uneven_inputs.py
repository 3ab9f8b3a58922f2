"""Ranks with different numbers of batches, in the Join context."""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(5)
    model = DDP(torch.nn.Linear(6, 1))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    inputs = [torch.full((4, 6), float(i + 1) / 10) for i in range(5 + 3 * rank)]
    seen = 0
    with Join([model, optimizer]):
        for batch in inputs:
            loss = (model(batch) - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen += 1
    print(f"rank {rank} saw {seen} batches, last loss {loss.item()!r}")
    if rank == 0:
        torch.save(model.module.state_dict(), "joined.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
