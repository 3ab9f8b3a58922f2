"""The recovery benchmark's training with our Trainer: a script for `distributed train`, with the folder to log to."""

from __future__ import annotations

import sys
from functools import partial

from torch import nn

from distributed import Trainer
from distributed.bench.recovery_work import BATCH, SAVE_EVERY, Rows, make_model, make_optimizer


def main() -> None:
    trainer = Trainer(
        make_model(),
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=partial(make_optimizer, folder=sys.argv[1]),
        batch_size=BATCH,
        epochs=1_000_000,  # until somebody ends it
        checkpoint_frequency=f"{SAVE_EVERY} steps",
    )
    trainer.fit(Rows())


if __name__ == "__main__":
    main()
