"""The start benchmark's training by hand on Ray: its own TorchTrainer as its guide has it, which makes one step."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch import nn
from torch.utils.data import DataLoader

from distributed.bench.recovery.workload import BATCH, PacedRows, make_model


def train(config: dict[str, Any]) -> None:
    model = prepare_model(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = prepare_data_loader(DataLoader(PacedRows(), batch_size=BATCH, shuffle=True))
    inputs, labels = next(iter(loader))
    nn.CrossEntropyLoss()(model(inputs), labels).backward()
    optimizer.step()
    if ray.train.get_context().get_world_rank() == 0:
        Path(config["folder"], "first-step").write_text(repr(time.time()), encoding="utf-8")


def main() -> None:
    folder, ranks = sys.argv[1], int(sys.argv[2])
    ray.init(num_cpus=ranks, include_dashboard=False, configure_logging=False)
    TorchTrainer(
        train,
        train_loop_config={"folder": folder},
        scaling_config=ray.train.ScalingConfig(num_workers=ranks),
        run_config=ray.train.RunConfig(storage_path=folder),
    ).fit()


if __name__ == "__main__":
    main()
