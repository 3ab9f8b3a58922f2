"""The start benchmark's training by hand: a script for torchrun that makes one step and writes down when."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from distributed.bench.recovery.workload import BATCH, PacedRows, make_model


def main() -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows, loss_fn = PacedRows(), nn.CrossEntropyLoss()
    sampler: DistributedSampler[Any] = DistributedSampler(rows)
    inputs, labels = next(iter(DataLoader(rows, batch_size=BATCH, sampler=sampler)))
    loss_fn(model(inputs), labels).backward()
    optimizer.step()
    if dist.get_rank() == 0:
        Path(sys.argv[1], "first-step").write_text(repr(time.time()), encoding="utf-8")
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # torch's threads abort about one in fifty such processes while Python is torn down


if __name__ == "__main__":
    main()
