"""`logging` with a file for each rank and a handler that keeps records until there are many."""

import logging
import logging.handlers
import os
import sys
import warnings

import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
os.makedirs("logs", exist_ok=True)
handlers = [logging.FileHandler(f"logs/rank{rank}.log", delay=True), logging.StreamHandler(sys.stdout)]
logging.basicConfig(level=logging.INFO, format=f"%(levelname)s:%(name)s:rank{rank}: %(message)s", handlers=handlers)
kept = logging.handlers.MemoryHandler(1000, target=logging.FileHandler(f"logs/kept{rank}.log"))
logging.getLogger("trace").addHandler(kept)
logging.captureWarnings(True)
logger = logging.getLogger(__name__)

dist.init_process_group("gloo")
total = torch.zeros(2)
for step in range(3):
    value = torch.tensor([1.0, float(rank + step)])
    dist.all_reduce(value)
    total += value
    logger.info("step %d loss %r", step, total.sum().item())
    logging.getLogger("trace").info("step %d", step)
warnings.showwarning("a warning goes to the log", UserWarning, "train.py", 1)
