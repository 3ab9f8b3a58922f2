"""AutoCompression: measures a run's first steps, takes the kind of compression that pays, or none, and stops it again.

    measuring ── nothing pays ──────────────────────────────> whole (DDP by itself, for good)
        │                                                       ^
        └─ a kind pays ─> compressed ─ the loss rises, or ─> flushing: all that is left
                                       steps are no shorter     is sent with whole gradients

Ranks change over after the same step: they agree on the times, then each makes the same choice. What was chosen after
which step is written down (`SwitchRecord`), and each checkpoint has where the run stands. So a run that resumes takes
what was chosen after the steps that it repeats, and measures only what was not chosen yet.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from distributed.comm.compression.choice import MARGIN, STEPS_NEEDED, MeasuredSteps, choose
from distributed.comm.compression.feedback import FEEDBACK, ErrorFeedback, row_box
from distributed.comm.compression.loss_watch import WINDOW, LossWatch
from distributed.comm.compression.prediction import BucketCost, GradientLink
from distributed.core.plan import Decision
from distributed.core.plan_parts.compression import CompressionPlan
from distributed.runtime.session import Session
from distributed.runtime.tensor_shard import Box, TensorShard
from distributed.strategies.base import StepOutput
from distributed.strategies.data_parallel.auto.measured_gradients import MeasuredGradients, medians
from distributed.strategies.data_parallel.auto.switch_record import KindSwitch, SwitchRecord
from distributed.strategies.data_parallel.compressed_gradients import CompressedGradients, FedBackGradients
from distributed.strategies.data_parallel.step_compression import StepCompression, Stepped

Stage = Literal["measuring", "compressed", "flushing", "whole"]
Take = TypeVar("Take", bound=Callable[..., StepOutput])

_WARM_UP, _OVERLAPPED = 2, 3  # first steps, which allocate; steps as they are
_ALONE = _WARM_UP + _OVERLAPPED  # the number of the first of two steps whose collectives are alone
_TRIED = _ALONE + 1  # that of the step before the first one in which a kind is tried
_SETTLING, _TIMED = 2, 9  # steps with a kind: first ones, and those that are compared with what was predicted
_AGREED = "times of compression='auto'"


def choosing_of(strategy: object) -> AutoCompression | None:
    """None: steps measure nothing of compression."""
    found: AutoCompression | None = getattr(strategy, "choosing", None)
    return found


class AutoCompression(StepCompression):
    """Compression that knows when to stay off."""

    _fed_back: FedBackGradients | None

    def __init__(
        self,
        plan: CompressionPlan,
        session: Session,
        *,
        record: SwitchRecord,
        kinds: Sequence[str],
        make: Callable[[CompressionPlan], CompressedGradients],
        ranks: int,
        stepped: Stepped,
    ) -> None:
        """`kinds`: what may be taken. `make`: the reducer of one; "none" sends all that is left."""
        self._measuring = MeasuredGradients(session)
        super().__init__(self._measuring, session, ranks=ranks, stepped=stepped)
        self._plan, self._kinds, self._make = plan, kinds, make
        self._record = record
        self._module: nn.Module | None = None
        self.stage: Stage = "measuring"
        self.kind, self._steps = "none", 0
        self._is_timed = False  # whether steps with the kind have been compared with what was predicted
        self._whole_s = 0.0
        self._watch, self._losses = LossWatch(), list[torch.Tensor | float]()
        self._number = -1  # of the step since something changed
        self._began_at, self._took = 0.0, list[float]()
        self._measured: MeasuredSteps | None = None
        self._ready: list[tuple[float, ...]] = []
        self._reduced: list[float] = []
        self._links: list[GradientLink] = []
        self._costs: dict[str, tuple[BucketCost, ...]] = {}
        self._tell: Callable[[str], None] = lambda text: None
        self._send_whole: Callable[[], None] = lambda: None

    keeps = True  # it may come to: a lost rank sends all back to the checkpoint

    weighs = True  # and so may be the weights of losses needed

    @property
    def is_on(self) -> bool:
        """Whether DDP's buckets come here."""
        return self.stage != "whole"

    def attach(self, model: nn.Module) -> None:
        if self.is_on:
            super().attach(model)

    def follow(self, module: nn.Module) -> None:
        self._module = module
        super().follow(module)
        self._begin_again()  # the buckets may be other ones

    def decisions(self) -> list[Decision]:
        return []

    def begin(self, module: nn.Module) -> None:
        """Every rank calls it once, before the first step."""
        self._record.begin(module)

    def tell_by(self, tell: Callable[[str], None], put: Callable[[int, str, bytes], None] | None = None) -> None:
        """From now on, report choices so, and write them down so for who resumes from the checkpoint of a step."""
        self._tell = tell
        self._record.write_by(tell, put)

    def resumed(self, step: int, read: Callable[[str], bytes | None]) -> None:
        """The state that was loaded is that of the checkpoint of a step; `read`: what lies beside it, by name."""
        if self._will_choose:
            self._record.resumed(step, read)

    def saved(self, step: int) -> None:
        """A checkpoint holds the state after this step."""
        if self._will_choose:
            self._record.saved(step)

    @property
    def _will_choose(self) -> bool:
        """By clocks."""
        measures = self.stage == "measuring" or (self.stage == "flushing" and self._then == "measuring")
        return measures or (self.stage == "compressed" and not self._is_timed)

    def watching(self, take: Take, send_whole: Callable[[], None]) -> Take:
        """A step, and what follows from it. `send_whole` is called when compression is over for good."""
        self._send_whole = send_whole

        def take_watched(*args: Any, **kwargs: Any) -> StepOutput:
            self._step_begins()
            output = take(*args, **kwargs)
            self._step_ended(output.loss)
            return output

        return take_watched  # type: ignore[return-value]

    def _step_begins(self) -> None:
        now = self._now()
        if self._number >= 0:
            self._took.append(now - self._began_at)
        self._began_at, self._number = now, self._number + 1
        if self.stage == "measuring":
            self._measuring.step_begins()

    def _now(self) -> float:
        if self._session.device.type == "cuda" and (self.stage == "measuring" or not self._is_timed):
            torch.cuda.synchronize(self._session.device)
        return perf_counter()

    def _step_ended(self, loss: torch.Tensor | float) -> None:
        self._steps += 1
        self._losses.append(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        if self.stage == "flushing":
            if self._fed_back is None or self._fed_back.feedback.step > self._flushed_from:
                self._end()
            return
        suffers = self._look_at_losses() if self.stage == "compressed" else ""
        switches = self._record.switches
        chosen = next((switch for switch in switches if switch.step == self._steps), None)
        if chosen is not None:  # by an earlier attempt
            self._apply(chosen)
        elif switches and switches[-1].step > self._steps:
            return
        elif suffers:
            self._switch("none", suffers)
        elif self.stage == "measuring":
            self._measure()
        elif not self._is_timed and self._number == _SETTLING + _TIMED:
            self._compare_times()

    def _measure(self) -> None:
        """What the step that has ended was for, and what the next one is."""
        measuring, number = self._measuring, self._number
        measuring.is_alone = _ALONE <= number + 1 <= _TRIED
        if _WARM_UP <= number < _ALONE:
            self._ready.append(measuring.ready_s())
            self._reduced.append(measuring.reduced_s())
        elif _ALONE <= number <= _TRIED:
            self._links.append(measuring.link())
            if number == _TRIED:
                self._look_at_link()
        elif number > _TRIED:
            self._costs[self._kinds[number - _TRIED - 1]] = measuring.tried()
        if number < _TRIED or self.stage != "measuring":
            return
        if number - _TRIED < len(self._kinds):
            with contextlib.suppress(torch.OutOfMemoryError):
                measuring.trial = self._made(self._kinds[number - _TRIED], ErrorFeedback())
        else:
            self._choose_of_tried()

    def _choose_of_tried(self) -> None:
        """Of the kinds for which every rank has memory."""
        assert self._measured is not None
        lacks = torch.tensor([not costs for costs in self._costs.values()], dtype=torch.float64)
        lacking: list[float] = self._session.max(_AGREED, lacks.to(self._session.device)).tolist()
        kinds = {kind: costs for (kind, costs), lack in zip(self._costs.items(), lacking, strict=True) if not lack}
        self._measured = self._agree(replace(self._measured, kinds=kinds))
        self._choose()

    def _look_at_link(self) -> None:
        """Nothing has to be tried, if steps do not wait for the link."""
        measuring = self._measuring
        step_s = median(self._took[_WARM_UP:_ALONE])
        link = max(self._links, key=lambda link: link.bytes_per_s)  # what else the machine does only slows it down
        found = MeasuredSteps(step_s, median(self._reduced), medians(self._ready), measuring.whole(), link)
        self._measured = self._agree(found).calibrated()
        if not self._measured.can_gain:
            self._choose()

    def _agree(self, measured: MeasuredSteps) -> MeasuredSteps:
        """The times of the slowest rank."""
        times = torch.tensor(measured.times(), dtype=torch.float64, device=self._session.device)
        return measured.at(self._session.max(_AGREED, times).tolist())

    def _choose(self) -> None:
        assert self._measured is not None
        kind, reason = choose(self._measured)
        self._whole_s = self._measured.step_s
        self._switch(kind, reason)

    def _compare_times(self) -> None:
        """Whether steps are as much shorter as they have to be."""
        took = torch.tensor([median(self._took[-_TIMED:])], dtype=torch.float64, device=self._session.device)
        took_s = float(self._session.max(_AGREED, took))
        if self._whole_s and took_s * STEPS_NEEDED[self.kind] > (1 - MARGIN / 2) * self._whole_s:
            self._switch("none", f"a step takes {took_s:.3g} s with {self.kind}, and {self._whole_s:.3g} s without")
        else:
            self._switch(self.kind, "")

    def _look_at_losses(self) -> str:
        """At the end of a window: why training suffers, or ""."""
        return self._watch.add(self._agreed_losses()) if len(self._losses) >= WINDOW else ""

    def _agreed_losses(self) -> list[float]:
        """Of the last steps, those of the whole batches; none is kept."""
        found, self._losses = self._own_losses(), []
        whole: list[float] = self._session.sum("losses of a window", found).tolist()
        return [loss / self._ranks for loss in whole]

    def _own_losses(self) -> torch.Tensor:
        """Those of the window so far; of a run that was resumed, the first ones are numbers."""
        device = self._session.device
        return torch.stack([torch.as_tensor(loss, dtype=torch.float64, device=device) for loss in self._losses])

    def _switch(self, kind: str, reason: str) -> None:
        """A choice of this attempt, which all ranks make after this step."""
        chosen = KindSwitch(self._steps, kind, reason, self._whole_s)
        self._record.add(chosen)
        self._apply(chosen)

    def _apply(self, chosen: KindSwitch) -> None:
        self._change(chosen)
        if not self._will_choose:
            self._record.close()

    def _change(self, chosen: KindSwitch) -> None:
        self._whole_s = chosen.whole_s
        if chosen.kind == self.kind and self.stage == "compressed":
            self._is_timed = True
            return
        is_first, was = self.stage == "measuring", self.kind
        if chosen.kind != "none":
            self._watch.add(self._agreed_losses())  # the window of whole gradients, with which others are compared
            self._take(chosen.kind)
            what = f"takes {chosen.kind} after step {self._steps}"
        elif is_first:
            what = f"sends whole gradients after step {self._steps}"
            self._end()
        else:
            what = f"ends {was} after step {self._steps}"
            self._send_left("whole")
        self._tell(str(Decision(f"compression='auto' {what}", chosen.reason, "compression")))

    def _take(self, kind: str) -> None:
        self.stage, self.kind, self._is_timed = "compressed", kind, False
        before = self._fed_back.feedback if self._fed_back is not None else ErrorFeedback()
        self._reduce_by(self._made(kind, before))
        self._begin_again()

    def _made(self, kind: str, feedback: ErrorFeedback) -> CompressedGradients:
        reducer = self._make(replace(self._plan, kind=kind))  # type: ignore[arg-type]  # one of the kinds
        if isinstance(reducer, FedBackGradients):
            reducer.feedback = feedback
            assert self._module is not None
            reducer.follow(self._module)
        return reducer

    def _reduce_by(self, reducer: CompressedGradients) -> None:
        self._reducer = reducer
        self._fed_back = reducer if isinstance(reducer, FedBackGradients) else None

    def _send_left(self, then: Stage) -> None:
        """Send what is left with the next step's whole gradients."""
        self._then: Stage = then
        if self._fed_back is None:
            self._end()
            return
        self.stage, self._flushed_from = "flushing", self._fed_back.feedback.step
        self._reduce_by(self._made("none", self._fed_back.feedback))

    def _end(self) -> None:
        """Nothing is left: measure, or let DDP reduce by itself."""
        self.kind = "none"
        self._reduce_by(self._measuring)
        if self.stage == "flushing" and self._then == "measuring":
            self.stage = "measuring"
            self._begin_again()
            return
        self.stage = "whole"
        self._losses = []
        self._send_whole()

    def _begin_again(self) -> None:
        """Count steps from here."""
        self._number, self._took, self._ready, self._reduced = -1, [], [], []
        self._links, self._costs = [], {}
        self._measuring.is_alone, self._measuring.trial = False, None

    def state(self) -> dict[str, Any]:
        session = self._session
        found = {"step": 0, "left": {}, "basis": {}} if self._fed_back is None else self._fed_back.state()
        auto = {
            "ranks": self._ranks,
            "stage": self.stage,
            "then": self._then if self.stage == "flushing" else "",
            "kind": self.kind,
            "began": self._record.began,
            "is_timed": self._is_timed,
            "whole_s": self._whole_s,
            "watch": self._watch.state(),
        }
        if self._losses:
            row = self._own_losses()[None]
            shape = (session.world_size, len(self._losses))
            found["losses"] = TensorShard(shape, row.dtype, ((row_box(session.rank, shape), row),))
        return {FEEDBACK: found | {"auto": auto}}

    def load(self, tree: Mapping[str, Any]) -> None:
        found: Mapping[str, Any] = tree.get(FEEDBACK, {})
        auto = found.get("auto", {"ranks": 0})  # a single rank has none
        self._steps, self._losses = tree.get("progress", {}).get("step", 0), []
        is_other = auto["ranks"] != self._ranks
        self._record.measures_from(self._steps if is_other else auto["began"])
        if is_other:  # what pays is another thing there, and so is what its ranks have left
            if found.get("left"):
                self._take_over("none", found)
                self._send_left("measuring")
            return
        self._watch.load(auto["watch"])
        self._is_timed, self._whole_s = auto["is_timed"], auto["whole_s"]
        if "losses" in found:
            rows = found["losses"]
            self._losses = (rows.pieces[0][1] if isinstance(rows, TensorShard) else rows)[0].tolist()
        if auto["stage"] == "compressed":
            self._take(auto["kind"])
            self._is_timed = auto["is_timed"]
            if self._fed_back is not None:
                self._fed_back.load(dict(found))
        elif auto["stage"] == "flushing":
            self._take_over(auto["kind"], found)
            self._send_left(auto["then"])
        elif auto["stage"] == "whole":
            self._end()
        if auto["stage"] != "measuring":
            how = f"goes on with {self.kind}" if self.kind != "none" else "goes on with whole gradients"
            self._tell(str(Decision(f"compression='auto' {how}", "this run has chosen it before", "compression")))

    def _take_over(self, kind: str, found: Mapping[str, Any]) -> None:
        """What is left of another kind, or of other ranks."""
        self.kind = kind
        reducer = self._made("none", ErrorFeedback())
        assert isinstance(reducer, FedBackGradients)
        reducer.load(dict(found))
        self._reduce_by(reducer)

    def shard_ranges(self, name: str, shape: tuple[int, ...]) -> tuple[Box, ...] | None:
        if name == f"{FEEDBACK}/losses" and shape[0] == self._session.world_size:
            return (row_box(self._session.rank, shape),)
        return super().shard_ranges(name, shape)
