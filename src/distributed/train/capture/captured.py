"""One captured step: a CUDA graph with inputs of its own, which are filled before each replay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from distributed.data.loading.loader import Microbatch
from distributed.data.loading.rows import RowBatch
from distributed.runtime.abort.nccl import Graphs
from distributed.strategies.base import Capturable, MetricSum, StepOutput
from distributed.train.capture.proofs import Proofs

_PLAIN = (bool, int, float, str, bytes, type(None))


class NotCapturable(Exception):
    """Why a step stays as it is."""


def refused_by_cuda(failed: Exception) -> NotCapturable:
    return NotCapturable(f"CUDA refused it: {(str(failed) or type(failed).__name__).splitlines()[0]}")


@contextmanager
def forgotten_if_refused(strategy: Capturable, device: torch.device) -> Iterator[None]:
    """A capture that leaves no trace where CUDA refuses it; then NotCapturable is raised."""
    generator = torch.cuda.default_generators[device.index or 0]
    seed_and_offset = generator.get_state()
    strategy.clock.begin(False)
    try:
        yield
    except Exception as failed:  # the user's step, in a capture: what is wrong with it shows again without one
        strategy.forget_step()  # nothing of it was computed
        torch.cuda.synchronize(device)
        generator.graphsafe_set_state(torch.Generator(device).graphsafe_get_state())  # else it still captures
        generator.set_state(seed_and_offset)
        raise refused_by_cuda(failed) from failed


def shape_of(microbatches: Sequence[Microbatch]) -> tuple[Any, ...]:
    """What a graph holds fixed: steps of one shape can share one. Raises NotCapturable for what no graph can read.

    >>> shape_of([Microbatch([torch.zeros(2, 3)], 1.0, 2)])
    ((1.0, 2, ('list', ((2, 3), torch.float32))),)
    """
    return tuple((micro.weight, micro.size, _describe(micro.batch)) for micro in microbatches)


def _describe(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return tuple(batch.shape), batch.dtype
    if isinstance(batch, RowBatch):
        return "rows", id(batch.rows), len(batch.index)
    if isinstance(batch, list | tuple):
        return (type(batch).__name__, *map(_describe, batch))
    if isinstance(batch, Mapping):
        return (type(batch).__name__, *((key, _describe(value)) for key, value in batch.items()))
    if isinstance(batch, _PLAIN):
        return batch
    raise NotCapturable(f"its batches hold a {type(batch).__name__}, and a graph reads tensors only")


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    """What must be copied for a replay, in a fixed order."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, RowBatch):
        yield batch.index
    elif isinstance(batch, list | tuple):
        for item in batch:
            yield from _tensors(item)
    elif isinstance(batch, Mapping):
        for item in batch.values():
            yield from _tensors(item)


def _static(batch: Any, device: torch.device) -> Any:
    """The same with tensors on the device that stay where they are."""
    if isinstance(batch, torch.Tensor):
        return batch.detach().to(device, copy=True)
    if isinstance(batch, RowBatch):
        return RowBatch(batch.rows, batch.index.clone())
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_static(item, device) for item in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_static(item, device) for item in batch)
    if isinstance(batch, Mapping):
        return {key: _static(value, device) for key, value in batch.items()}
    return batch


class CapturedStep:
    """A step of one shape. Nothing is computed while it is captured; `replay` computes all of it."""

    def __init__(
        self,
        strategy: Capturable,
        microbatches: Sequence[Microbatch],
        measure: bool,
        *,
        device: torch.device,
        pool: Any,
        stream: torch.cuda.Stream,
        graphs: Graphs,
    ) -> None:
        """`graphs`: of the world whose collectives are in the step."""
        self.proofs, self._device, self._graphs = Proofs(), device, graphs
        self._micros = [micro._replace(batch=_static(micro.batch, device)) for micro in microbatches]
        self._inputs = [tensor for micro in self._micros for tensor in _tensors(micro.batch)]
        self._graph = torch.cuda.CUDAGraph()
        # Threads that pin memory or write checkpoints may call CUDA meanwhile: only this thread's calls are watched.
        capture = torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local")
        torch.cuda.synchronize(device)  # what it is busy with may end by an abort alone, which waits for a capture
        with graphs.making(self._graph), capture:
            self._output = strategy.step(self._micros, measure)

    def last_inputs(self) -> list[Microbatch]:
        """Those of the last replay, in tensors of their own: a model may write to what it is given."""
        return [micro._replace(batch=_static(micro.batch, self._device)) for micro in self._micros]

    @torch.no_grad()  # also where the model has made its input a leaf of autograd
    def replay(self, microbatches: Sequence[Microbatch]) -> StepOutput:
        if len(self._inputs) == 1:  # the rows of a dataset that lies on the device: their numbers are all that changes
            batch = microbatches[0].batch
            self._inputs[0].copy_(batch.index if isinstance(batch, RowBatch) else next(_tensors(batch)), True)
        else:
            given = [tensor for micro in microbatches for tensor in _tensors(micro.batch)]
            for place, tensor in zip(self._inputs, given, strict=True):
                place.copy_(tensor, non_blocking=True)
        self._graphs.launch(self._graph)
        output = self._output
        assert isinstance(output.loss, torch.Tensor)
        loss = output.loss.clone()  # the next replay writes over it
        if output.gradient_norm is None and output.metrics is None:
            return StepOutput(loss)
        norm = None if output.gradient_norm is None else output.gradient_norm.clone()
        metrics = {
            name: MetricSum(_own(total), _own(weight)) for name, (total, weight) in (output.metrics or {}).items()
        }
        return StepOutput(loss, norm, metrics)


def _own(value: torch.Tensor | float) -> torch.Tensor | float:
    return value.clone() if isinstance(value, torch.Tensor) else value
