"""EnginePipeline: DeepSpeed's PipelineEngine behind the interface of our own pipelines.

The engine runs the stages' forward and backward passes, sends what goes between them, and means the gradients over
the data ranks. Losses, weights, clipping and the optimizer's step stay those of every other run: the engine is given
a loss that asks for ours, and an optimizer that keeps the gradients instead of stepping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from distributed.core.errors import TaskError
from distributed.engines.deepspeed.ops import import_deepspeed
from distributed.strategies.base import Outcome
from distributed.strategies.pipeline.interception import signature
from distributed.strategies.pipeline.schedule import Run, Weigh

OnLoss = Callable[[Any, torch.Tensor], torch.Tensor]  # of the last stage's outputs and a micro-batch's number


class KeptGradients(torch.optim.Optimizer):
    """What DeepSpeed takes for the optimizer: its step keeps the gradients, which DeepSpeed drops after it."""

    def __init__(self, real: torch.optim.Optimizer) -> None:
        super().__init__([parameter for group in real.param_groups for parameter in group["params"]], {})
        self.param_groups, self.state = real.param_groups, real.state
        self._kept: list[tuple[nn.Parameter, torch.Tensor | None]] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it has no loss
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        self._kept = [(parameter, parameter.grad) for parameter in parameters]

    def give_back(self) -> None:
        for parameter, gradient in self._kept:
            parameter.grad = gradient
        self._kept = []


class EnginePipeline:
    """The stage of this rank; `start` makes the engine, once the module is as it is trained."""

    shared: Sequence[Sequence[str]] = ()  # parameters of several stages, which are refused
    stages: Sequence[nn.Module] = ()  # FSDP's

    def __init__(self, module: Any) -> None:
        self.module, self._engine = module, None
        self._own_loss = _replace_loss(module, self._loss)
        self._optimizer: KeptGradients | None = None
        self._on_loss: OnLoss | None = None
        self._shape: Any = None  # of the batches that the engine's buffers are for

    def start(self, config: dict[str, Any], optimizer: torch.optim.Optimizer, device: str) -> Any:
        deepspeed = import_deepspeed(device)
        self._optimizer = KeptGradients(optimizer)
        self._engine, *_ = deepspeed.initialize(
            model=self.module, optimizer=self._optimizer, config=config, dist_init_required=False
        )
        return self._engine

    def close(self) -> None:
        _replace_loss(self.module, self._own_loss)
        self._engine = None

    def forward_backward(self, batches: Sequence[Any], run: Run, weigh: Weigh) -> None:
        """One step of micro-batches; afterwards the gradients are those of the whole batch, on every data rank."""
        assert self._engine is not None
        assert self._optimizer is not None
        self._begin(batches)
        self._on_loss = lambda outputs, number: weigh(
            int(number),
            run(_Returned(outputs), batches[int(number)]),  # type: ignore[arg-type]  # is called alone
        )
        self._engine.micro_batches = len(batches)
        self._engine.train_batch(_fed(batches))
        self._optimizer.give_back()

    @torch.no_grad()
    def forward(self, batch: Any, run: Run) -> Outcome | None:
        """A batch without gradients; the ranks of the last stage have its outcome."""
        assert self._engine is not None
        found: list[Outcome] = []

        def keep(outputs: Any, number: torch.Tensor) -> torch.Tensor:
            found.append(run(_Returned(outputs), batch))  # type: ignore[arg-type]  # is called alone
            return found[-1].loss

        self._begin([batch])
        self._on_loss = keep
        self._engine.eval_batch(_fed([batch]), reduce_output=None, bcast_loss=False, num_micro_batches=1)
        return found[0] if found else None

    def finish_gradients(self, used: Any = None) -> None:
        """Does nothing: the engine has reduced them."""

    def _begin(self, batches: Sequence[Any]) -> None:
        """Buffers are of one shape, which the stages tell each other when it is another than before."""
        shapes = [signature(batch) for batch in batches]
        is_one = all(shape == shapes[0] for shape in shapes)
        self._engine.dynamic_shape = not is_one or self.module.dynamic_shape  # type: ignore[attr-defined]
        if not is_one or shapes[0] != self._shape:
            self._engine.reset_activation_shape()  # type: ignore[attr-defined]
        self._shape = shapes[0] if is_one else None

    def _loss(self, outputs: Any, number: torch.Tensor) -> torch.Tensor:
        assert self._on_loss is not None
        return self._on_loss(outputs, number)


def _replace_loss(module: Any, loss: Any) -> Any:
    """The loss that it had. One that is a module is a child, in the place of which no function can be put."""
    before = module.loss_fn
    del module.loss_fn
    module.loss_fn = loss
    return before


class _Returned:
    """The model as the last stage sees it: what goes in is at the first one, what comes out is here."""

    def __init__(self, outputs: Any) -> None:
        self._outputs = outputs

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self._outputs


def _fed(batches: Sequence[Any]) -> Iterator[tuple[Any, torch.Tensor]]:
    """What DeepSpeed reads of each: inputs for the first stage, and for the last one which batch it is."""
    for number, batch in enumerate(batches):
        yield _inputs(batch), torch.tensor(number)


def _inputs(batch: Any) -> Any:
    """As a PipelineModule takes them: one tensor, or a tuple of tensors."""
    is_pair = isinstance(batch, list | tuple)
    inputs = batch if not is_pair else batch[0] if len(batch) <= 2 else tuple(batch[:-1])
    parts = inputs if isinstance(inputs, list | tuple) else (inputs,)
    if not all(isinstance(part, torch.Tensor) for part in parts):
        raise TaskError(
            f"the inputs of a batch are a {type(inputs).__name__}",
            why="the first layer of a PipelineModule takes a tensor, or a tuple of tensors",
            do="let the dataset give (inputs, target), and the inputs as tensors",
        )
    return tuple(inputs) if isinstance(inputs, list) else inputs
