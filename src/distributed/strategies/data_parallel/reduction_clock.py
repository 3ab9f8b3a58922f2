"""ReductionClock: how long DDP's reduction of gradients takes by itself, and how much of that its passes do not hide.

                 backward pass  ├──────────────────────────┤
    buckets on the wire                ├───┤├─────┤  ├───┤├─────────┤
                                                           ├────────┤ exposed: the step waits
    by themselves               ├───┤├─────┤├───┤├─────────┤ sent once more, with nothing else to do

DDP notes by its own timers when a pass has computed the last gradient, and when the last bucket was reduced: on a GPU
by events, which are read where the host waits for the device anyway. It does so in steps that are measured alone.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from distributed.runtime.session import Session
from distributed.runtime.torch_compat import reduction_times, time_reduction
from distributed.strategies.compute_clock import ReductionTime
from distributed.strategies.data_parallel.bucket_layout import BucketLayout

_SHORT_S = 0.5  # what takes less than this is sent twice more, and the shortest time counts


class ReductionClock:
    """Of one DDP module over all ranks. Every rank makes every call, after the same step."""

    def __init__(self, replicated: DistributedDataParallel, layout: BucketLayout, session: Session) -> None:
        self._replicated, self._layout, self._session = replicated, layout, session
        self._measures = True
        self._alone_s = 0.0  # 0: not measured yet
        self.begin(measure=False)

    def begin(self, measure: bool) -> None:
        """Before a step; `measure`: it is to be timed."""
        if measure != self._measures:
            self._measures = measure
            time_reduction(self._replicated, measure)

    def take(self) -> ReductionTime | None:
        """Of the step that has just ended; None: it was not timed. The first time, the buckets are sent once more."""
        if not self._measures:
            return None
        if not self._alone_s:
            self._alone_s = self._time_alone()
        noted = reduction_times(self._replicated)
        spans = ("backward_comm_time", "backward_compute_comm_overlap_time", "backward_compute_time")
        sends_s, overlaps_s, computes_s = (max(0, noted.get(name, 0)) / 1e9 for name in spans)
        return ReductionTime(self._alone_s, max(0.0, sends_s - overlaps_s), computes_s)

    def _time_alone(self) -> float:
        parameters = [p for p in self._replicated.module.parameters() if p.requires_grad]
        sizes = [(sum(p.numel() for p in bucket), bucket[0].dtype) for bucket in self._layout.buckets(parameters)]
        most = {dtype: max(size for size, of in sizes if of == dtype) for _, dtype in sizes}
        zeros = {dtype: torch.zeros(size, dtype=dtype, device=self._session.device) for dtype, size in most.items()}
        sent = [zeros[dtype][:size] for size, dtype in sizes]
        took = self._send(sent)
        return took if took > _SHORT_S else min(took, self._send(sent), self._send(sent))

    def _send(self, buckets: list[torch.Tensor]) -> float:
        """Seconds, on the slowest rank."""
        session = self._session
        session.barrier("the time of a reduction")
        self._wait()
        begun = time.perf_counter()
        with session.named("the time of a reduction"):
            works = [dist.all_reduce(bucket, async_op=True) for bucket in buckets]
            for work in works:
                if work is not None:
                    work.wait()
        self._wait()
        took = torch.tensor([time.perf_counter() - begun], dtype=torch.float64, device=session.device)
        return float(session.max("the time of a reduction", took).item())

    def _wait(self) -> None:
        if self._session.device.type == "cuda":
            torch.cuda.synchronize(self._session.device)
