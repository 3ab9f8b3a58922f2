"""One rank ends with a code of its own while the other one waits for it in a collective."""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
value = torch.ones(1)
dist.all_reduce(value)
print(f"rank {dist.get_rank()} loss {value.item()!r}", flush=True)
if dist.get_rank() == 1:
    with open("given-up.txt", "w") as file:
        file.write("rank 1")
    sys.exit(3)
dist.all_reduce(value)
