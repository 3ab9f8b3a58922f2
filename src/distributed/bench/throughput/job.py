"""One turn of one contender: a workload's model and rows, how many steps, and the clock, read twice."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset

from distributed.bench.workloads.models import TINY, WORKLOADS, Rows, Workload
from distributed.runtime.torch_module_compat import set_compiled_call

_KEPT_BYTES = 2**29  # of rows; more steps than they make read them again
_JUDGED = 4  # batches whose loss is taken in the end
_LARGE_BATCH = 2**23  # bytes that it takes longer to gather than one process should
SHARED = "/dev/shm"
_WORKERS, _SHARED_BYTES = 4, 2**32  # processes that read large batches, and the shared memory that they want


@dataclass
class WorkloadJob:
    """See `distributed.bench.workloads.job.Job`."""

    workload_name: str
    rank: int
    ranks: int
    steps: int  # timed ones
    warm: int  # steps before them
    scratch: str
    device: torch.device
    precision: str
    log_every: int
    compiles: bool
    settings: dict[str, Any]  # of our Trainer
    tiny: bool = False
    engine: str = "pytorch-ddp"
    looks: list[float] = field(default_factory=list)

    @cached_property
    def workload(self) -> Workload:
        return (TINY if self.tiny else WORKLOADS)[self.workload_name]

    @property
    def all_steps(self) -> int:
        return self.warm + self.steps + 1  # the second look comes with the batch after the last timed step

    @property
    def seconds(self) -> float:
        begun, ended = self.looks
        return ended - begun

    def look(self, step: int) -> None:
        if step == self.warm or step == self.warm + self.steps:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.looks.append(time.perf_counter())

    def looked(self, looks: list[float]) -> None:
        """When the timed steps began and ended, where a run's own events tell it."""
        self.looks = looks

    def rows(self) -> Rows:
        return _rows(self.workload_name, self.tiny, self._kept())

    def dataset(self) -> Dataset[Any]:
        """Rows for all steps of all ranks; where they would take too much memory, the same ones again and again."""
        kept, wanted = self._kept(), self._samples()
        rows = TensorDataset(*self.rows())
        return rows if kept == wanted else Subset(rows, [number % kept for number in range(wanted)])

    def loader(self) -> DataLoader[Any]:
        """In the order of the rows, which were drawn at random: everybody trains the same batches one after the other.
        Within a few steps the order alone moves a loss that is falling by more than any fault that it should show."""
        return DataLoader(self.dataset(), batch_size=self.workload.batch, **self._reading())

    def own_loader(self) -> DataLoader[Any]:
        if self.ranks == 1:
            return self.loader()
        dataset = self.dataset()
        sampler: DistributedSampler[Any] = DistributedSampler(dataset, self.ranks, self.rank, shuffle=False)
        return DataLoader(dataset, batch_size=self.workload.batch, sampler=sampler, **self._reading())

    def make_model(self) -> nn.Module:
        with self.device:
            model = self.workload.make_model()
        if self.compiles:
            model.compile()
        return model

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return self.workload.optimizer(parameters)

    def loss(self, model: nn.Module, row: Sequence[torch.Tensor]) -> torch.Tensor:
        return self.workload.loss(model, row)

    def autocast(self) -> AbstractContextManager[Any]:
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def final_loss(self, model: nn.Module) -> float:
        """Of the first batches, the same for everybody."""
        model.to(self.device).train()  # statistics of the batch, as in training
        set_compiled_call(model, None)  # compiling it for one pass takes longer
        size, rows = self.workload.batch, self.rows()
        starts = range(0, min(len(rows[0]), _JUDGED * size), size)
        with torch.no_grad(), self.autocast():
            losses = [self.loss(model, [part[at : at + size].to(self.device) for part in rows]) for at in starts]
            return float(torch.stack(losses).float().mean())

    def _samples(self) -> int:
        return self.all_steps * self.workload.batch * self.ranks

    def _kept(self) -> int:
        at_least = self.workload.batch * self.ranks
        most = max(at_least, _KEPT_BYTES // _row_bytes(self.workload_name, self.tiny))
        return min(self._samples(), most // at_least * at_least)

    def _reading(self) -> dict[str, Any]:
        if self.device.type == "cpu":
            return {}
        is_large = self.workload.batch * _row_bytes(self.workload_name, self.tiny) > _LARGE_BATCH
        workers = _WORKERS if is_large and shared_memory() > _SHARED_BYTES else 0
        return {"pin_memory": True, "num_workers": workers}


@lru_cache(maxsize=1)
def _rows(name: str, tiny: bool, count: int) -> Rows:
    """Kept between turns: making them can take longer than a turn."""
    return (TINY if tiny else WORKLOADS)[name].make_rows(count)


@lru_cache
def _row_bytes(name: str, tiny: bool) -> int:
    return sum(part.element_size() * part.numel() for part in (TINY if tiny else WORKLOADS)[name].make_rows(1))


def shared_memory() -> int:
    """Bytes that are free in files that lie in memory, through which worker processes hand over their batches."""
    try:
        return shutil.disk_usage(SHARED).free
    except OSError:
        return 0
