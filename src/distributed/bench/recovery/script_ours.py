"""The recovery benchmark's training with our Trainer: a script for `distributed train`, with the folder to log to.

What comes after the folder, if anything does, is how long a batch takes to read.
"""

from __future__ import annotations

import sys
from functools import partial

from torch import nn

from distributed import Trainer
from distributed.bench.recovery.workload import BATCH, SAVE_EVERY, PacedRows, make_model, make_optimizer


def main() -> None:
    folder, *pace = sys.argv[1:]
    trainer = Trainer(
        make_model(),
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=partial(make_optimizer, folder=folder),
        batch_size=BATCH,
        epochs=1_000_000,  # until it is ended
        checkpoint_frequency=f"{SAVE_EVERY} steps",
        capture=False,  # its optimizer logs each step
    )
    trainer.fit(PacedRows(*map(float, pace)))


if __name__ == "__main__":
    main()
