"""Compressed gradients: DDP's communication hook, which sends less than the gradients.

The hook runs in the backward pass as soon as a bucket of gradients is whole. It begins the bucket's collectives and
returns; the last bucket's hook waits for all. A second round of a bucket begins in the hook of the next one: at the
same place on every rank, whatever is done by then.

    bucket 0: encode ─> collective ────────┐            ┌─> decode
    bucket 1:            encode ─> collective ──────────┼─> decode
    last one:                        encode ─> collective, wait for all
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distributed.comm.compression.exchange import Exchange, ExchangePlace, Gather, GradientPiece, Reduced, Request, Sum
from distributed.comm.compression.feedback import ErrorFeedback, flat
from distributed.comm.compression.kinds import CASTS, make_compressor
from distributed.core.errors import TaskError
from distributed.core.plan import Decision
from distributed.core.plan_parts.compression import CompressionPlan
from distributed.runtime.session import Session

_NAME = "compressed gradients"

Rounds = Generator[tuple[Request, ...], tuple[torch.Tensor, ...], None]


class CompressedGradients:
    """Reduces the buckets of one or several DDP modules; `check` and `commit` are around the optimizer's step."""

    def __init__(self, plan: CompressionPlan, session: Session) -> None:
        self._session = session
        self._flights: list[_Flight] = []
        self._rounds = 1

    keeps = False  # whether something is left for the next step

    def weigh(self, scale: torch.Tensor) -> None:
        """The coming gradients are those of the whole batch times this."""

    def begin(self) -> None:
        """A backward pass begins to reduce."""

    def check(self) -> None:
        """Before the optimizer's step: raises if the sums cannot be stepped by."""

    def commit(self) -> None:
        """After the optimizer's step."""

    def rounds_of(self, bucket: dist.GradBucket) -> Rounds:
        """What reduces a bucket, round by round."""
        raise NotImplementedError

    def reduce_bucket(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The hook, in the backward pass."""
        buffer = bucket.buffer()
        if bucket.index() == 0:
            self._flights = []  # of a pass that was not finished
            self.begin()
        future: torch.futures.Future[torch.Tensor]
        future = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)  # type: ignore[list-item]
        with torch.no_grad():
            for flight in self._flights:
                if flight.rounds < self._rounds:
                    flight.advance()
            self._flights.append(_Flight(self._session, self.rounds_of(bucket), lambda: future.set_result(buffer)))
            if bucket.is_last():
                while self._flights:
                    self._flights = [flight for flight in self._flights if flight.advance()]
        return future


class CastGradients(CompressedGradients):
    """Gradients in 16 bits: each rank's share of the mean, so that a sum of them overflows no sooner than one does."""

    def __init__(self, plan: CompressionPlan, session: Session, *, is_scaled: bool) -> None:
        """`is_scaled`: a gradient scaler skips steps that overflow."""
        super().__init__(plan, session)
        self._dtype, self._kind, self._is_scaled = CASTS[plan.kind], plan.kind, is_scaled
        self._overflowed: torch.Tensor | None = None

    @property
    def has_small_range(self) -> bool:
        return self._dtype is torch.float16

    def begin(self) -> None:
        self._overflowed = None

    def check(self) -> None:
        if self._is_scaled or self._overflowed is None or not bool(self._overflowed):
            return
        raise TaskError(
            f"gradients overflowed under compression={self._kind!r}",
            why=f"a number of the gradient is beyond {torch.finfo(self._dtype).max:g}, the largest that "
            f"{self._kind} has, and would be infinite",
            do="set compression='bf16', which sends as few bytes and has the range of fp32",
        )

    def rounds_of(self, bucket: dist.GradBucket) -> Rounds:
        buffer = bucket.buffer()
        numbers = torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer
        wire = torch.empty(numbers.numel() + 1, dtype=self._dtype, device=numbers.device)
        wire[:-1] = numbers / self._session.world_size
        wire[-1] = _nothing_or_nan(numbers)
        (summed,) = yield (Sum(wire),)
        numbers.copy_(summed[:-1])
        made_here = ~torch.isfinite(summed).all() & torch.isfinite(summed[-1])
        self._overflowed = made_here if self._overflowed is None else self._overflowed | made_here


class FedBackGradients(CompressedGradients):
    """Gradients of which a part is sent, and the rest is kept for the next step; small ones are sent whole."""

    keeps = True

    def __init__(
        self,
        plan: CompressionPlan,
        session: Session,
        *,
        seed: int,
        finds_unused: bool,
        loss_scale: Callable[[], torch.Tensor | None],
    ) -> None:
        """`finds_unused`: parameters may have no gradient in a step. `loss_scale`: by which the loss is multiplied."""
        super().__init__(plan, session)
        self._compressor = make_compressor(plan.kind, ratio=plan.ratio, rank=plan.rank)
        self._rounds = self._compressor.requests
        self._min_size, self._seed, self._finds_unused = plan.min_size, seed, finds_unused
        self._loss_scale, self._weight_scale = loss_scale, None
        self._names: dict[nn.Parameter, str] = {}
        self._is_finite: torch.Tensor | None = None
        self.feedback = ErrorFeedback()

    _weight_scale: torch.Tensor | None

    def follow(self, module: nn.Module) -> None:
        """Compress gradients of the parameters that are trained now."""
        self._names = {parameter: name for name, parameter in module.named_parameters()}
        if self._session.world_size > 1:
            trained = {name: p for p, name in self._names.items() if p.requires_grad and self._fits(p)}
            self.feedback.follow(trained)

    def decision(self) -> Decision:
        """How much of the model is compressed, which may be nothing."""
        trained = [parameter for parameter in self._names if parameter.requires_grad]
        fitting = [parameter for parameter in trained if self._fits(parameter)]
        return Decision(
            f"of {len(trained)} gradients {len(fitting)} are compressed",
            f"those of fewer than {self._min_size:,} numbers are sent whole, as are those that would not shrink",
            "compression_min_size",
        )

    def weigh(self, scale: torch.Tensor) -> None:
        self._weight_scale = scale.to(torch.float32)

    def begin(self) -> None:
        self.feedback.forget_step()
        self._is_finite = None

    def commit(self) -> None:
        self._weight_scale = None
        if self._is_finite is None:
            return
        if bool(self._is_finite):
            self.feedback.take_step()
        self.feedback.forget_step()  # of gradients that are not finite, which a gradient scaler does not step by
        self._is_finite = None

    @torch.no_grad()
    def flush(self, stepped: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """On a single rank, which sends nothing: add all that is left to its gradients, once a step.

        `stepped`: the optimizer's parameters, by those of the model that others step for.
        """
        if not self.feedback.left or self._is_finite is not None:
            return
        scale = self._loss_scale()
        for parameter, name in self._names.items():
            left, gradient = self.feedback.left.get(name), stepped.get(parameter, parameter).grad
            if gradient is None:
                continue
            if left is not None:
                gradient.add_(left if scale is None else left * scale)
                self.feedback.keep(name, torch.zeros_like(flat(left)))
            self._see(gradient)

    def state(self) -> dict[str, Any]:
        """For a checkpoint, in which every rank has its own row."""
        return self.feedback.state(self._session.rank, self._session.world_size)

    def load(self, tree: dict[str, Any]) -> None:
        self.feedback.load(tree, {name: parameter for parameter, name in self._names.items()})

    def _fits(self, parameter: torch.Tensor) -> bool:
        if not parameter.is_floating_point() or parameter.numel() < self._min_size:
            return False
        return self._compressor.fits(tuple(parameter.shape))

    def _see(self, gradients: torch.Tensor) -> None:
        finite = torch.isfinite(gradients).all()
        self._is_finite = finite if self._is_finite is None else self._is_finite & finite

    def _scale(self) -> torch.Tensor | None:
        found = self._loss_scale()
        if found is None or self._weight_scale is None:
            return found if self._weight_scale is None else self._weight_scale
        return found * self._weight_scale

    def rounds_of(self, bucket: dist.GradBucket) -> Rounds:
        """Round by round: what is sent whole goes with the first."""
        buffer, scale, feedback = bucket.buffer(), self._scale(), self.feedback
        poison = _nothing_or_nan(buffer)  # what is not finite is to reach all ranks, also if its place is not sent
        whole: list[tuple[str, torch.Tensor]] = []
        pieces: list[GradientPiece] = []
        places: list[torch.Tensor] = []
        for parameter, gradient in self._cut(bucket):
            name = self._names[parameter]
            left = feedback.flat(name)
            if not self._fits(parameter) or left is None:
                whole.append((name, gradient))
                continue
            value = gradient.to(torch.float32)
            value = (value if scale is None else value / scale) + left + poison
            pieces.append(GradientPiece(name, tuple(parameter.shape), value, feedback.basis.get(name)))
            places.append(gradient)

        used = torch.stack([place.ne(0).any() for place in places]) if self._finds_unused and places else None
        dense = self._dense(buffer, whole, scale, used)
        exchange = self._compressor.exchange(pieces, self._place()) if pieces else None
        summed, reduced = yield from _both(dense, exchange)
        self._write(whole, summed)
        used_by_any = None if used is None or summed is None else summed[-len(places) :] > 0
        for index, (piece, place, found) in enumerate(zip(pieces, places, reduced, strict=True)):
            mean, left = (found.mean if scale is None else found.mean * scale), found.left
            if used_by_any is not None:  # DDP leaves the gradient of what nobody has used as it was: nothing is sent
                before = feedback.flat(piece.name)
                assert before is not None
                mean = torch.where(used_by_any[index], mean, torch.zeros_like(mean))
                left = torch.where(used_by_any[index], left, before)
            place.copy_(mean)
            feedback.keep(piece.name, left, found.basis)
        self._see(buffer)

    def _place(self) -> ExchangePlace:
        return ExchangePlace(self._session.rank, self._session.world_size, self.feedback.step, self._seed)

    def _cut(self, bucket: dist.GradBucket) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """The bucket's parameters, each with its gradient as it lies in the buffer."""
        buffer, parameters = bucket.buffer(), bucket.parameters()
        sizes = [p.numel() * p.itemsize // buffer.itemsize for p in parameters]  # complex ones come as pairs of numbers
        yield from zip(parameters, buffer.view(-1).split(sizes), strict=True)  # type: ignore[misc]

    def _dense(
        self,
        buffer: torch.Tensor,
        whole: list[tuple[str, torch.Tensor]],
        scale: torch.Tensor | None,
        used: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """This rank's part of what is sent whole, and which of the other gradients it has."""
        dtype, parts = torch.promote_types(buffer.dtype, torch.float32), []
        for name, gradient in whole:
            left, value = self.feedback.flat(name), gradient.to(dtype)
            if left is not None:  # of a run in which it was not sent whole
                value = value + (left if scale is None else left * scale)
                self.feedback.keep(name, torch.zeros_like(left))
            parts.append(value / self._session.world_size)
        if used is not None:
            parts.append(used.to(dtype))
        return torch.cat(parts) if parts else None

    def _write(self, whole: list[tuple[str, torch.Tensor]], summed: torch.Tensor | None) -> None:
        start = 0
        for _, gradient in whole:
            assert summed is not None
            gradient.copy_(summed[start : start + gradient.numel()])
            start += gradient.numel()


class _Flight:
    """The rounds of a bucket, of which one is under way."""

    def __init__(self, session: Session, rounds: Rounds, done: Callable[[], None]) -> None:
        self._session, self._generator, self._done = session, rounds, done
        self.rounds = 0  # begun
        self._begun: list[tuple[dist.Work | None, torch.Tensor]] | None = []
        self._begin(next(rounds))

    def advance(self) -> bool:
        """Wait for this round and begin the next; False: there is none."""
        if self._begun is None:
            return False
        with self._session.named(_NAME):
            for work, _ in self._begun:
                if work is not None:
                    work.wait()
        try:
            self._begin(self._generator.send(tuple(result for _, result in self._begun)))
        except StopIteration:
            self._begun = None
            self._done()
            return False
        return True

    def _begin(self, requests: tuple[Request, ...]) -> None:
        self.rounds += 1
        self._begun = [_send(self._session, request) for request in requests]


def _send(session: Session, request: Request) -> tuple[dist.Work | None, torch.Tensor]:
    """Begin a collective; its result is whole once it has been waited for."""
    sent = request.tensor
    with session.named(_NAME):
        if isinstance(request, Sum):
            return dist.all_reduce(sent, async_op=True), sent
        if isinstance(request, Gather):
            rows = sent.new_empty(session.world_size, *sent.shape)
            return dist.all_gather(list(rows.unbind(0)), sent, async_op=True), rows
        found = torch.empty_like(sent)
        return dist.all_to_all_single(found, sent, async_op=True), found


def _both(
    dense: torch.Tensor | None, exchange: Exchange | None
) -> Generator[tuple[Request, ...], tuple[torch.Tensor, ...], tuple[torch.Tensor | None, list[Reduced]]]:
    """An exchange, with an all-reduce beside its first round."""
    if exchange is None:
        assert dense is not None, "a bucket has parameters"
        (summed,) = yield (Sum(dense),)
        return summed, []
    request = next(exchange)
    *others, result = yield ((request,) if dense is None else (Sum(dense), request))
    while True:
        try:
            request = exchange.send(result)
        except StopIteration as done:
            return (others[0] if others else None), done.value
        (result,) = yield (request,)


def _nothing_or_nan(numbers: torch.Tensor) -> torch.Tensor:
    """0, or NaN where a number is not finite, in one pass and without waiting for a device."""
    return (numbers * 0).sum()
