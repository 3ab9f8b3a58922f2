"""Trial: the same training undisturbed and under faults, and what the difference is."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from distributed.chaos.disk import SmallDisk
from distributed.chaos.faults import KINDS, Harm, Scene
from distributed.chaos.hosts import Hosts, remove_leftovers
from distributed.chaos.report import ChaosReport, Injury
from distributed.chaos.runs import ChaosRun, Order
from distributed.chaos.schedule import Arrival, by_steps, by_time
from distributed.core.choices import ChaosKind
from distributed.core.errors import LaunchError, RankFailedError
from distributed.core.events import (
    AttemptEnded,
    CheckpointSaved,
    RankSlow,
    RankStalled,
    Recovered,
    RunEnded,
    RunReported,
    RunStarted,
    Warned,
)
from distributed.core.run_dir import RunDir

UNDISTURBED, DISTURBED = "undisturbed", "disturbed"
_OVER = object()
_LOOK_S = 0.02
_TIMEOUT_S = 90.0  # with a recovery, beyond the deadline of a step and the time of the whole undisturbed run
_ENDING_S = 60.0  # for all nodes to end after the training is done
_SHORTEST_HANG_S = 5.0
_STEPS_OF_HANG = 20  # a step may last that many times the mean of the undisturbed run
_ROOM_BYTES = 16 * 2**20


@dataclass(frozen=True)
class ChaosRequest:
    """What was asked and found sound."""

    order: Order
    base: Path
    kinds: tuple[ChaosKind, ...]
    save_every: int  # steps
    seed: int = 0
    mtbf_s: float = 15.0
    count: int | None = None  # faults, spread over the steps, in place of mtbf_s
    hang_timeout_s: float | None = None  # None: from the undisturbed run
    is_bitwise: bool = False
    tolerance: float | None = None


@dataclass
class ChaosScreen:
    """Receives the lines to show."""

    line: Callable[[str], None] = lambda text: None  # something happened
    now: Callable[[str], None] = lambda text: None  # how things are


def run_trial(request: ChaosRequest, screen: ChaosScreen) -> ChaosReport:
    """Both runs, and their comparison. Raises only when there is nothing to compare."""
    from distributed.chaos.verdict import (
        began_alike,
        compare_samples,
        compare_weights,
    )  # torch: `--help` must not wait for it

    request.base.mkdir(parents=True, exist_ok=True)
    if request.order.nodes > 1:
        remove_leftovers()
    with ExitStack() as stack:
        hosts = stack.enter_context(Hosts(request.order.nodes)) if request.order.nodes > 1 else None
        report = _run_undisturbed(request, hosts, screen)
        folders = [request.base / name for name in (UNDISTURBED, DISTURBED)]
        checkpoints = [RunDir(folder).checkpoints for folder in folders]
        disk = None
        if "diskfull" in request.kinds:
            stored = sum(path.stat().st_size for path in checkpoints[0].rglob("*") if path.is_file())
            disk = stack.enter_context(SmallDisk(checkpoints[1], 2 * stored + _ROOM_BYTES))
        deadline = request.hang_timeout_s
        if deadline is None:
            deadline = max(_SHORTEST_HANG_S, _STEPS_OF_HANG * report.step_s)
        more = _own(checkpoints[1]) | {"hang_timeout_s": f"{deadline:.3g}"}
        with ChaosRun(request.order, folders[1], more, hosts) as run:
            ranks, every = request.order.num_gpus, request.save_every
            scene = Scene(
                run.view,
                ranks=ranks,
                final_step=report.steps,
                step_s=report.step_s,
                checkpoints=checkpoints[1],
                save_every=every,
                disk=disk,
                hosts=hosts,
            )
            _Disturbance(run, scene, _schedule(request, report.steps), report, screen, deadline).until_it_ends()
        screen.now("comparing the two runs")
        report.samples = compare_samples(folders[0], folders[1]) if report.finished else None
        if report.finished and report.injuries:
            report.began_alike = began_alike(folders[0], folders[1], min(injury.step for injury in report.injuries))
        report.weights = compare_weights(checkpoints[0], checkpoints[1], report.steps) if report.finished else None
    return report


def _run_undisturbed(request: ChaosRequest, hosts: Hosts | None, screen: ChaosScreen) -> ChaosReport:
    run_dir, begun = request.base / UNDISTURBED, time.monotonic()
    with ChaosRun(request.order, run_dir, _own(RunDir(run_dir).checkpoints), hosts) as run:
        while not run.has_ended:
            run.view.refresh()
            screen.now(f"undisturbed: step {run.view.step}, {time.monotonic() - begun:.0f} s")
            time.sleep(5 * _LOOK_S)
        run.view.refresh()
        ended = [event for event in run.view.of(RunEnded) if event.status == "done"]
        if any(run.codes):
            raise RankFailedError(
                f"the script fails without any fault (exit code {next(filter(None, run.codes))})\n\n{run.tail()}\n",
                do=f"correct the script first; its log: {run.logs[0]}",
            )
        if not ended:
            raise LaunchError(
                f"{request.order.script} ended well, but no training was seen",
                why="faults are timed by the steps of a Trainer, and its checkpoints are compared",
                do="pass a script that calls the fit of one of this library's trainers",
            )
    seconds = time.monotonic() - begun
    screen.line(f"undisturbed: {ended[-1].step} steps in {seconds:.1f} s")
    return ChaosReport(
        script=request.order.script,
        seed=request.seed,
        steps=ended[-1].step,
        undisturbed_s=seconds,
        step_s=ended[-1].seconds / max(1, ended[-1].step),
        wanted=request.count,
        is_bitwise=request.is_bitwise,
        tolerance=request.tolerance,
    )


def _own(checkpoints: Path) -> dict[str, str]:
    return {"checkpoint_dir": str(checkpoints)}


def _schedule(request: ChaosRequest, steps: int) -> Iterator[Arrival]:
    if request.count is not None:
        return by_steps(request.kinds, request.count, steps, request.seed)
    return by_time(request.kinds, request.mtbf_s, request.seed)


@dataclass
class _Disturbance:
    """The disturbed run: one fault after another, each only once the last one was recovered."""

    run: ChaosRun
    scene: Scene
    schedule: Iterator[Arrival]
    report: ChaosReport
    screen: ChaosScreen
    deadline_s: float

    _begun: float = field(default_factory=time.monotonic)
    _next: Arrival | None = None
    _free_since: float = 0.0
    _act: Iterator[None] | None = None
    _harm: Harm = field(default_factory=Harm)
    _open: Injury | None = None
    _open_since: float = 0.0  # wall clock
    _act_over_at: float = 0.0  # wall clock
    _beyond: int = 0  # the step that must be passed before the fault is over
    _is_reported: bool = False

    def until_it_ends(self) -> None:
        view, report = self.scene.view, self.report
        self._free_since = time.monotonic()
        self._next = next(self.schedule, None)
        gave_up = ""
        try:
            while not self.run.has_ended and not gave_up:
                view.refresh()
                gave_up = self._look()
                self._show()
                time.sleep(_LOOK_S)
        finally:
            if self._act is not None:
                self._act.close()  # type: ignore[attr-defined]
        view.refresh()
        report.disturbed_s, report.reached = time.monotonic() - self._begun, view.reached
        codes, ended = self.run.codes, [event for event in view.of(RunEnded) if event.status == "done"]
        report.finished = not gave_up and not any(codes) and bool(ended)
        report.ending = gave_up or f"exit code {next((code for code in codes if code), 0)}\n{self.run.tail()}"
        report.attempts = view.attempt + 1
        reported = view.of(RunReported)
        reported_goodput = [ended.goodput for ended in reported if ended.goodput is not None]
        report.goodput_reported = max(reported_goodput, default=None)  # the node of rank 0 knows best
        sizes = {started.world_size for started in view.of(RunStarted)}
        sizes |= {recovered.world_size for recovered in view.of(Recovered)}
        report.was_resized = len(sizes) > 1
        if self._open is not None and report.finished:
            self._close(time.time(), "the run came to its end")

    def _look(self) -> str:
        """One look; why nothing more is to be hoped for, if so."""
        ended = [event.time for event in self.scene.view.of(RunEnded) if event.status == "done"]
        if ended and time.time() - ended[-1] > _ENDING_S:
            waiting = [number for number, code in enumerate(self.run.codes) if code is None]
            return f"the training was done, but {_ENDING_S:.0f} s later node {' and '.join(map(str, waiting))} was not"
        if self._act is not None:
            self._go_on()
        elif self._open is not None:
            return self._wait_for_recovery(self._open)
        elif self._next is not None and self._is_due(self._next):
            self._begin(self._next)
        return ""

    def _is_due(self, arrival: Arrival) -> bool:
        view = self.scene.view
        if not view.is_training or view.step >= self.scene.final_step or view.step < view.reached:
            return False
        if arrival.at_step:
            is_time = view.step >= arrival.at_step
        else:
            is_time = time.monotonic() - self._free_since >= arrival.after_s
        return is_time and KINDS[arrival.kind].is_possible(self.scene)

    def _begin(self, arrival: Arrival) -> None:
        view = self.scene.view
        self._harm, self._is_reported = Harm(), False
        self._open = Injury(arrival.kind, time.monotonic() - self._begun, view.reached, view.attempt)
        self._open_since, self._beyond = time.time(), view.reached
        self._act = KINDS[arrival.kind].act(self.scene, random.Random(arrival.seed), self._harm)
        self._go_on()

    def _go_on(self) -> None:
        """Let the fault do what it does until it is over."""
        assert self._act is not None
        assert self._open is not None
        is_over = next(self._act, _OVER) is _OVER
        injury, harm = self._open, self._harm
        if harm.text and not self._is_reported:
            self._is_reported, injury.text = True, harm.text
            self.report.injuries.append(injury)
            self.screen.line(f"step {injury.step}, {injury.time_s:.1f} s: {injury.kind}: {harm.text}")
        if not is_over:
            return
        self._act, self._act_over_at = None, time.time()
        if KINDS[injury.kind].breaks:
            return
        self._beyond = max(self._beyond, self.scene.view.reached)
        if harm.skipped:
            self._skip()

    def _wait_for_recovery(self, injury: Injury) -> str:
        view, kind = self.scene.view, KINDS[injury.kind]
        if self._harm.skipped:
            self._skip()
            return ""
        back = [event for event in view.of(Recovered, self._open_since) if event.attempt > injury.attempt]
        is_broken = any(ended.attempt >= view.attempt for ended in view.of(AttemptEnded, self._open_since))
        is_broken = is_broken or (bool(back) and back[-1].attempt < view.attempt)
        if view.is_training and view.step > self._beyond and not is_broken and (back or not kind.breaks):
            is_whole = not back or back[-1].world_size == self.scene.ranks  # a host that was cut off is back
            if is_whole and (injury.kind != "diskfull" or view.of(CheckpointSaved, self._act_over_at)):
                first = back[0 if injury.kind == "partition" else -1] if back else None
                self._close(first.time if first is not None else time.time(), "")
                return ""
        waited = time.time() - self._open_since
        if waited > _TIMEOUT_S + 2 * self.deadline_s + self.report.undisturbed_s:
            injury.wrong.append(f"not recovered within {waited:.0f} s")
            return f"it did not recover from {injury.kind} at step {injury.step}"
        return ""

    def _skip(self) -> None:
        """Nothing was done; the next one comes in its time."""
        assert self._open is not None
        self.report.skipped.append(f"{self._open.kind} at step {self._open.step}: {self._harm.skipped}")
        self._open, self._free_since, self._next = None, time.monotonic(), next(self.schedule, None)

    def _close(self, when: float, note: str) -> None:
        injury = self._open
        assert injury is not None
        injury.recovered_s = when - self._open_since
        injury.notes += [note] if note else []
        self._examine(injury)
        again = f", {injury.lost_steps} steps again" if injury.lost_steps else ""
        source = f" from {injury.source}" if injury.source else ""
        more = "; ".join([*injury.notes, *injury.wrong])
        self.screen.line(f"  back after {injury.recovered_s:.2f} s{source}{again}{f' ({more})' if more else ''}")
        self._open, self._free_since, self._next = None, time.monotonic(), next(self.schedule, None)

    def _examine(self, injury: Injury) -> None:
        """How the run handled the fault: which rank it named, what it resumed from."""
        view, since = self.scene.view, self._open_since
        back = view.of(Recovered, since)
        injury.broke = bool(view.of(AttemptEnded, since))
        injury.lost_steps = sum(event.lost_steps for event in back)
        injury.source = back[-1].source if back else ""
        for stall in view.of(RankStalled, since):
            injury.notes.append(
                f"rank {stall.rank} named after {stall.late_seconds:.1f} s of {stall.deadline_seconds:.1f} s:"
                f" {stall.where}"
            )
            if injury.kind == "hang" and stall.rank != self._harm.rank:
                injury.wrong.append(f"rank {stall.rank} was blamed for what rank {self._harm.rank} did")
        if injury.kind == "slow":
            injury.notes += [f"rank {e.rank} reported as {e.ratio:.1f} times slower" for e in view.of(RankSlow, since)]
            if view.of(AttemptEnded, since):
                injury.wrong.append("the world was broken because of a rank that was only slow")
        if injury.kind == "hang" and back and not view.of(RankStalled, since):
            injury.wrong.append("no rank was named")
        if injury.kind == "corrupt" and injury.source == self._harm.path:
            injury.wrong.append(f"the damaged {injury.source} was used")
        if injury.kind == "diskfull":
            failed = [event for event in view.of(Warned, since) if "continues without" in event.message]
            injury.notes.append(f"{len(failed)} saves failed" if failed else "no save was due")

    def _show(self) -> None:
        faults = ", ".join(f"{count} {kind}" for kind, count in self.report.by_kind.items()) or "none"
        view, seconds = self.scene.view, time.monotonic() - self._begun
        state = f"recovering from {self._open.kind}" if self._open is not None else "training"
        self.screen.now(f"{state}: step {view.step} of {self.scene.final_step}, {seconds:.0f} s, faults: {faults}")
