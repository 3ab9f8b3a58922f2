"""ScriptRun: the run of a script that has its own loop over epochs, and its own words for what it calls.

A pass over the training data is an epoch of the run. What the script saves and loads are checkpoints of the run.
"""

from __future__ import annotations

import atexit
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch

from distributed.adapters.accelerate.saved_state import copy_checkpoint
from distributed.core.errors import TaskError
from distributed.core.plan import Plan
from distributed.data.source import Source
from distributed.runtime.session import Session
from distributed.strategies.base import LOW_PRECISION, MetricSum
from distributed.train.given.step_results import logged_value
from distributed.train.loaders import open_evaluation
from distributed.trainers.own_loop.run import Pass, TrainingRun


class ScriptRun(TrainingRun):
    """A TrainingRun whose epochs are the script's. Every rank makes the same calls in the same order."""

    _folder: str | None = None  # to which the state is saved after this step

    # ---- what the script can ask

    @property
    def session(self) -> Session:
        return self._opened.session

    @property
    def plan(self) -> Plan:
        return self._opened.plan

    @property
    def is_open(self) -> bool:
        return self._open is not None

    @property
    def is_last_of_step(self) -> bool:
        """Whether the optimizer steps with this batch."""
        return self._at is None or self._at.is_last

    @property
    def has_gradients(self) -> bool:
        """Whether a backward pass of this step has run, and the step was not taken."""
        step = self._at
        return step is not None and step.passes > 0 and not step.is_taken

    @property
    def is_at_stand_in(self) -> bool:
        """Whether the batch has no sample of this rank: it only keeps in step with the others."""
        if self._size is not None:
            return not self._size
        return self._at is not None and not self._at.size

    @property
    def batches_done(self) -> int:
        """Of this rank in this epoch."""
        return self._opened.loop.batches_done

    # ---- steps

    def clip(self, max_norm: float) -> torch.Tensor:
        """Clip the gradients of this step, after its last backward pass; their norm."""
        opened, step = self._in_batch("clip")
        if not (step.is_last and step.has_loss) or step.is_taken:
            raise TaskError(
                "clip_grad_norm_ before the gradients of a step are whole, or after they are dropped",
                why="a step has the gradients of its batches, of which the last one has not run backward",
                do="if accelerator.sync_gradients: accelerator.clip_grad_norm_(…), between backward and step",
            )
        if opened.plan.optimizer.clip_norm is not None:
            raise TaskError(
                "clip_grad_norm_ and gradient_clipping",
                why="the gradients would be clipped twice",
                do="leave one of them out",
            )
        found: torch.Tensor = opened.strategy.clip(max_norm)
        return found

    # ---- passes

    def one_epoch(self) -> Iterator[Any]:
        """A pass over the training data: the rest of the epoch at which the run stands."""
        if not self._has_begun:
            self._begin(None)
        elif self._pass is not Pass.NOT_BEGUN:
            self._leave_pass()
        while self._turn is not None and self._turn.microbatches is None:
            self._take_turn(self._means())
        yield from self._batches()

    def _begin(self, path: str | None) -> None:
        opened = self._opened
        self._has_begun = True
        opened.loop.begin(resume=path)
        if path is None and opened.session.env.restarts and self._control.step:
            raise TaskError(
                "the ranks were restarted, and the script begins again",
                why=f"the run stands at step {self._control.step}, and the script's own counters at 0",
                do="max_restarts=0, or accelerator.load_state(…) of the last state at the beginning",
            )
        super()._take_turn(None)

    def _take_turn(self, answer: Any) -> None:
        super()._take_turn(answer)
        folder, self._folder = self._folder, None
        if folder is not None:
            self._save_to(folder)

    def _evaluation(self, source: Source) -> Any:
        opened = self._opened
        strategy, plan, session = opened.strategy, opened.plan, opened.session
        loader = open_evaluation(source, plan, session, None, strategy.optimizer, lockstep=True).loader
        assert loader is not None

        def batches() -> Iterator[Any]:
            try:
                for batch, size in loader:
                    self._size = size
                    with self.autocast():
                        yield strategy.moved(batch)
            finally:  # also where the script leaves it
                self._size = None

        return batches

    def autocast(self) -> Any:
        """The precision of the run, where the run does not bring it itself: outside of training batches."""
        dtype = LOW_PRECISION.get(self.plan.precision.kind)
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    # ---- states and numbers

    def save_to(self, folder: str) -> None:
        """Save the state of the run to a folder: after this step, or now, between two."""
        step = self._at
        if step is None:
            self._report_step()
            self._save_to(folder)
        elif not step.is_taken:
            raise TaskError(
                "save_state before optimizer.step()",
                why="a state is saved between two steps, with the gradients of neither",
                do="save after optimizer.step(), with the last batch of an accumulation: if accelerator.sync_gradients",
            )
        else:
            self._folder = folder

    def _save_to(self, folder: str) -> None:
        if not self._has_begun:
            self._begin(None)
        path = self._opened.loop.save_now()
        if self.is_main:
            copy_checkpoint(path, folder)
        self.session.barrier("saved a state")

    def load_from(self, folder: str) -> None:
        """Take the state of a folder; before the first pass over the training data."""
        if self._has_begun:
            raise TaskError(
                "load_state after the training has begun",
                why="a run takes a state at its beginning, with the position in the data that belongs to it",
                do="call it before the first loop over the training data",
            )
        self._begin(folder)

    def note(self, values: dict[str, Any]) -> None:
        """Report numbers: of this batch, or of the epoch."""
        if self.history is not None:
            raise TaskError("log after end_training", why="the run has ended", do="log before it")
        logged = {name: logged_value(name, value, of_own_loop=True) for name, value in values.items()}
        sums = {name: MetricSum(value, 1.0) for name, (value, _) in logged.items()}
        if (step := self._at) is None:
            self._evaluated.add(sums)
        elif step.measures:
            step.logged.add(sums)

    def _end_with_the_process(self) -> None:
        if self._has_begun and self._at is None:
            message = "the script has ended without accelerator.end_training(), so its last state was not saved"
            warnings.warn(message, stacklevel=1)
        self._abandon()

    def end(self) -> None:
        """Save and end the run; nothing where no training was begun."""
        if self._open is None:
            return
        if self._has_begun:
            self.finish()
        else:
            atexit.unregister(self._end_with_the_process)
            self._abandon()
