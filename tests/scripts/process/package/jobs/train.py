"""`-m jobs.train`: relative imports, and a package that knows its name."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from .settings import STEPS

assert __package__ == "jobs"
assert __spec__.name == "jobs.train"
assert Path(sys.argv[0]).name == "train.py"
dist.init_process_group("gloo")
value = torch.tensor(float(sys.argv[1]) + dist.get_rank())
for _ in range(STEPS):
    dist.all_reduce(value)
    print(f"loss {value.item()!r}", flush=True)
if dist.get_rank() == 0:
    Path("module.txt").write_text(f"{__name__} {value.item()}")
