"""Step capture: the whole step as one CUDA graph, tried, compared with the eager step, and used where both agree.

On a small model the host launches kernels for longer than the device computes them. A graph launches all of them at
once. Every shape of a step has a graph of its own; a shape that is rare, like that of the last batch, has none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from distributed.core.plan import Plan
from distributed.data.loading.loader import Microbatch
from distributed.runtime.session import Session
from distributed.runtime.world import CollectiveError
from distributed.strategies.base import Capturable, StepOutput
from distributed.train.capture.agreement import Agreement
from distributed.train.capture.captured import CapturedStep, NotCapturable, forgotten_if_refused, refused_by_cuda
from distributed.train.capture.checks import Before, TensorUpdate, differs, hooks_of, watched
from distributed.train.capture.launch_times import LaunchTimes
from distributed.train.capture.places import Places
from distributed.train.capture.proofs import about_unseen, frozen
from distributed.train.capture.rates import Rates
from distributed.train.checks.reachable import Look, changes, look

_WARM = 3  # eager steps before the first capture; the libraries choose their kernels and the optimizer makes its state
_LOOKED_AT = 2  # steps of several ranks in which the strategy looks at values, to compare what the ranks did
_CHECKS = 2  # steps of each shape that are taken both ways
_ANEW = 3  # times that graphs are made again because Python's state was changed between two epochs
_SHAPES = 8  # graphs at most: each holds its activations
_OWN_GRAPHS = ("reduce-overhead", "max-autotune")  # modes of torch.compile that make CUDA graphs themselves

Warn = Callable[[str], None]


class StepCapture:
    """What the loop calls in place of a strategy's `train_step`."""

    def __init__(
        self, strategy: Capturable, plan: Plan, session: Session, warn: Warn, steps_done: Callable[[], int]
    ) -> None:
        self._strategy, self._device, self._warn, self._steps_done = strategy, session.device, warn, steps_done
        self._precision, self._is_asked = plan.precision.kind, plan.speed.capture == "on"
        self._graphs_of_world = session.graphs
        self._agreement = Agreement(plan.batch, session)
        self._unseen = 1 if self._agreement.is_alone else _LOOKED_AT
        self._warm = _WARM + self._unseen - 1
        self._steps = 0
        self._graphs: dict[Any, CapturedStep] = {}
        self._watched: set[Any] = set()
        self._checked: Counter[Any] = Counter()
        self._eager: set[Any] = set()  # shapes that stay eager
        self._rehearsed: dict[Any, Any] = {}  # a shape, and the same where it is measured, which has no graph yet
        self._is_reported = False
        self._known: Look | None = None  # what Python kept when the graphs were made
        self._places: Places | None = None  # where the model's tensors lay then
        self._anew = self._proven = 0  # times that all graphs were made again; the step after which all were proven
        self._stream = torch.cuda.Stream(self._device)
        self._pool = torch.cuda.graph_pool_handle()
        self._launches = LaunchTimes(self._device)
        self._rates = Rates(strategy.optimizer, self._device)
        self._broke: CollectiveError | None = None  # found after a step that counts
        self.why_not = ""
        if why := self._agreement.on(self._refused(plan)):
            self._refuse(why)

    def _refused(self, plan: Plan) -> str:
        if why := self._strategy.why_not_captured or self._agreement.refused():
            return why
        if plan.memory.compile_mode in _OWN_GRAPHS:
            return f"compile={plan.memory.compile_mode!r} makes graphs of its own"
        return self._rates.why_not

    def train_step(self, microbatches: Sequence[Microbatch], *, measure: bool = False) -> StepOutput:
        if self._broke is not None:
            raise self._broke
        if self.why_not:
            return self._as_written(microbatches, measure)
        agreement = self._agreement
        if measure and self._graphs and agreement.hears():
            return self._give_up(agreement.on(agreement.trouble), microbatches, measure)
        try:
            key = agreement.key(microbatches, measure)
        except NotCapturable as why:
            return self._give_up(str(why), microbatches, measure)
        captured = self._graphs.get(key)
        if captured is None or self._checked[key] < _CHECKS:
            return self._eager_step(key, microbatches, measure)
        if key in self._rehearsed:
            return self._rehearse(key, microbatches)
        proofs = captured.proofs
        if proofs.is_due:
            self.prove()
            return self.train_step(microbatches, measure=measure)
        proofs.replayed()
        if not self._rates.follow():
            agreement.cannot_replay(self._rates.changed)
            if agreement.is_alone:
                return self._give_up(agreement.trouble, microbatches, measure)
        if agreement.trouble:  # the others do not know of it yet
            return self._plain(microbatches, measure)
        clock = self._strategy.clock
        clock.begin(measure)
        output = captured.replay(microbatches)
        clock.mark()
        if measure:
            self._strategy.check_targets()
        return output

    def begin_epoch(self, epoch: int) -> None:
        """Before its first step."""
        self._agreement.begin_epoch(epoch)
        self.look_between()

    def look_between(self) -> None:
        """Code that ran between two steps may have changed the model's state: checked before a captured step."""
        if self._known is None or self.why_not:
            return
        found = changes(self._known, self._look())
        if whose := hooks_of(self._strategy.module, self._strategy.optimizer):
            found.append(f"{whose} would not be called")
        if why := self._agreement.on(next(iter(found), "")):
            self._begin_anew(why)

    def callbacks_ran(self) -> None:
        """Code of the user's ran between two steps: what it wrote to, the next graph reads, and nothing else."""
        if self._known is None or self._places is None or not (name := self._places.moved()):
            return
        why = f"a callback puts another tensor in the place of {name}"
        if self._agreement.is_alone:
            self._begin_anew(why)
        else:
            self._agreement.cannot_replay(why)

    def prove(self) -> None:
        """Take a step both ways that does not count, with each graph that was used since it last came to the same.

        Raises TaskError where that is not so: the steps since are not those of one process.
        """
        is_open = [key for key, captured in self._graphs.items() if captured.proofs.is_open]
        if not is_open:
            return
        if why := self._agreement.on("" if self._rates.follow() else self._rates.changed):
            self._refuse(why)
            return
        assert self._known is not None
        now = self._look()
        try:
            for key in is_open:
                self._prove(key, now)
        except NotCapturable as found:
            self._refuse(str(found))
            return
        except torch.OutOfMemoryError:  # of the eager step, beside the memory of the graphs
            if not self._agreement.is_alone:  # the others wait in a sum of this step
                raise
            self._strategy.forget_step()
            self._refuse(
                f"it could not be compared again for want of memory; it came to the same at step {self._proven}"
            )
            return
        self._proven = self._steps_done()
        if why := self._agreement.on(next(iter(changes(self._known, now)), "")):  # which made no difference so far
            self._begin_anew(why)

    def close(self) -> None:
        """The optimizer is as it was made; the graphs' memory is free."""
        self._graphs.clear()
        self._known = None
        self._rates.close()

    def _eager_step(self, key: Any, microbatches: Sequence[Microbatch], measure: bool) -> StepOutput:
        """A step as it is written; on the way towards a graph it is watched, timed, or taken both ways."""
        if key is None:  # of several ranks, some have fewer samples than in other steps
            return self._plain(microbatches, measure)
        self._steps += 1
        if key not in self._watched or self._steps <= self._warm:
            return self._first_steps(key, microbatches, measure)
        if key in self._eager or any(not micro.size for micro in microbatches):  # a stand-in, at an epoch's end
            return self._plain(microbatches, measure)
        if key not in self._graphs and len(self._graphs) >= _SHAPES:
            self._stay_eager(key, f"there are more than {_SHAPES} shapes of steps, and each graph holds its memory")
            return self._plain(microbatches, measure)
        if not self._graphs and not self._is_asked and (why := self._agreement.on(self._launches.nothing_to_gain)):
            return self._give_up(why, microbatches, measure)
        try:
            return self._both_ways(key, microbatches, measure)
        except NotCapturable as why:
            self._strategy.forget_step()
            self._graphs.pop(key, None)
            if not (measure and self._graphs):
                return self._give_up(str(why), microbatches, measure)
            self._stay_eager(key, f"where it is measured, {why}")
            return self._plain(microbatches, measure)

    def _rehearse(self, key: Any, microbatches: Sequence[Microbatch]) -> StepOutput:
        """A step without metrics, taken with them, so that the steps that are logged soon have their graph."""
        measured = self._rehearsed[key]
        output = self._eager_step(measured, microbatches, True)
        if self.why_not or measured in self._eager or self._checked[measured] >= _CHECKS:
            self._rehearsed.pop(key, None)
        return output

    def _first_steps(self, key: Any, microbatches: Sequence[Microbatch], measure: bool) -> StepOutput:
        """Of a run, or of a shape: one of them is watched for what no graph could repeat."""
        if self._steps <= self._unseen or key in self._watched:  # libraries are set up, blocks compiled
            return self._launches.timed(lambda: self._plain(microbatches, measure))
        self._watched.add(key)
        with watched(self._look) as found:
            output = self._plain(microbatches, measure, checks=False)
        if measure:
            self._strategy.check_targets()
        why = self._agreed_after_step(next(iter(found), ""))
        if why and measure:
            self._stay_eager(key, f"where it is measured, {why}")
        elif why:
            self._refuse(why)
        return output

    def _plain(self, microbatches: Sequence[Microbatch], measure: bool, *, checks: bool = True) -> StepOutput:
        """As written, on the stream that a graph is captured on, with the rates that it reads."""
        present = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(present)
        with torch.cuda.stream(self._stream), self._rates.on_device():
            self._strategy.clock.begin(False)
            output = self._strategy.step(microbatches, measure)
        present.wait_stream(self._stream)
        if measure and checks:
            self._strategy.check_targets()
        return output

    def _both_ways(self, key: Any, microbatches: Sequence[Microbatch], measure: bool) -> StepOutput:
        """The captured step, then the eager one from the same state, which is the one that counts."""
        before = self._made_ready(key, microbatches, measure)
        captured, made = self._replayed(self._graphs[key], microbatches, before)
        output = self._plain(microbatches, measure)
        found = self._agreed_after_step(differs(captured, made, output, before.changes(), self._precision))
        self._checked[key] += 1
        if self._broke is not None:
            return output
        if found:
            self._refuse(found)
        elif self._checked[key] == _CHECKS:
            self._verified(key, measure)
        return output

    def _agreed_after_step(self, why: str) -> str:
        """As all ranks agree. Where their world broke, the loop first counts the step, which the device may have taken,
        and hears of it at the next."""
        try:
            return self._agreement.on(why)
        except CollectiveError as failed:
            self._broke = failed
            return ""

    def _made_ready(self, key: Any, microbatches: Sequence[Microbatch], measure: bool) -> Before:
        """With a graph, and the state before the step; on all ranks, or NotCapturable is raised on all."""
        why = self._agreement.trouble
        try:
            if not why and not any(count >= _CHECKS for count in self._checked.values()):  # nothing is replayed yet
                self._look_between()
            before = Before(self._strategy, self._device)
            if not why and key not in self._graphs:
                self._graphs[key] = self._capture(microbatches, measure, before)
            if not self._rates.follow():
                why = self._rates.changed
        except NotCapturable as found:
            why = str(found)
        if why := self._agreement.on(why):
            raise NotCapturable(why)
        return before

    def _replayed(
        self, graph: CapturedStep, microbatches: Sequence[Microbatch], before: Before
    ) -> tuple[StepOutput, list[TensorUpdate]]:
        """What a graph makes of a step, which is then taken back."""
        try:
            return graph.replay(microbatches), before.changes()
        except RuntimeError as failed:  # of memory, mostly
            if not self._agreement.is_alone:  # the others wait in a sum of this step
                raise
            raise refused_by_cuda(failed) from failed
        finally:
            before.come_back()

    def _prove(self, key: Any, now: Look) -> None:
        """With the inputs that the graph had last. Nothing is left of it, but that Python ran it once more."""
        measure, graph, before = key[0], self._graphs[key], self._before()
        inputs = graph.last_inputs()
        captured, made = self._replayed(graph, inputs, before)
        again = None
        try:
            eager = self._plain(graph.last_inputs(), measure, checks=False)
            expected = before.changes()
            found = differs(captured, made, eager, expected, self._precision)
            if self._agreement.on(found):  # or is it that no two eager steps are the same?
                before.come_back()
                self._plain(inputs, measure, checks=False)
                again = before.changes()
        finally:
            before.come_back()
        if again is not None:
            found = differs(captured, made, eager, expected, self._precision, again=again)
        moved = changes(now, self._look())
        if why := self._agreement.on(found or next(iter(moved), "")):
            raise frozen(why, self._proven, self._steps_done())
        graph.proofs.passed()

    def _before(self) -> Before:
        """The state before a step that does not count, on all ranks, or NotCapturable is raised on all."""
        why = ""
        try:
            before = Before(self._strategy, self._device)
        except NotCapturable as found:
            why = str(found)
        if why := self._agreement.on(why):
            raise NotCapturable(why)
        return before

    def _look(self) -> Look:
        return look(self._strategy.parts(), self._strategy.changing())

    def _look_between(self) -> None:
        """A graph would not hear of what changes between two steps: a scheduler of the user's moves it, say."""
        now = self._look()
        if self._known is not None and (found := changes(self._known, now)):
            raise NotCapturable(f"between two steps, {found[0]}")
        if self._known is None:
            self._places = Places(self._strategy.module)
        self._known = now

    def _begin_anew(self, why: str) -> None:
        """The graphs are of a model that is no more."""
        self._anew += 1
        if self._anew > _ANEW:
            self._refuse(f"between its steps, again and again, {why}")
            return
        self._warn(f"the step is captured again: since it was, {why} [capture]")
        self._graphs.clear()
        self._rehearsed.clear()
        self._checked.clear()
        self._known = None
        self._agreement.forget()
        self._pool = torch.cuda.graph_pool_handle()  # a pool whose graphs are gone takes no more

    def _verified(self, key: Any, measure: bool) -> None:
        if not self._is_reported:
            self._is_reported = True
            self._proven = self._steps_done()
            self._warn("each step is one CUDA graph from here on: it came to the same as the eager one [capture]")
            if self._known is not None and self._known.unseen:
                self._warn(about_unseen(self._known.unseen))
        measured = True, *key[1:]
        if not measure and measured not in self._eager and self._checked[measured] < _CHECKS:
            self._rehearsed[key] = measured

    def _capture(self, microbatches: Sequence[Microbatch], measure: bool, before: Before) -> CapturedStep:
        if whose := hooks_of(self._strategy.module, self._strategy.optimizer):
            raise NotCapturable(f"{whose} would not be called")
        with forgotten_if_refused(self._strategy, self._device), self._rates.on_device():
            made = CapturedStep(
                self._strategy,
                microbatches,
                measure,
                device=self._device,
                pool=self._pool,
                stream=self._stream,
                graphs=self._graphs_of_world,
            )
        if before.moved(self._strategy):
            raise NotCapturable("a step puts its state into new tensors")
        return made

    def _give_up(self, why: str, microbatches: Sequence[Microbatch], measure: bool) -> StepOutput:
        self._refuse(why)
        return self._as_written(microbatches, measure)

    def _as_written(self, microbatches: Sequence[Microbatch], measure: bool) -> StepOutput:
        """With the rates where a graph would read them: whether a run is captured must not show in its bytes."""
        with self._rates.on_device():
            return self._strategy.train_step(microbatches, measure=measure)

    def _stay_eager(self, key: Any, why: str) -> None:
        if not self._eager:
            self._warn(f"some steps are not captured: {why} [capture]")
        self._eager.add(key)

    def _refuse(self, why: str) -> None:
        self.why_not = why
        self._graphs.clear()
        self._rehearsed.clear()
        self._strategy.stay_eager()
        self._warn(f"the step is not captured: {why} [capture]")
