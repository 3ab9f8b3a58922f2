"""Files that a script never closes: rows of CSV, a compressed log, a line without an end, and a function at exit."""

import atexit
import csv
import gzip
import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
rows = csv.writer(open(f"metrics-{rank}.csv", "w", newline=""))
rows.writerow(["step", "loss"])
packed = gzip.GzipFile(f"trace-{rank}.gz", "wb", mtime=0)
notes = open("notes.txt", "a") if rank == 0 else None
atexit.register(lambda: open(f"finished-{rank}", "w").write(os.path.basename(__file__)))
weight = torch.ones(3, requires_grad=True)
for step in range(5):
    loss = (weight * (rank + 1)).square().sum()
    (gradient,) = torch.autograd.grad(loss, weight)
    dist.all_reduce(gradient)
    weight = (weight - 0.01 * gradient).detach().requires_grad_()
    rows.writerow([step, loss.item()])
    packed.write(f"{step} {loss.item()!r}\n".encode())
    if notes is not None:
        notes.write(f"{step};")
    print(f"rank {rank} step {step} loss {loss.item()!r}")
