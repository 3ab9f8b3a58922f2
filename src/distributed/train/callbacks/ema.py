"""EMA: an exponential moving average of the weights."""

from __future__ import annotations

from dataclasses import dataclass

from distributed.core.errors import TaskError
from distributed.train.callbacks.averaging import WeightAveraging
from distributed.train.callbacks.callback import TrainingControl


@dataclass(eq=False)
class EMA(WeightAveraging):
    """An exponential moving average of the weights: of it, `decay` stays at each update.

    An update follows each step, or each `every` steps. With `warmup`, the decay grows as (1 + n) / (warmup + n) over
    the updates, up to `decay`; 10 is usual. With `evaluates`, validation runs with the averages. With `use_buffers`,
    buffers are averaged too; else they are the model's. `trainer.averaged_model()` has the average after `fit`.

    >>> import torch
    >>> from distributed import Trainer
    >>> from torch import nn
    >>> from torch.utils.data import TensorDataset
    >>> data = TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
    >>> ema = EMA(decay=0.9)
    >>> trainer = Trainer(nn.Linear(4, 2), callbacks=[ema], batch_size=16, progress=False, run_dir=tmp / "run")
    >>> history = trainer.fit(data)
    >>> ema.updates, trainer.averaged_model()
    (4, Linear(in_features=4, out_features=2, bias=True))
    """

    decay: float = 0.999
    every: int = 1
    warmup: int = 0
    use_buffers: bool = False
    evaluates: bool = True

    def __post_init__(self) -> None:
        super().__init__()
        if not 0 <= self.decay < 1 or self.every < 1 or self.warmup < 0:
            raise TaskError(
                f"EMA(decay={self.decay}, every={self.every}, warmup={self.warmup})",
                why="decay is at least 0 and below 1, every is a number of steps, and warmup one of updates",
                do="EMA(decay=0.999, every=1, warmup=10)",
            )

    def share(self, run: TrainingControl) -> float | None:
        if run.step % self.every:
            return None
        decay = min(self.decay, (1 + self.updates) / (self.warmup + self.updates)) if self.warmup else self.decay
        return 1 - decay
