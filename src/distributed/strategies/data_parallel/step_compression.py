"""Compression in a step of replicas: a reducer of gradients, and what is done around the optimizer's step for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distributed.comm.compression.feedback import FEEDBACK, row_box
from distributed.core.plan import Decision
from distributed.data.loading.loader import Microbatch
from distributed.runtime.session import Session
from distributed.runtime.tensor_shard import Box
from distributed.strategies.data_parallel.compressed_gradients import (
    CastGradients,
    CompressedGradients,
    FedBackGradients,
)

Stepped = Callable[[], Mapping[nn.Parameter, nn.Parameter]]
Update = Callable[[bool], torch.Tensor | None]
Clip = Callable[[float], torch.Tensor]


class StepCompression:
    """What a step calls, if less than the gradients is sent; a step without compression calls none of it.

    `stepped`: the optimizer's parameters, by those of the model that others step for.
    """

    def __init__(self, reducer: CompressedGradients, session: Session, *, ranks: int, stepped: Stepped) -> None:
        self._reducer, self._session, self._ranks, self._stepped = reducer, session, ranks, stepped
        self._fed_back = reducer if isinstance(reducer, FedBackGradients) else None  # if the rest is kept
        self._counted: torch.Tensor | None = None  # what the loss of this step is a mean over, so far

    @property
    def keeps(self) -> bool:
        """Whether each rank keeps what it has not sent: that of a lost rank is in the checkpoint alone."""
        return self._fed_back is not None

    @property
    def keeps_small(self) -> bool:
        """Whether gradients pass through a precision with a small range."""
        return isinstance(self._reducer, CastGradients) and self._reducer.has_small_range

    @property
    def weighs(self) -> bool:
        """Whether it has to know before a reduction by what the gradients are to be divided."""
        return self.keeps and self._ranks > 1

    def attach(self, model: nn.Module) -> None:
        """Reduce the gradients of this module, if DDP would."""
        if isinstance(model, DistributedDataParallel):  # torch refuses annotations that are texts
            model.register_comm_hook(None, lambda _, bucket: self._reducer.reduce_bucket(bucket))

    def follow(self, module: nn.Module) -> None:
        """Compress gradients of the parameters that are trained now."""
        if self._fed_back is not None:
            self._fed_back.follow(module)

    def decisions(self) -> list[Decision]:
        return [self._fed_back.decision()] if self._fed_back is not None and self._ranks > 1 else []

    def begin_step(self) -> None:
        self._counted = None

    def weigh(self, weight: torch.Tensor | None, micro: Microbatch, model: nn.Module, unit: float) -> None:
        """Note by what the gradients are to be divided, so that what is not sent is in units of the whole batch's.

        `model`: that training calls.
        """
        if weight is None or self._fed_back is None:
            return
        counted = (weight if micro.size else weight * 0).detach().double()
        self._counted = counted if self._counted is None else self._counted + counted
        if isinstance(model, DistributedDataParallel) and model.require_backward_grad_sync:
            whole, self._counted = self._session.sum("loss weight", self._counted.clone()), None
            self._fed_back.weigh(whole / unit)

    def around(self, update: Update) -> Update:
        """An optimizer's step, if what was reduced can be stepped by."""

        def update_compressed(measure: bool) -> torch.Tensor | None:
            self._flush()
            self._reducer.check()
            norm = update(measure)
            self._reducer.commit()
            return norm

        return update_compressed

    def before(self, clip: Clip) -> Clip:
        """What clips gradients that a loop of the user's own has made."""

        def clip_flushed(max_norm: float) -> torch.Tensor:
            self._flush()
            return clip(max_norm)

        return clip_flushed

    def _flush(self) -> None:
        """Let a single rank step by all that was left of gradients, before they are clipped or unscaled."""
        if self._fed_back is not None and self._ranks == 1:
            self._fed_back.flush(self._stepped())

    def state(self) -> dict[str, Any]:
        """The component of a checkpoint; {}: there is none."""
        return {} if self._fed_back is None else {FEEDBACK: self._fed_back.state()}

    def load(self, tree: Mapping[str, Any]) -> None:
        """`tree`: all components of a checkpoint."""
        if self._fed_back is not None:
            self._fed_back.load(tree.get(FEEDBACK, {}))

    def shard_ranges(self, name: str, shape: tuple[int, ...]) -> tuple[Box, ...] | None:
        """Of what the ranks have not sent: this one's row, or all rows of another number of ranks."""
        if not name.startswith(f"{FEEDBACK}/left/") or shape[0] != self._session.world_size:
            return None
        return (row_box(self._session.rank, shape),)
