"""The recovery benchmark's hand-written loop: a script for torchrun that saves at times and resumes from the latest.

It does not look for its place in the epoch when it resumes, as many such scripts do not, which saves it time. With
`cuda` after the folder all ranks share one GPU, each as a host of its own, which NCCL allows.
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

from distributed.bench.recovery.workload import BATCH, SAVE_EVERY, PacedRows, make_model, make_optimizer


def main() -> None:
    folder, device = sys.argv[1], "cuda:0" if "cuda" in sys.argv[2:] else "cpu"
    latest = os.path.join(folder, "latest.pt")
    if device == "cpu":
        dist.init_process_group("gloo")
    else:
        os.environ |= {"NCCL_HOSTID": f"rank-{os.environ['RANK']}", "NCCL_SOCKET_IFNAME": "lo"}
        dist.init_process_group("nccl", device_id=torch.device(device))
    model = DistributedDataParallel(make_model().to(device))
    optimizer = make_optimizer(model.parameters(), folder)
    step = 0
    if os.path.exists(latest):
        saved = torch.load(latest, map_location=device)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    rows, loss_fn = PacedRows(), nn.CrossEntropyLoss()
    sampler: DistributedSampler[Any] = DistributedSampler(rows)
    loader = DataLoader(rows, batch_size=BATCH, sampler=sampler)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(inputs.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            step += 1
            if step % SAVE_EVERY == 0 and dist.get_rank() == 0:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, f"{latest}.part")
                os.replace(f"{latest}.part", latest)


if __name__ == "__main__":
    main()
