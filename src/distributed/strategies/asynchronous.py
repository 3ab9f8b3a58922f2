"""Asynchronous: rank 0 steps by the gradients of all ranks, and no other rank waits for that within a bound.

    rank 0     its share of batch k ─▶ gradients k of all ranks ─▶ update k ─▶ parameters k+1 ─▶ its share of batch k+1
    rank r     its share of batch j, at the newest parameters that it has, which lack at most `max_staleness` updates

An update is the user's optimizer stepping by the mean gradient of one whole global batch, as in dense training: each
sample counts once, in the same update as there, and batch, steps and learning rates are the same. What differs is at
which parameters a worker computed its share. With max_staleness=0 nothing does.

Only rank 0 has an optimizer's state. At a step whose numbers are read the ranks meet, on the same parameters.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from distributed.comm.parameter_server.messages import MessageLayout
from distributed.comm.parameter_server.server import ServerSide
from distributed.comm.parameter_server.worker import WorkerSide
from distributed.core.errors import TaskError
from distributed.core.plan import Plan
from distributed.data.loading.loader import Microbatch
from distributed.runtime.session import Session
from distributed.runtime.step_gate import StepGate
from distributed.runtime.torch_compat import foreach_mul_
from distributed.strategies.base import MetricSum, ModelCopy, NonFiniteLoss, StateTree, StepOutput, StepTask
from distributed.strategies.checks.replica_tensors import Named, model_tensors, optimizer_options
from distributed.strategies.checks.sparse_layers import refuse_sparse
from distributed.strategies.data_parallel.batchnorm import synced_layer
from distributed.strategies.data_parallel.whole_batch import NoWholeBatch, WholeBatch
from distributed.strategies.replicated import Replicated
from distributed.strategies.steps.mesh_step import MeshStep
from distributed.strategies.steps.microbatches import Passed

_STATE = "optimizer state of rank 0"
_TENSOR = "tensor of rank 0"
_ASKED = "synchronization='asynchronous'"
_TAGS = 10_000, 2**30  # of messages: no rank takes those of a run that has failed in this process group
_HEADER = 4  # numbers before the gradients: step, version, the count that the loss is a mean over, the loss
STALENESS = "staleness"  # the metric: how many updates the parameters lacked at which gradients were computed


class Asynchronous(Replicated):
    """A worker and, on rank 0, the parameter server."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._max_staleness = plan.replicate.synchronization.max_staleness
        self.is_timed = self._max_staleness > 0
        self._taken = 0  # steps of this world
        self._server: ServerSide | None = None
        self._worker: WorkerSide | None = None
        self._lacked: list[int] = []  # of the gradients of each worker since the numbers were read, the updates

    def check(self, task: StepTask) -> None:
        super().check(task)
        refuse_sparse(task.model, _ASKED, "a message to the server has dense gradients")
        synced = synced_layer(task.model)
        if synced is not None:
            raise TaskError(
                f"{synced} is a SyncBatchNorm, and {_ASKED}",
                why="in each forward pass it waits for all ranks, and these do not wait for each other",
                do="use GroupNorm, or nn.BatchNorm… with sync_batchnorm=False: rank 0's statistics are kept",
            )

    def setup(self, task: StepTask, session: Session) -> None:
        self.is_follower = not session.is_main
        super().setup(task, session)
        self._connect()

    def _connect(self) -> None:
        """Lay out the messages for what is trained now; every rank calls it after the same step."""
        self._disconnect()
        if self._session.is_dry:
            return
        layouts = [MessageLayout(self._with_gradients, numbers=count) for count in (_HEADER, 1)]
        drawn = str(random.SystemRandom().randrange(*_TAGS)) if self._session.is_main else None
        tag = int(self._session.share_text(f"tag of the parameter server {self._session.number()}", drawn))
        how: dict[str, Any] = {"max_staleness": self._max_staleness, "timeout_s": self._plan.collective_timeout_s}
        how["tag"] = tag
        self._taken = 0
        if self._session.is_main:
            self._server = ServerSide(self._session, *layouts, **how)
        else:
            self._worker = WorkerSide(self._session, *layouts, **how)

    def _disconnect(self) -> None:
        worker, self._worker, self._server = self._worker, None, None
        if worker is not None:
            worker.close()

    def _share_gradients(self) -> None:
        session = self._session
        self._send_model(session.gate is not None and session.begins_alike)

    def _share_batch(self) -> WholeBatch | None:
        return NoWholeBatch(normalizes=self._normalizes, asked=_ASKED)

    def _watch_changes(self) -> None:  # type: ignore[override]
        """A forward pass that changes parameters is overruled by those of rank 0."""

    def _why_not_captured(self) -> str:
        return super()._why_not_captured() or f"{_ASKED}: gradients and parameters are messages"

    def _gate_steps(self) -> StepGate | None:
        return None  # on NCCL the ranks resume from the checkpoint

    def parameters_changed(self) -> None:
        self._settle_updates()
        MeshStep.parameters_changed(self)
        self._connect()

    def train_step(self, microbatches: Sequence[Microbatch], *, measure: bool = False) -> StepOutput:
        """A step of this rank; on rank 0 it is an update, on others parameters may lack some after it."""
        if self._server is not None:
            self._server.begin_step()
        return super().train_step(microbatches, measure=measure)

    def _finish_step(self, passed: Passed, measure: bool) -> StepOutput:
        if self._server is not None:
            return self._serve(self._server, passed, measure)
        if self._worker is not None:
            return self._follow(self._worker, passed, measure)
        return super()._finish_step(passed, measure)

    def _follow(self, worker: WorkerSide, passed: Passed, measure: bool) -> StepOutput:
        """Send this rank's gradients, and take the newest parameters that are there, if they are new enough."""
        counted, loss = (math.nan if passed.weight is None else float(passed.weight)), passed.loss
        worker.push(self._taken, [counted, float(loss)], [p.grad for p in self._with_gradients])
        self._in_step = False
        self._forget_gradients()
        self._taken += 1
        worker.take(self._taken if measure else self._taken - self._max_staleness, self._with_gradients)
        if passed.weight is not None:  # the server alone knows of how many; it counts for all ranks
            loss = torch.zeros_like(loss) if isinstance(loss, torch.Tensor) else 0.0
        return StepOutput(loss, None, passed.metrics)

    def _serve(self, server: ServerSide, passed: Passed, measure: bool) -> StepOutput:
        """Step by the gradients of all ranks, and send what comes of it."""
        counted, loss = passed.weight, passed.loss
        weight = math.nan if counted is None else float(counted)
        total = loss if counted is None else float(loss)
        for rank in range(1, self._session.world_size):
            numbers, gradients = server.take(rank, self._taken)
            self._lacked.append(self._taken - int(numbers[1]))
            self._add(gradients)
            if counted is not None:
                weight, total = weight + numbers[2], total + numbers[3]
        factor = 1 / self._session.world_size
        if counted is not None:
            whole = self._unit / weight if weight else math.nan  # NaN: a mean over no target at all
            factor, loss = factor * whole, total * whole
            if self._checks_loss and not math.isfinite(loss):
                raise NonFiniteLoss(float(loss))
            loss = torch.tensor(loss, device=self._session.device) if self._moves else loss
        if grads := [p.grad for p in self._with_gradients if p.grad is not None]:
            with torch.no_grad():
                foreach_mul_(grads, torch.tensor(factor, dtype=torch.float64).to(grads[0].device))
        norm = self._update(measure)
        self._taken += 1
        server.publish(self._taken, self._with_gradients)
        return StepOutput(loss, norm, self._with_staleness(passed) if measure else None)

    @torch.no_grad()
    def _add(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add a worker's gradients to this rank's."""
        for parameter, gradient in zip(self._with_gradients, gradients, strict=True):
            if gradient is None:
                continue
            if parameter.grad is None:
                parameter.grad = gradient.to(parameter.device, copy=True)
            else:
                parameter.grad.add_(gradient.to(parameter.device))

    def _with_staleness(self, passed: Passed) -> dict[str, MetricSum]:
        lacked, self._lacked = self._lacked, []
        mean = MetricSum(float(sum(lacked)), float(len(lacked)))
        return {**(passed.metrics or {}), STALENESS: mean}

    def _settle_updates(self) -> None:
        """Until this rank has the parameters of every step that it has taken; no rank need call it."""
        if self._worker is not None:
            self._worker.take(self._taken, self._with_gradients)
        elif self._server is not None:
            self._server.settle()

    @contextmanager
    def weights(self, *, changes: bool = False) -> Iterator[ModelCopy]:
        self._settle_updates()
        with super().weights(changes=changes) as live:
            yield live

    def train(self, mode: bool) -> None:
        self._settle_updates()
        super().train(mode)

    def replicated(self) -> Named:
        """Without the optimizer's state, which rank 0 alone has."""
        self._settle_updates()
        yield from model_tensors(self.module, self._replicas)
        yield from optimizer_options(self.optimizer)

    def state(self) -> StateTree:
        """As a single replica's; every rank calls it after the same step."""
        self._settle_updates()
        if self._session.is_dry:
            return super().state()
        self._share_optimizer()
        found = super().state()
        self._drop_state()
        return found

    def _share_optimizer(self) -> None:
        """Give all ranks rank 0's state of the optimizer, until each has written its part of a checkpoint."""
        state, session = self.optimizer.state, self._session
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        places = {parameter: index for index, parameter in enumerate(parameters)}
        sent: list[torch.Tensor] = []
        known = [[places[p], _described(held, sent)] for p, held in state.items()]  # in the order of their first steps
        text = json.dumps(known) if session.is_main else None
        told = json.loads(session.share_text(f"{_STATE} {session.number()}", text))
        if session.is_main:
            for tensor in sent:
                session.send_from(_STATE, 0, tensor.detach().to(session.device).contiguous())
            return
        for index, held in told:
            state[parameters[index]] = self._received(held)

    def _received(self, told: Any) -> Any:
        """What rank 0 has described, with the tensors that it sends, in the order in which they are described."""
        if isinstance(told, list):
            return [self._received(value) for value in told]
        if not isinstance(told, dict):
            return told
        if _TENSOR not in told:
            return {key: self._received(value) for key, value in told.items()}
        dtype, shape, device = told[_TENSOR]
        empty = torch.empty(shape, dtype=getattr(torch, dtype), device=self._session.device)
        return self._session.send_from(_STATE, 0, empty).to(device)

    def _drop_state(self) -> None:
        if not self._session.is_main:
            self.optimizer.state.clear()

    def load_state(self, tree: StateTree) -> None:
        super().load_state(tree)
        self._drop_state()

    def held_state(self) -> StateTree | None:
        """Of the server alone: what a worker has may be ahead of it, or behind."""
        return super().held_state() if self._session.is_main else None

    def finish(self) -> None:
        self._settle_updates()
        super().finish()

    def close(self) -> None:
        try:
            self._disconnect()
        finally:
            super().close()


def _described(value: Any, tensors: list[torch.Tensor]) -> Any:
    """What another rank must know of tensors before they are sent, and all of anything else."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {_TENSOR: [str(value.dtype).removeprefix("torch."), list(value.shape), value.device.type]}
    if isinstance(value, dict):
        return {key: _described(part, tensors) for key, part in value.items()}
    return [_described(part, tensors) for part in value] if isinstance(value, (list, tuple)) else value
