"""All ranks raise after a step, with an open file that has lines in it."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
log = open(f"steps-{dist.get_rank()}.txt", "w")
for step in range(3):
    value = torch.full((1,), float(dist.get_rank() + step))
    dist.all_reduce(value)
    log.write(f"{step} {value.item()}\n")
    print(f"step {step} loss {value.item()!r}", flush=True)
    dist.barrier()
    if step == 1:
        raise ValueError(f"bad batch at step {step}")
