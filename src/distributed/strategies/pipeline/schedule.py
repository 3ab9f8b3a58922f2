"""Pipeline: a step of micro-batches through stages on different ranks, by torch's schedules."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)

from distributed.core.errors import DistributedError, PlanError
from distributed.runtime.session import Session
from distributed.runtime.torch_compat import is_view, step_microbatches
from distributed.strategies.base import Outcome
from distributed.strategies.pipeline.interception import Interception, StageEnd, signature
from distributed.strategies.pipeline.stages import cut
from distributed.strategies.placement import Layout, local

Run = Callable[[nn.Module, Any], Outcome]
Weigh = Callable[[int, Outcome], torch.Tensor]

STAGES_PER_RANK = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 2}
_KEPT_SETS = 4  # sets of receive buffers, one for each shape of batches
_SHAPES = "shapes of hidden states between stages"


class Stage(nn.Module):
    """One stage: it has its own parameters, and runs the model's forward from the received hidden state on."""

    def __init__(self, interception: Interception, index: int) -> None:
        super().__init__()
        for path, module in interception.own_modules(index).items():
            self.add_module(path.replace(".", "/"), module)
        self.index, self._interception = index, interception
        self.work: _Work | None = None
        self._next = 0

    def begin(self, work: _Work) -> None:
        self.work, self._next = work, 0

    def forward(self, *received: torch.Tensor) -> torch.Tensor:
        assert self.work is not None
        at, self._next = self._next, self._next + 1  # a stage runs its micro-batches in order, in every schedule
        work, parts = self.work, self._interception
        # a copy, because the model may change it in place, which autograd forbids for a leaf with gradients
        with parts.at(self.index, received[0].clone() if received else None):
            try:
                outcome = work.run(parts.module, work.batches[at])
            except StageEnd as leave:
                return work.check(self.index, _sendable(leave.hidden))
        if self.index != parts.last:
            raise PlanError(
                "the model's forward ended before it reached the blocks of the next stage",
                why=f"stage {self.index} of {parts.last + 1} has {', '.join(parts.parts[self.index])}",
                do="set pipeline_parallel=1 for this model",
            )
        weighed = work.weigh(at, outcome).float()  # fp32, as declared to torch; only its backward is used
        return weighed.clone() if is_view(weighed) else weighed


class _Work:
    """The inputs of this rank's stages for one step."""

    def __init__(self, batches: Sequence[Any], run: Run, weigh: Weigh, metas: dict[int, _Meta]) -> None:
        self.batches, self.run, self.weigh, self.metas = batches, run, weigh, metas

    def check(self, stage: int, hidden: torch.Tensor) -> torch.Tensor:
        """Check that a hidden state has the shape that the next stage expects for this batch's shapes."""
        found = _Meta(tuple(hidden.shape), hidden.dtype)
        known = self.metas.setdefault(stage, found)
        if found != known:
            raise PlanError(
                f"stage {stage} returned {found}, for an earlier batch of the same shapes {known}",
                why="the next stage must know the shape of the hidden state from the shapes of the batch",
                do="pad the batches to one shape, or set pipeline_parallel=1",
            )
        return hidden


class _TorchStage(PipelineStage):
    def _post_metadata_inference_cleanup(self) -> None:
        """Does nothing, because no shape was inferred; torch's own method would drop accumulated gradients."""


class Pipeline:
    """Cuts a model in place into this rank's stages, and runs steps through the stages of all ranks.

    `agree` gets 0 for a step like an earlier one, 1 for new shapes and 2 for micro-batches of different shapes, and
    returns the maximum over the ranks that must run equal steps: with FSDP, the ranks of one stage.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        *,
        group: dist.ProcessGroup,
        schedule: str,
        microbatches: int,
        session: Session,
        agree: Callable[[int], int] = lambda case: case,
    ) -> None:
        self._group, self._kind, self._session, self._agree = group, schedule, session, agree
        self._device = device = session.device
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        total = self._ranks * STAGES_PER_RANK[schedule]
        mine = range(self._rank, total, self._ranks)
        self._parts = Interception(module, layout, cut(module, total), mine, device)
        self.stages = [Stage(self._parts, index) for index in mine]
        self.blocks = [self._parts.parts[index] for index in mine]  # the paths of each stage's blocks
        self.is_first, self.is_last = self._rank == 0, self._rank == self._ranks - 1
        self.shared = self._parts.shared
        self.schedule = _schedule_class(schedule, microbatches, self._ranks).__name__  # torch's, of a full step
        self._metas: dict[Any, dict[int, _Meta]] = {}  # shapes of each stage's input and output on this rank
        self._sets: OrderedDict[Any, Any] = OrderedDict()
        # NCCL makes the group's communicator when it is first used, and waits for all of its ranks
        session.sum("first meeting of the stages", torch.zeros((), device=device), group)
        if device.type == "cuda":
            _begin_backward_thread(device)

    def forget_sets(self) -> None:
        """Make torch's stages again at the next step: other parameters are trained."""
        self._sets.clear()

    def forward_backward(self, batches: Sequence[Any], run: Run, weigh: Weigh) -> None:
        """Run one step: the gradients equal those of the sum of the weighed losses in one process.

        Only the rank of the last stage has outcomes. `weigh` gets each of them, and their outputs are not kept.
        """
        keys = [self._key(batch) for batch in batches]
        is_regular = len(set(keys)) == 1
        case = self._agree(2 if not is_regular else 0 if keys[0] in self._metas else 1)
        if case < 2:
            self._step(batches, keys[0], case == 1, run, weigh)
            return
        for at, (batch, key) in enumerate(zip(batches, keys, strict=True)):
            is_new = self._agree(0 if key in self._metas else 1) > 0
            self._step([batch], key, is_new, run, partial(_weigh_at, weigh, at))

    @torch.no_grad()
    def forward(self, batch: Any, run: Run) -> Outcome | None:
        """Run a batch through all stages without gradients; the rank of the last stage returns the outcome."""
        key = self._key(batch)
        is_new = key not in self._metas
        found: list[Outcome] = []

        def keep(_: int, outcome: Outcome) -> torch.Tensor:
            found.append(outcome)
            return outcome.loss

        self._walk(_Work([batch], run, keep, self._metas.setdefault(key, {})), is_new)
        return found[0] if found else None

    @torch.no_grad()
    def finish_gradients(self, used: Mapping[str, nn.Parameter] | None = None) -> None:
        """Sum the gradients of parameters that the first and the last stage share; `used`: only of these."""
        if not self.shared or self._ranks == 1 or not (self.is_first or self.is_last):
            return
        peer = dist.get_global_rank(self._group, self._ranks - 1 if self.is_first else 0)
        sums, operations = [], []
        for names in self.shared:
            parameter = self._parts.module.get_parameter(names[0])
            if not parameter.requires_grad or (used is not None and not any(name in used for name in names)):
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            own = local(parameter.grad)
            sent, other = own.contiguous(), torch.empty_like(own, memory_format=torch.contiguous_format)
            sums.append((own, other))
            operations.append(dist.P2POp(dist.isend, sent, peer, self._group))
            operations.append(dist.P2POp(dist.irecv, other, peer, self._group))
        if operations:
            self._send("gradients that two stages share", operations)
        for own, other in sums:
            own += other

    def _step(self, batches: Sequence[Any], key: Any, is_new: bool, run: Run, weigh: Weigh) -> None:
        """Micro-batches of one shape."""
        metas = self._metas.setdefault(key, {})
        if is_new:
            with self._without_trace():
                self._walk(_Work(batches[:1], run, weigh, metas), True, is_probe=True)
        stages, schedule = self._get_set(key, len(batches))
        work = _Work(batches, run, weigh, metas)
        for own, stage in zip(self.stages, stages, strict=True):
            own.begin(work)
            stage.has_backward = True
            stage.clear_runtime_states()
        try:
            step_microbatches(schedule, len(batches))
        except (RuntimeError, KeyError) as error:
            self._sets.clear()
            self._explain(error)
            raise

    def _get_set(self, key: Any, count: int) -> tuple[list[_TorchStage], Any]:
        """torch's stages and schedule for a number of micro-batches of one shape, with their receive buffers."""
        if (key, count) not in self._sets:
            if self._kind == "zero_bubble":
                self._keep_unsharded()
            metas = self._metas[key]
            total = self._parts.last + 1
            stages = []
            for own in self.stages:
                inputs = () if own.index == 0 else (metas[own.index - 1].like(),)
                is_last = own.index == self._parts.last
                output = torch.empty((), device="meta", requires_grad=True) if is_last else metas[own.index].like()
                stages.append(
                    _TorchStage(
                        own, own.index, total, self._device, input_args=inputs, output_args=output, group=self._group
                    )
                )
            options: dict[str, Any] = {"loss_fn": lambda output, target: output, "scale_grads": False}
            kind = _schedule_class(self._kind, count, self._ranks)
            what = stages[0] if STAGES_PER_RANK[self._kind] == 1 else stages
            self._sets[key, count] = (stages, kind(what, count, **options))
            while len(self._sets) > _KEPT_SETS:
                self._sets.popitem(last=False)
        self._sets.move_to_end((key, count))
        return self._sets[key, count]

    def _keep_unsharded(self) -> None:
        """Keep FSDP's parameters the same objects in the forward and in the later backward of the weights."""
        for module in (module for stage in self.stages for module in stage.modules()):
            if isinstance(module, FSDPModule):
                module.set_reshard_after_forward(False, recurse=False)

    def _walk(self, work: _Work, is_new: bool, *, is_probe: bool = False) -> None:
        """Run one batch through this rank's stages in order; for a new shape, also send the output structure.

        A probe needs this structure only, so the last stage does not compute.
        """
        for stage in self.stages:
            before, after = (stage.index - 1) % self._ranks, (stage.index + 1) % self._ranks
            received: tuple[torch.Tensor, ...] = ()
            if stage.index:
                if is_new:
                    work.metas[stage.index - 1], form = self._receive_object(before)
                    self._parts.take_form(form)
                buffer = work.metas[stage.index - 1].empty(self._device)
                self._exchange(dist.irecv, buffer, before)
                received = (buffer,)
            is_last = stage.index == self._parts.last
            if is_last and is_probe:
                continue
            stage.begin(work)
            output = stage(*received)
            if not is_last:
                output = output.detach()
                if is_new:
                    peer = dist.get_global_rank(self._group, after)
                    word = (work.metas[stage.index], self._parts.form)
                    with self._session.named(_SHAPES):
                        dist.send_object_list([word], dst=peer, group=self._group, device=self._device, **_BATCHED)
                self._exchange(dist.isend, output, after)

    def _exchange(self, send_or_receive: Callable[..., Any], tensor: torch.Tensor, peer: int) -> None:
        """Send one message, as a batch: in an eagerly initialized group NCCL serializes unbatched ones."""
        operation = dist.P2POp(send_or_receive, tensor, dist.get_global_rank(self._group, peer), self._group)
        self._send("hidden states between stages", [operation])

    def _send(self, name: str, operations: list[dist.P2POp]) -> None:
        with self._session.named(name):
            for work in dist.batch_isend_irecv(operations):
                work.wait()

    def _receive_object(self, peer: int) -> Any:
        found = [None]
        source = dist.get_global_rank(self._group, peer)
        with self._session.named(_SHAPES):
            dist.recv_object_list(found, src=source, group=self._group, device=self._device, **_BATCHED)
        return found[0]

    def _key(self, batch: Any) -> Any:
        kind = self._device.type
        is_cast = torch.is_autocast_enabled(kind)
        return (signature(batch), torch.get_autocast_dtype(kind) if is_cast else None)

    @contextmanager
    def _without_trace(self) -> Iterator[None]:
        """The scope of a forward outside training: buffers and random state are restored after it."""
        buffers = [buffer for buffer in self._parts.module.buffers() if not buffer.is_meta]
        before = [buffer.clone() for buffer in buffers]
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            yield
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
        torch.clear_autocast_cache()  # casts made without gradients would be used again with them

    def _explain(self, error: Exception) -> None:
        """Raise the original error of code inside torch's schedule, which wraps it."""
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, DistributedError):
                raise cause
            cause = cause.__cause__
        if error.__cause__ is not None and "failed to run forward" in str(error):
            raise error.__cause__
        if self._kind == "zero_bubble" and (isinstance(error, KeyError) or "stage backward input" in str(error)):
            raise PlanError(
                "the backward of this model cannot be split into inputs and weights, as schedule zero_bubble does",
                why=str(error.__cause__ or error).strip(),
                do="set pipeline_schedule='1f1b'",
            ) from error


class _Meta(NamedTuple):
    """The shape and type of the hidden state between two stages."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def like(self) -> torch.Tensor:
        return self.empty(torch.device("meta")).requires_grad_()


def _schedule_class(name: str, count: int, ranks: int) -> Any:
    """The schedule for a number of micro-batches; if they do not fit it, one that takes any number."""
    if name == "1f1b" and count >= ranks:
        return Schedule1F1B
    if name in ("gpipe", "1f1b"):
        return ScheduleGPipe
    if count % ranks:
        return ScheduleLoopedBFS
    return ScheduleInterleaved1F1B if name == "interleaved" else ScheduleInterleavedZeroBubble


def _weigh_at(weigh: Weigh, index: int, _: int, outcome: Outcome) -> torch.Tensor:
    return weigh(index, outcome)


def _sendable(hidden: torch.Tensor) -> torch.Tensor:
    hidden = hidden.contiguous()
    if torch.is_grad_enabled() and not hidden.requires_grad:  # all earlier layers are frozen
        return hidden + torch.zeros((), dtype=hidden.dtype, device=hidden.device, requires_grad=True)
    return hidden.clone() if is_view(hidden) else hidden


def _begin_backward_thread(device: torch.device) -> None:
    """Launch a kernel in autograd's thread of a GPU, so that cuBLAS finds a context in a stage's backward."""
    (torch.zeros((), device=device, requires_grad=True) * 1).backward()


_BATCHED: dict[str, Any] = (
    {"use_batch": True} if "use_batch" in inspect.signature(dist.send_object_list).parameters else {}
)
