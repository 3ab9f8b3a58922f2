"""The recovery benchmark's training by hand: a script for torchrun that saves now and then and resumes from the latest.

It does not look for its place in the epoch when it resumes, as many such scripts do not, which saves it time.
"""

from __future__ import annotations

import itertools
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from distributed.bench.recovery_work import BATCH, SAVE_EVERY, Rows, make_model, make_optimizer


def main() -> None:
    folder = sys.argv[1]
    latest = os.path.join(folder, "latest.pt")
    dist.init_process_group("gloo")
    model = DistributedDataParallel(make_model())
    optimizer = make_optimizer(model.parameters(), folder)
    step = 0
    if os.path.exists(latest):
        saved = torch.load(latest)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    rows, loss_fn = Rows(), nn.CrossEntropyLoss()
    sampler: DistributedSampler[Any] = DistributedSampler(rows)
    loader = DataLoader(rows, batch_size=BATCH, sampler=sampler)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(inputs), labels)
            loss.backward()
            optimizer.step()
            step += 1
            if step % SAVE_EVERY == 0 and dist.get_rank() == 0:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, f"{latest}.part")
                os.replace(f"{latest}.part", latest)


if __name__ == "__main__":
    main()
