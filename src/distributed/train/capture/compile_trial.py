"""Compiled or as written: the faster of the two where batches keep changing their shape, as tried in the run itself.

    steps 1 to 16, compiled: shapes are counted ──three or fewer──> compiled
                            │ more, on any rank      └──compiled for each──> as written
    steps 17 to 44: interleaved, each timed ──> all ranks take what was faster, and checkpoints hold it

torch compiles for one shape, and at the second one for any, with code that checks and computes sizes at every call. On
a small model that can take longer than launching its kernels one by one; and some models leave torch no choice but to
compile for each shape. Which steps are timed follows from their numbers, and the choice is in
checkpoints; a run that is resumed before it was made counts and times again, and may choose otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any

import torch

from distributed.data.loading.loader import Microbatch
from distributed.runtime.session import Session
from distributed.runtime.torch_compat import compiled_graphs
from distributed.strategies.base import StepOutput, Strategy
from distributed.strategies.model.compiled_call import AS_WRITTEN, COMPILED, TRYING, CompiledCall

_COUNTED = 16  # steps in which shapes are counted
_FEW = 3  # shapes, each of which may well come again: of an epoch's last batch, for example
_TIMES = 4  # that a model may be compiled: for a shape, for any, and again where a size is special (1, say)
_WARM = 4  # steps as written that are not timed: kernels are loaded in them
_TRIED = 24  # steps after those

TrainStep = Callable[..., StepOutput]
Timed = tuple[bool, int, float]  # compiled; numbers in the batch; seconds


class CompileTrial:
    """What the loop calls in place of a strategy's `train_step`, which it calls in its turn."""

    def __init__(
        self,
        call: CompiledCall,
        session: Session,
        *,
        train_step: TrainStep,
        then: Callable[[], TrainStep],
        steps_done: Callable[[], int],
        tell: Callable[[str], None],
    ) -> None:
        """`then` makes what takes the steps from when all is decided."""
        self._call, self._session, self._warn, self._steps_done = call, session, tell, steps_done
        self._train_step, self._make_then = train_step, then
        self._then: TrainStep | None = None
        self._shapes: set[Any] = set()
        self._compiling = 0  # steps in which something was compiled
        self._timed: list[Timed] = []

    def train_step(self, microbatches: Sequence[Microbatch], *, measure: bool = False) -> StepOutput:
        if self._then is not None:
            return self._then(microbatches, measure=measure)
        step = self._steps_done() + 1
        if step <= _COUNTED and not self._call.choice:
            return self._count(step, microbatches, measure)
        if self._call.choice != TRYING or step > _COUNTED + _WARM + _TRIED:
            return self._settle()(microbatches, measure=measure)
        return self._try(step, microbatches, measure)

    def _count(self, step: int, microbatches: Sequence[Microbatch], measure: bool) -> StepOutput:
        self._shapes.update(tuple(tensor.shape for tensor in _tensors(m.batch)) for m in microbatches if m.size)
        before = compiled_graphs()
        self._call.use(self._compiling < _TIMES)
        output = self._train_step(microbatches, measure=measure)
        self._compiling += compiled_graphs() > before
        self._call.use(True)
        if step == _COUNTED:
            self._begin_trial()
        return output

    def _begin_trial(self) -> None:
        """Every rank comes here after the same step."""
        found = [int(len(self._shapes) > _FEW), int(self._compiling >= _TIMES)]
        shared = torch.tensor(found, device=self._session.device)
        is_many, is_each = self._session.max("whether shapes change", shared).tolist()
        if is_each:
            self._call.choose(AS_WRITTEN)
            why = f"torch would compile it for each of them, and has done so {_TIMES} times"
            self._warn(f"the shape of batches keeps changing: the model runs as it is written, as {why} [compile]")
        elif is_many:
            self._call.choose(TRYING)

    def _try(self, step: int, microbatches: Sequence[Microbatch], measure: bool) -> StepOutput:
        at = step - _COUNTED
        compiled = at > _WARM and at % 2 == 0
        self._call.use(compiled)
        is_typical = at > _WARM and not measure and all(micro.size >= self._call.least for micro in microbatches)
        if is_typical:
            self._wait()
        begun = time.perf_counter()
        try:
            output = self._train_step(microbatches, measure=measure)
        finally:
            self._call.use(True)
        if is_typical:
            self._wait()
            numbers = sum(tensor.numel() for micro in microbatches for tensor in _tensors(micro.batch))
            self._timed.append((compiled, numbers, time.perf_counter() - begun))
        if at == _WARM + _TRIED:
            self._decide()
        return output

    def _wait(self) -> None:
        if self._session.device.type == "cuda":
            torch.cuda.synchronize(self._session.device)

    def _decide(self) -> None:
        """By the means of what the ranks have found: one way for all of them."""
        found = torch.tensor([*times(self._timed), 1.0], dtype=torch.float64, device=self._session.device)
        compiled, written, ranks = self._session.sum("times of a step, compiled and not", found).tolist()
        self._call.choose(AS_WRITTEN if written < compiled else COMPILED)
        figures = (
            f"a step takes {1e3 * compiled / ranks:.2f} ms compiled for any of them, {1e3 * written / ranks:.2f} ms"
        )
        what = "runs as it is written" if written < compiled else "stays compiled"
        self._warn(f"the shape of batches keeps changing; {figures} as written: the model {what} [compile]")

    def _settle(self) -> TrainStep:
        self._then = self._make_then()
        self._shapes.clear()
        self._timed.clear()
        return self._then


def steps_of(
    strategy: Strategy,
    session: Session,
    *,
    then: Callable[[], TrainStep],
    steps_done: Callable[[], int],
    tell: Callable[[str], None],
) -> TrainStep:
    """What takes the steps of a run: `then` makes it, after a trial where the model is compiled as a whole."""
    call: CompiledCall | None = getattr(strategy, "compiled", None)
    if call is None:
        return then()
    trial = CompileTrial(call, session, train_step=strategy.train_step, then=then, steps_done=steps_done, tell=tell)
    return trial.train_step


def times(timed: Sequence[Timed]) -> tuple[float, float]:
    """Of a step with as many numbers as the mean, compiled and as written; of too few steps, zeros.

    Larger batches take longer, so each step counts by how far it is from the line through all of them. Medians of that
    leave out steps in which something was compiled or loaded.

    >>> [round(took, 2) for took in times([(True, 10, 0.2), (False, 20, 0.2), (True, 30, 0.6), (False, 40, 0.4)])]
    [0.44, 0.26]
    """
    if len({compiled for compiled, _, _ in timed}) < 2:
        return 0.0, 0.0
    sizes, seconds = [size for _, size, _ in timed], [took for _, _, took in timed]
    mean_size, mean = fmean(sizes), fmean(seconds)
    spread = sum((size - mean_size) ** 2 for size in sizes)
    shared = sum((size - mean_size) * (took - mean) for size, took in zip(sizes, seconds, strict=True))
    slope = max(0.0, shared / spread) if spread else 0.0
    parts = {
        way: median(took / max(mean + slope * (size - mean_size), mean / 10) for c, size, took in timed if c == way)
        for way in (True, False)
    }
    return mean * parts[True], mean * parts[False]


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from _tensors(value)
