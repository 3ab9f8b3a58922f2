"""Capture with several ranks: all of them capture a step, replay it or take it as written together.

NCCL wants it so: whether one of its calls is in a CUDA graph must be the same on all ranks. So a step is named by what
all ranks know of it, and what one rank has found is agreed on by all before anything is done about it.

- Which steps have a graph: those of a whole global batch. A rank's own shares and their weights say whether it is one.
- What speaks against it on one rank: gathered before a graph is made, in each proof and where an epoch begins.
- What a rank finds between these (a batch of another shape): it takes the step as written, with the same sums in the
  same order as the graphs of the others, and all hear of it at the next step that is measured but one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from distributed.core.batch_plan import BatchPlan
from distributed.data.loading.loader import Microbatch
from distributed.data.shares import EpochSplit
from distributed.runtime.session import Session
from distributed.train.capture.captured import NotCapturable, shape_of

_QUESTION = "whether steps are captured"


class Agreement:
    """Of one rank with the others; a single rank needs no collective."""

    def __init__(self, batch: BatchPlan, session: Session) -> None:
        self._batch, self._session, self.is_alone = batch, session, session.world_size == 1
        self.trouble = ""  # why this rank cannot replay, which the others do not know yet
        self.fits = True  # whether the step that came last has the shape of the graphs
        self._shapes: dict[int, Any] = {}  # of a whole global batch, by its micro-batches
        self._asked: torch.Tensor | None = None
        self._whole: list[tuple[float, int]] = []  # of each micro-batch of a whole global batch: weight and size
        self.begin_epoch(0)

    def begin_epoch(self, epoch: int) -> None:
        """How many micro-batches make a step may depend on the epoch."""
        if not self.is_alone:
            batch = self._batch.at(epoch)
            cuts = EpochSplit(batch.global_batch, batch, self._session.data_rank).micro_cuts(0)
            self._whole = [(cut.weight, cut.size) for cut in cuts]

    def cannot_replay(self, why: str) -> None:
        """This rank; the others hear of it at their next measured step."""
        self.trouble = why

    def refused(self) -> str:
        """What this rank knows from the beginning."""
        if self.is_alone:
            return ""
        if not self._session.can_capture:
            return "the script has made the process group itself, without NCCL_GRAPH_REGISTER=0 in its environment"
        if any(not size for _, size in self._whole) or (self._batch.whole and self._batch.of_stream):
            return "the shares of a whole global batch differ from rank to rank"
        return ""

    def key(self, microbatches: Sequence[Microbatch], measure: bool) -> Any:
        """What names the graph of this step, the same on all ranks; None: it has none.

        Raises NotCapturable for what no graph can read, where no other rank has to know first.
        """
        if self.is_alone:
            return measure, *shape_of(microbatches)
        if [(micro.weight, micro.size) for micro in microbatches] != self._whole:
            return None
        try:
            shape = shape_of(microbatches)
            self.fits = shape == self._shapes.setdefault(len(microbatches), shape)
            if not self.fits:
                self.trouble = "batches of the same size have different shapes"
        except NotCapturable as why:
            self.fits, self.trouble = False, str(why)
        return measure, len(microbatches)

    def on(self, why: str) -> str:
        """The reason of the first rank that has one. Every rank comes here, and waits for the others and its device."""
        if self.is_alone:
            return why
        device = self._session.device
        is_any = self._session.max(_QUESTION, torch.full((1,), int(bool(why)), device=device)).item()
        self._session.check()
        if not is_any:
            return ""
        reasons = self._session.gather_texts("why steps are not captured", why)
        return next(f"on rank {rank}, {text}" for rank, text in enumerate(reasons) if text)

    def hears(self) -> bool:
        """At a measured step, of every rank: whether some rank was in trouble at the one before. Waits for nothing."""
        if self.is_alone:
            return False
        asked = self._asked
        self._asked = self._session.max(
            _QUESTION, torch.full((1,), int(bool(self.trouble)), device=self._session.device)
        )
        heard = asked is not None and bool(asked.item())
        self._session.check()
        return heard

    def forget(self) -> None:
        """The graphs are made again."""
        self._shapes.clear()
