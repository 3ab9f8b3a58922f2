"""The start benchmark's training with our Trainer: a script for `distributed train` that makes one step."""

from __future__ import annotations

from torch import nn

from distributed import Trainer
from distributed.bench.recovery.workload import BATCH, PacedRows, make_model


def main() -> None:
    trainer = Trainer(
        make_model(), loss_fn=nn.CrossEntropyLoss(), batch_size=BATCH, max_steps=1, log_every_n_steps=1, progress=False
    )
    trainer.fit(PacedRows())


if __name__ == "__main__":
    main()
