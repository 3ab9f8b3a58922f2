"""Pipeline: a step over micro-batches through stages on different ranks, driven by torch's schedules."""

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
from distributed.strategies.base import Outcome
from distributed.strategies.gradient_sums import local
from distributed.strategies.interception import Interception, Leave, signature
from distributed.strategies.layout import Layout
from distributed.strategies.stages import cut

Run = Callable[[nn.Module, Any], Outcome]
Weigh = Callable[[int, Outcome], torch.Tensor]

STAGES_PER_RANK = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 2}
_KEPT_SETS = 4  # of buffers for one shape of batches each


class Stage(nn.Module):
    """One stage: its parameters are its own, its forward is the model's from what was received on."""

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
        # a copy, because the model may change it in place, which nobody may do to a leaf that has gradients
        with parts.at(self.index, received[0].clone() if received else None):
            try:
                outcome = work.run(parts.module, work.batches[at])
            except Leave as leave:
                return work.check(self.index, _sendable(leave.hidden))
        if self.index != parts.last:
            raise PlanError(
                "the model's forward ended before it came to the blocks of the next stage",
                why=f"stage {self.index} of {parts.last + 1} has {', '.join(parts.parts[self.index])}",
                do="set pipeline_parallel=1 for this model",
            )
        weighed = work.weigh(at, outcome)
        return weighed.clone() if weighed._is_view() else weighed


class _Work:
    """What the stages of this rank are given for one step."""

    def __init__(self, batches: Sequence[Any], run: Run, weigh: Weigh, metas: dict[int, _Meta]) -> None:
        self.batches, self.run, self.weigh, self.metas = batches, run, weigh, metas

    def check(self, stage: int, hidden: torch.Tensor) -> torch.Tensor:
        """The next stage waits for a hidden state like those of earlier batches of the same shapes."""
        found = _Meta(tuple(hidden.shape), hidden.dtype)
        known = self.metas.setdefault(stage, found)
        if found != known:
            raise PlanError(
                f"stage {stage} gave out {found}, for an earlier batch of the same shapes {known}",
                why="a pipeline has to know the shape of the hidden state by the shapes of the batch",
                do="pad the batches to one shape, or set pipeline_parallel=1",
            )
        return hidden


class _TorchStage(PipelineStage):
    def _post_metadata_inference_cleanup(self) -> None:
        """Nothing was inferred; torch's own forgets the gradients that a step has so far."""


class Pipeline:
    """Cuts a model in place for this rank's place in a group of ranks, and runs steps through all of them.

    `agree` is given 0 for a step like an earlier one, 1 for new shapes and 2 for micro-batches of different shapes, and
    returns the largest that any rank has whose steps must go alike: with FSDP, the ranks that share a stage.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        *,
        group: dist.ProcessGroup,
        schedule: str,
        microbatches: int,
        device: torch.device,
        agree: Callable[[int], int] = lambda case: case,
    ) -> None:
        self._group, self._kind, self._device, self._agree = group, schedule, device, agree
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        total = self._ranks * STAGES_PER_RANK[schedule]
        mine = range(self._rank, total, self._ranks)
        self._parts = Interception(module, layout, cut(module, total), mine, device)
        self.stages = [Stage(self._parts, index) for index in mine]
        self.blocks = [self._parts.parts[index] for index in mine]  # the paths of each stage's blocks
        self.is_first, self.is_last = self._rank == 0, self._rank == self._ranks - 1
        self.shared = self._parts.shared
        self.schedule = _schedule_class(schedule, microbatches, self._ranks).__name__  # torch's, of a full step
        self._metas: dict[Any, dict[int, _Meta]] = {}  # of what each stage of this rank receives and gives out
        self._sets: OrderedDict[Any, Any] = OrderedDict()
        # NCCL makes the group's communicator when it is first used, and waits for all of its ranks
        dist.all_reduce(torch.zeros((), device=device), group=group)

    def forward_backward(self, batches: Sequence[Any], run: Run, weigh: Weigh) -> None:
        """One step: gradients as if the micro-batches' weighed losses had been summed and gone back in one process.

        Only the rank of the last stage has outcomes. `weigh` sees each of them, and nobody keeps their outputs.
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
        """Through all stages without gradients; the rank of the last stage returns the outcome."""
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
        """Sum the gradients of parameters that the first and the last stage both have; `used`: of these alone."""
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
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
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
        options: dict[str, Any] = {"return_outputs": False} if _TAKES_RETURN_OUTPUTS else {}
        count = len(batches)
        try:
            schedule._step_microbatches([()] * count, [{}] * count, [None] * count, [], **options)
        except (RuntimeError, KeyError) as error:
            self._sets.clear()
            self._explain(error)
            raise

    def _get_set(self, key: Any, count: int) -> tuple[list[_TorchStage], Any]:
        """torch's stages and schedule for so many micro-batches of one shape; they hold the buffers to receive in."""
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
        """FSDP's parameters must be the same objects in the forward and in the later backward of the weights."""
        for module in (module for stage in self.stages for module in stage.modules()):
            if isinstance(module, FSDPModule):
                module.set_reshard_after_forward(False, recurse=False)

    def _walk(self, work: _Work, is_new: bool, *, is_probe: bool = False) -> None:
        """One batch through this rank's stages in turn; where its shape is new, with a word on what is handed on.

        A probe is after this word only, so the last stage need not compute.
        """
        for stage in self.stages:
            before, after = (stage.index - 1) % self._ranks, (stage.index + 1) % self._ranks
            received: tuple[torch.Tensor, ...] = ()
            if stage.index:
                if is_new:
                    work.metas[stage.index - 1], form = self._receive_object(before)
                    self._parts.form = self._parts.form or form
                buffer = work.metas[stage.index - 1].empty(self._device)
                dist.recv(buffer, src=dist.get_global_rank(self._group, before), group=self._group)
                received = (buffer,)
            is_last = stage.index == self._parts.last
            if is_last and is_probe:
                continue
            stage.begin(work)
            output = stage(*received)
            if not is_last:
                output = output.detach()
                peer = dist.get_global_rank(self._group, after)
                if is_new:
                    word = (work.metas[stage.index], self._parts.form)
                    dist.send_object_list([word], dst=peer, group=self._group, device=self._device)
                dist.send(output, dst=peer, group=self._group)

    def _receive_object(self, peer: int) -> Any:
        found = [None]
        source = dist.get_global_rank(self._group, peer)
        dist.recv_object_list(found, src=source, group=self._group, device=self._device)
        return found[0]

    def _key(self, batch: Any) -> Any:
        kind = self._device.type
        is_cast = torch.is_autocast_enabled(kind)
        return (signature(batch), torch.get_autocast_dtype(kind) if is_cast else None)

    @contextmanager
    def _without_trace(self) -> Iterator[None]:
        """Around a forward that is not one of the training's: buffers and random numbers stay as they were."""
        buffers = [buffer for buffer in self._parts.module.buffers() if not buffer.is_meta]
        before = [buffer.clone() for buffer in buffers]
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            yield
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
        torch.clear_autocast_cache()  # casts made without gradients would be used again with them

    def _explain(self, error: Exception) -> None:
        """Raise what the user's code or ours raised inside of torch's schedule, which wraps it."""
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
    """Of the hidden state between two stages."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def like(self) -> torch.Tensor:
        return self.empty(torch.device("meta")).requires_grad_()


def _schedule_class(name: str, count: int, ranks: int) -> Any:
    """The schedule for so many micro-batches; where they do not fit it, one that takes any number."""
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
    if torch.is_grad_enabled() and not hidden.requires_grad:  # everything before is frozen
        return hidden + torch.zeros((), dtype=hidden.dtype, device=hidden.device, requires_grad=True)
    return hidden.clone() if hidden._is_view() else hidden


_TAKES_RETURN_OUTPUTS = "return_outputs" in inspect.signature(ScheduleGPipe._step_microbatches).parameters
