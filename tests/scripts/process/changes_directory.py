"""Relative paths before and after a change of directory, an umask, and a link to the newest of several files."""

import os
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
work = Path("work") / f"rank{rank}"
work.mkdir(parents=True, exist_ok=True)
Path(f"before-{rank}.txt").write_text(Path(__file__).name)
dist.barrier()
os.chdir(work)
os.umask(0o077)
for step in range(2):
    value = torch.tensor([float(step + rank)])
    dist.all_reduce(value)
    torch.save(value, f"step-{step}.pt")
    print(f"rank {rank} loss {value.item()!r}", flush=True)
newest = Path("newest.pt")
newest.unlink(missing_ok=True)
newest.symlink_to("step-1.pt")
assert Path("step-1.pt").stat().st_mode & 0o777 == 0o600
dist.barrier()
