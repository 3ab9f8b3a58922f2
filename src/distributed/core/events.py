"""What happens in a run, as values. An observer receives them and returns nothing, so it cannot steer the run."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol, get_type_hints

from distributed.core.choices import Device, RunStatus
from distributed.core.secrets import mask, mask_text


@dataclass(frozen=True, kw_only=True)
class Event:
    """The root of all events; `time` is seconds since 1970, filled in by its sender."""

    time: float

    def to_json(self) -> str:
        """For files and pipes: secrets are masked."""
        content = {"event": type(self).__name__} | self.__dict__
        text = json.dumps(content, separators=(",", ":"))
        return text if mask_text(text) == text else json.dumps(mask(content), separators=(",", ":"))


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    run_dir: str
    world_size: int
    device: Device
    backend: str
    epochs: int
    steps_per_epoch: int | None  # None: a stream whose length is not known
    total_steps: int | None
    first_step: int = 0
    global_batch: int
    settings: dict[str, Any] = field(default_factory=dict)
    decisions: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class EpochStarted(Event):
    epoch: int
    step: int


@dataclass(frozen=True, kw_only=True)
class StepEnded(Event):
    """Emitted every `log_every_n_steps`: means over the steps since the last one, over all ranks."""

    step: int
    epoch: int
    loss: float
    learning_rate: float
    samples_per_second: float
    gradient_norm: float | None = None
    device_utilization: float | None = None  # percent
    communication_seconds: float | None = None  # that this step's gradients take over the ranks by themselves
    communication_hidden: float | None = None  # the part of that which its backward pass hid
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class EvaluationEnded(Event):
    step: int
    epoch: int
    seconds: float
    metrics: dict[str, float]  # of several validation sets, by names that begin with the set's
    within_epoch: bool = False  # whether steps of its epoch may follow


@dataclass(frozen=True, kw_only=True)
class EpochEnded(Event):
    epoch: int
    step: int
    seconds: float
    samples: int
    samples_per_second: float
    metrics: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    step: int
    path: str
    seconds: float
    stall_seconds: float = 0.0  # how long training stood still for it
    written_bytes: int = 0  # the rest was stored already
    total_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class ResumeCompared(Event):
    """The resume certificate: the first steps after a resume against those of the run that was not interrupted."""

    passed: bool | None  # None: no step was compared, and the text says why
    steps: int
    text: str
    component: str = ""


@dataclass(frozen=True, kw_only=True)
class Warned(Event):
    message: str


@dataclass(frozen=True, kw_only=True)
class RankFailed(Event):
    rank: int
    host: str
    message: str
    log_path: str


@dataclass(frozen=True, kw_only=True)
class RankStalled(Event):
    """A rank made no step within its deadline; reported by its launcher, with where it stands."""

    rank: int
    host: str
    step: int  # the last one that it finished
    where: str  # "train.py:31 in wait_for_data", "the collective 'validation metrics'", "stopped by SIGSTOP" …
    late_seconds: float  # since its last sign of life
    deadline_seconds: float
    waiting: list[int] = field(default_factory=list)  # the ranks that wait for it
    stack_path: str = ""
    collective: str = ""  # in which they wait, from torch's flight recorder for NCCL


@dataclass(frozen=True, kw_only=True)
class RankSlow(Event):
    """A rank stays slower than its peers."""

    rank: int
    step: int
    ratio: float  # its own time for a step, over the median of the ranks
    cause: str  # "data", "compute" or "communication"
    seconds: float  # its own time for a step


@dataclass(frozen=True, kw_only=True)
class AttemptEnded(Event):
    """The world broke, or is about to get other ranks; what is left of it continues in the next attempt."""

    attempt: int
    cause: str  # "machine", "code", "hang", "resize", "slow" or "unknown"
    message: str
    rank: int = -1  # -1: not one rank's doing
    host: str = ""
    step: int = -1  # the last one that was finished; -1: not known


@dataclass(frozen=True, kw_only=True)
class Recovered(Event):
    """The first step after the world broke."""

    attempt: int
    step: int  # of the state that it resumed from
    lost_steps: int  # steps that must be taken again
    source: str  # "memory of rank 1", a checkpoint's path, or "the beginning"
    seconds: float  # from the last step before the fault to the first one after it
    world_size: int


@dataclass(frozen=True, kw_only=True)
class RunReported(Event):
    """One report of all attempts."""

    attempts: int
    faults: dict[str, int]  # by cause
    seconds: float
    seconds_lost: float
    goodput: float | None  # the part of the time in which steps were taken that count; None: they are not known
    text: str


@dataclass(frozen=True, kw_only=True)
class RunStopped(Event):
    """The run ends before its last epoch or step, as a callback or a limit has asked; `RunEnded` follows."""

    step: int
    epoch: int  # that it stood in
    reason: str
    by: str  # the class of the callback, or the setting with its value
    rank: int  # the first that asked
    text: str  # the same in words


@dataclass(frozen=True, kw_only=True)
class RunEnded(Event):
    status: RunStatus
    step: int
    seconds: float
    samples_per_second: float
    metrics: dict[str, float] = field(default_factory=dict)
    model_path: str = ""


class Observer(Protocol):
    """Anything that wants to know what happened."""

    def on(self, event: Event) -> None: ...

    def close(self) -> None: ...


_KINDS: dict[str, type[Event]] = {kind.__name__: kind for kind in Event.__subclasses__()}


def parse_event(line: str) -> Event | None:
    """The event of one line of `events.jsonl`; None for a kind that this version does not know."""
    raw = json.loads(line)
    kind = _KINDS.get(raw.pop("event", ""))
    if kind is None:
        return None
    known = {f.name for f in fields(kind)}
    return kind(**{name: value for name, value in raw.items() if name in known})


class EventTail:
    """The events that are written to a file from now on, or `from_end=False`: all of them."""

    def __init__(self, path: Path, *, from_end: bool = True) -> None:
        self._path = path
        self._offset = path.stat().st_size if from_end and path.exists() else 0

    def read(self, kind: type[Event] | None = None) -> list[Event]:
        """Those of the complete lines that are new, or those of one kind, which is quick. A line that is torn or of
        another version is skipped: following a run must not end it."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            return []
        complete = new[: new.rfind(b"\n") + 1]
        self._offset += len(complete)
        name = kind.__name__.encode() if kind is not None else b""
        events = (_sound_event(line) for line in complete.splitlines() if name in line)
        return [event for event in events if isinstance(event, kind or Event)]


def _sound_event(line: bytes) -> Event | None:
    try:
        return parse_event(line.decode())
    except (ValueError, TypeError, AttributeError):
        return None


def event_kinds() -> dict[str, dict[str, Any]]:
    """Every event and the types of its fields, for the reference documentation."""
    return {name: get_type_hints(kind) for name, kind in _KINDS.items()}
