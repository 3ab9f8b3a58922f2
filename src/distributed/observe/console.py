"""Console: a run as a person sees it: a start, a bar or a line now and then, and a summary, for any number of ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import TextIO

from distributed.core.events import (
    AttemptEnded,
    EpochEnded,
    EpochStarted,
    EvaluationEnded,
    Event,
    RankFailed,
    RankSlow,
    RankStalled,
    Recovered,
    ResumeCompared,
    RunEnded,
    RunReported,
    RunStarted,
    RunStopped,
    StepEnded,
    Warned,
)
from distributed.core.history import validation_name
from distributed.core.plan import ENDLESS
from distributed.observe.screens import Screen, Snapshot, screen_for

PACE_KNOWN_S = 0.5  # before that, a forecast says nothing
DRAW_INTERVAL_S = 0.25
LINE_INTERVAL_S = 2.0  # between two step lines where there is no bar


class Console:
    """Shows a run's events on a terminal, in a notebook or as plain lines; `enabled=False` shows the ranks' lines only.

    >>> import sys
    >>> console = Console(sys.stdout)
    >>> console.rank_line(3, "loading data")
    [r3] loading data
    """

    def __init__(
        self, stream: TextIO | None = None, enabled: bool = True, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._enabled = enabled
        self._clock = clock
        self._screen: Screen | None = screen_for(stream, bar=enabled)
        self._lock = threading.RLock()  # ranks' lines may come from a thread that reads their logs
        self._run: RunStarted | None = None
        self._printed: set[str] = set()  # decisions that were printed
        self._reset()

    def _reset(self) -> None:
        self._epoch = self._step = self._pace_step = 0
        self._values: dict[str, float] = {}
        self._hidden: list[tuple[float, float]] = []  # of steps that tell: the part of communication, and its seconds
        self._started = self._pace_from = self._clock()
        self._drawn = self._lined = float("-inf")

    def on(self, event: Event) -> None:
        if self._enabled:
            with self._lock:
                self._show(event)

    def progress(self, step: int | None) -> None:
        """The ranks have done `step` steps; None when that is not known, and only the time changes."""
        with self._lock:
            if self._run is not None:
                self._step = max(self._step, step or 0)
                self._draw()

    def rank_line(self, rank: int, text: str) -> None:
        """Print what a rank printed, each line with its rank."""
        with self._lock:
            for line in text.rstrip("\n").split("\n"):
                self._line(line.rstrip("\r").rpartition("\r")[2], f"[r{rank}] ")

    def unfinished_lines(self, lines: Mapping[int, str]) -> None:
        """Show lines of ranks that may still change, below all others, on a terminal."""
        with self._lock:
            self._call(lambda screen: screen.draw_ranks(lines))

    def close(self) -> None:
        with self._lock:
            self._run = None
            self._call(lambda screen: screen.close())

    def _show(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._start(event)
            case EpochStarted():
                self._epoch = event.epoch
            case StepEnded():
                self._epoch, self._step = event.epoch, max(self._step, event.step)
                self._values |= {"loss": event.loss, **event.metrics, "samples/s": event.samples_per_second}
                if event.communication_hidden is not None and event.communication_seconds is not None:
                    self._hidden.append((event.communication_hidden, event.communication_seconds))
                self._step_line()
            case EvaluationEnded():
                found = {validation_name(name): value for name, value in event.metrics.items()}
                self._values |= found
                if event.within_epoch:  # else the line of the epoch has them
                    self._line("  ".join([self._label(), f"step {event.step}", *_facts(found), _span(event.seconds)]))
                self._draw()
            case EpochEnded():
                self._epoch, self._step = event.epoch, max(self._step, event.step)
                self._values |= event.metrics | {"samples/s": event.samples_per_second}
                facts = [*_facts(event.metrics), _rate(event.samples_per_second), _span(event.seconds)]
                self._line("  ".join([self._label(), *facts]))
                self._draw(now=True)
            case ResumeCompared() | RunStopped():
                self._line(event.text)
            case Warned():
                self._line(f"warning: {event.message}")
            case RankFailed():
                self._line(f"rank {event.rank} on {event.host} failed: {event.message}  (log: {event.log_path})")
            case RankStalled() | RankSlow() | AttemptEnded() | Recovered():
                self._line(_describe(event))
            case RunReported():
                for line in event.text.splitlines():
                    self._line(line)
            case RunEnded():
                self._end(event)

    def _start(self, event: RunStarted) -> None:
        if self._run is None:
            self._reset()
            ranks = f"{event.world_size} rank{'s' * (event.world_size > 1)}"
            self._line(f"{event.backend} on {ranks}, device {event.device}, global batch {event.global_batch}")
            self._line(f"run directory {event.run_dir}")
        else:
            self._line(f"started again at step {event.first_step} on {event.world_size} ranks")
        for decision in event.decisions:
            if decision not in self._printed:
                self._line(f"  {decision}")
        self._printed.update(event.decisions)
        self._run = event
        self._step = self._pace_step = event.first_step
        self._pace_from = self._clock()
        self._draw(now=True)

    def _end(self, event: RunEnded) -> None:
        values = {name: value for name, value in self._values.items() if name != "samples/s"} | event.metrics
        run_dir = self._run.run_dir if self._run is not None else ""
        self._step = event.step
        self._draw(now=True)
        self._call(lambda screen: screen.close())
        steps = event.step - (self._run.first_step if self._run is not None else 0)
        head = f"interrupted at step {event.step}" if event.status == "interrupted" else f"done: {steps} steps"
        self._line(f"{head} in {_span(event.seconds)}, {_rate(event.samples_per_second)}")
        if values:
            self._line("  " + "  ".join(_facts(values)))
        if self._hidden:
            hidden, seconds = (median(column) for column in zip(*self._hidden, strict=True))
            share = f"{1e3 * seconds:.1f} ms a step by itself, {100 * hidden:.0f} % of it behind backward passes"
            self._line(f"  communication {share} (median of {len(self._hidden)} logged)")
        for name, path in (("run", run_dir), ("model", event.model_path)):
            if path:
                self._line(f"  {name:5}  {path}")
        self._run = None

    def _step_line(self) -> None:
        """Where there is a bar it shows the step; else a line does, at a modest rate."""
        now = self._clock()
        if self._has_bar():
            self._draw()
        elif now - self._lined >= LINE_INTERVAL_S:
            self._lined = now
            snapshot = self._snapshot()
            self._line("  ".join([snapshot.label, f"step {snapshot.count}", *snapshot.facts]))

    def _has_bar(self) -> bool:
        return self._screen is not None and self._screen.has_bar

    def _draw(self, now: bool = False) -> None:
        if self._run is not None and (now or self._clock() - self._drawn >= DRAW_INTERVAL_S):
            self._drawn = self._clock()
            self._call(lambda screen: screen.draw(self._snapshot()))

    def _snapshot(self) -> Snapshot:
        total = self._run.total_steps if self._run is not None else None
        facts = _headline(self._values)
        remaining_s = self._remaining_s(total)
        facts += [f"eta {_span(remaining_s)}"] if remaining_s is not None else []
        if "samples/s" in self._values:
            facts.append(_rate(self._values["samples/s"], unit="/s" if self._has_bar() else " samples/s"))
        facts += [_span(self._clock() - self._started)]
        return Snapshot(self._label(), self._step, total, tuple(facts))

    def _remaining_s(self, total: int | None) -> float | None:
        steps = self._step - self._pace_step
        seconds = self._clock() - self._pace_from
        if total is None or steps <= 0 or self._step >= total or seconds < PACE_KNOWN_S:
            return None
        return (total - self._step) * seconds / steps

    def _label(self) -> str:
        epochs = f"/{self._run.epochs}" if self._run is not None and self._run.epochs < ENDLESS else ""
        return f"epoch {self._epoch + 1}{epochs}"

    def _line(self, text: str, prefix: str = "") -> None:
        self._call(lambda screen: screen.line(text, prefix))

    def _call(self, use: Callable[[Screen], None]) -> None:
        """A closed terminal or pipe ends the display, not the run."""
        if self._screen is not None:
            try:
                use(self._screen)
            except OSError:
                self._screen = None


_SLOW_BY = {"data": "most of it waiting for data", "compute": "most of it computing"}


def _describe(event: RankStalled | RankSlow | AttemptEnded | Recovered) -> str:
    """In one line what happened to a rank or to the world."""
    match event:
        case RankStalled():
            waiting = f"; ranks that wait for it: {', '.join(map(str, event.waiting))}" if event.waiting else ""
            waiting += f" in {event.collective}" if event.collective else ""
            stack = f"  (stack: {event.stack_path})" if event.stack_path else ""
            late = f"no step for {_span(event.late_seconds)}, which should take at most {_span(event.deadline_seconds)}"
            who = f"rank {event.rank} on {event.host} stands still after step {event.step}"
            return f"{who}: {event.where}; {late}{waiting}{stack}"
        case RankSlow(cause="communication"):
            times = f"{event.ratio:.1f} × as long as between the other ranks"
            return f"rank {event.rank} is slow: messages to and from it take {times}"
        case RankSlow():
            times = f"{event.ratio:.1f} × the median of the ranks in its last steps"
            return f"rank {event.rank} is slow: {times}, {_SLOW_BY.get(event.cause, event.cause)}"
        case AttemptEnded():
            who = f"rank {event.rank}" + f" on {event.host}" * bool(event.host) + ": " if event.rank >= 0 else ""
            at = f" after step {event.step}" if event.step >= 0 else ""
            return f"attempt {event.attempt} ended{at} ({event.cause}): {who}{event.message}"
        case Recovered():
            again = (
                f", {event.lost_steps} step{'s' * (event.lost_steps != 1)} to take again" if event.lost_steps else ""
            )
            ranks = f"{event.world_size} rank{'s' * (event.world_size != 1)}"
            where = f"from {event.source} at step {event.step}{again}"
            return f"recovered in {_span(event.seconds)} on {ranks}, {where}"


def _facts(values: dict[str, float]) -> list[str]:
    """Named values as text: accuracies first, those of validation before those of training."""
    order = ("val_accuracy", "accuracy", "val_loss", "loss")
    names = [name for name in order if name in values] + [name for name in values if name not in order]
    return [f"{name} {_number(values[name])}" for name in names]


def _headline(values: dict[str, float]) -> list[str]:
    """The two values that a bar has room for: the loss, and the accuracy or what else was measured."""
    measured = [name for name in values if name not in ("loss", "val_loss", "samples/s")]
    best: list[str] = [name for name in ("val_accuracy", "accuracy") if name in values]
    best += [name for name in measured if name.startswith("val_")] + ["val_loss"] * ("val_loss" in values) + measured
    return [f"{name} {_number(values[name])}" for name in ["loss", *best[:1]] if name in values]


def _number(value: float) -> str:
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.3e}"


def _rate(samples_per_second: float, unit: str = " samples/s") -> str:
    return f"{samples_per_second:,.{1 if samples_per_second < 100 else 0}f}{unit}"


def _span(seconds: float) -> str:
    """
    >>> _span(3.21), _span(75), _span(3700)
    ('3.2 s', '1:15', '1:01:40')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
