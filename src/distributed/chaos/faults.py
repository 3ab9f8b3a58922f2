"""The faults. Each is a generator: it does harm, says what it did, and is resumed at every look until it is over."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from distributed.chaos.disk import SmallDisk
from distributed.chaos.hosts import Hosts
from distributed.chaos.view import RunView
from distributed.core.choices import ChaosKind
from distributed.core.events import Warned
from distributed.core.protocol.heartbeat import Phase

_STOPPED_S, _RUNNING_S, _SLOW_S = 0.3, 0.1, 3.0
_CUT_S = (2.0, 15.0)  # some are over before the run notices, some are not
_NOTICED_S, _REJOIN_S = 4.0, 15.0  # a cut that ends a world; from its end until the host is back in the run
_FULL_AT_MOST_S = 20.0
_HELD_AT_MOST_S = 2.0  # for a rank to be stopped before its end


@dataclass
class Scene:
    """What a fault may use."""

    view: RunView
    ranks: int  # that the run should have
    final_step: int
    step_s: float  # of the undisturbed run
    checkpoints: Path
    save_every: int  # steps
    disk: SmallDisk | None = None
    hosts: Hosts | None = None


@dataclass
class Harm:
    """What was done."""

    text: str = ""
    rank: int = -1  # whose fault it must be found to be; -1: no rank's
    path: str = ""  # of the checkpoint that was damaged
    skipped: str = ""  # why nothing was done


Act = Callable[[Scene, random.Random, Harm], Iterator[None]]


@dataclass(frozen=True)
class Kind:
    act: Act
    breaks: bool = True  # whether the world must break, so that the run has to recover
    is_possible: Callable[[Scene], bool] = lambda scene: True  # else its time has not come yet


def kill(scene: Scene, numbers: random.Random, harm: Harm) -> Iterator[None]:
    ranks, draw = scene.view.ranks(), numbers.random()
    parents = scene.view.parents()
    if draw < 0.1 and parents:
        harm.text = "SIGKILL to the process that ranks are forked from"
        _signal(numbers.choice(parents), signal.SIGKILL)
        return
    if not ranks:
        harm.skipped = "no rank was running"
        return
    victims = numbers.sample(sorted(ranks), min(len(ranks), 2 if draw < 0.3 else 1))
    harm.text = f"SIGKILL to rank{'s' * (len(victims) > 1)} {' and '.join(map(str, victims))}"
    for rank in victims:
        _signal(ranks[rank], signal.SIGKILL)
    yield from ()


def hang(scene: Scene, numbers: random.Random, harm: Harm) -> Iterator[None]:
    """Stopped wherever it is: a rank that the kernel has halted has a deadline in every phase but the last."""
    ranks = scene.view.ranks()
    rank = numbers.choice(sorted(ranks)) if ranks else -1
    until = time.monotonic() + _HELD_AT_MOST_S
    while ranks and time.monotonic() < until:
        _signal(ranks[rank], signal.SIGSTOP)
        yield from _pause(0.02)  # until the kernel has stopped all of its threads
        beat = scene.view.beat(rank)
        if beat is not None and beat.phase is not Phase.ENDED and beat.step < scene.final_step:
            harm.text, harm.rank = f"SIGSTOP to rank {rank}, for good", rank
            return
        _signal(ranks[rank], signal.SIGCONT)
        yield from _pause(0.02)
    harm.skipped = "no rank could be stopped before its end"


def slow(scene: Scene, numbers: random.Random, harm: Harm) -> Iterator[None]:
    ranks = scene.view.ranks()
    if not ranks:
        harm.skipped = "no rank was running"
        return
    rank = numbers.choice(sorted(ranks))
    share = _RUNNING_S / (_RUNNING_S + _STOPPED_S)
    harm.text = f"rank {rank} runs {100 * share:.0f} % of the time, for {_SLOW_S:g} s"
    until = time.monotonic() + _SLOW_S
    try:
        while time.monotonic() < until:
            _signal(ranks[rank], signal.SIGSTOP)
            yield from _pause(_STOPPED_S)
            _signal(ranks[rank], signal.SIGCONT)
            yield from _pause(_RUNNING_S)
    finally:
        _signal(ranks[rank], signal.SIGCONT)


def corrupt(scene: Scene, numbers: random.Random, harm: Harm) -> Iterator[None]:
    """All ranks are stopped meanwhile, so that none saves another checkpoint before it ends."""
    ranks = scene.view.ranks()
    for process in ranks.values():
        _signal(process, signal.SIGSTOP)
    yield from _pause(0.05)
    target = damage_newest(scene.checkpoints, numbers) if ranks else None
    if target is None:
        for process in ranks.values():
            _signal(process, signal.SIGCONT)
        harm.skipped = "there were no two checkpoints"
        return
    damaged, harm.path = target
    harm.text = f"bytes of {damaged.relative_to(scene.checkpoints)} flipped, then SIGKILL to all ranks"
    for process in ranks.values():
        _signal(process, signal.SIGKILL)


def _has_two_checkpoints(scene: Scene) -> bool:
    return len(list(scene.checkpoints.glob("step-*/manifest.json"))) > 1


def damage_newest(checkpoints: Path, numbers: random.Random) -> tuple[Path, str] | None:
    """Flip bytes of the newest checkpoint, in a file that the one before does not need: the file and the checkpoint."""
    manifests = sorted(checkpoints.glob("step-*/manifest.json"))
    if len(manifests) < 2:
        return None
    newest, older = (_chunks(path) for path in (manifests[-1], manifests[-2]))
    own = sorted(newest - older)
    path = manifests[-1]
    if own and numbers.random() < 0.7:
        digest = numbers.choice(own)
        path = checkpoints / "chunks" / digest[:2] / digest
    with path.open("r+b") as file:
        data = bytearray(file.read())
        for at in {numbers.randrange(len(data)) for _ in range(3)}:
            data[at] ^= 0x55
        file.seek(0)
        file.write(data)
    return path, str(manifests[-1].parent)


def diskfull(scene: Scene, numbers: random.Random, harm: Harm) -> Iterator[None]:
    """Until a save has failed. The last save of a run must not: it has nowhere to go."""
    assert scene.disk is not None
    if scene.final_step - scene.view.step < 3 * scene.save_every:
        harm.skipped = "too near the end of the run, whose last save must be written"
        return
    harm.text = "the disk of the checkpoints is full until a save fails"
    begun, until = time.time(), time.monotonic() + _FULL_AT_MOST_S
    try:
        while time.monotonic() < until and scene.view.is_alive:
            scene.disk.fill()
            if scene.view.of(Warned, since=begun) or scene.final_step - scene.view.step <= scene.save_every:
                return
            yield
    finally:
        scene.disk.free()


def partition(scene: Scene, numbers: random.Random, harm: Harm) -> Iterator[None]:
    """The rendezvous is on host 0, which therefore stays."""
    assert scene.hosts is not None
    number = numbers.randrange(1, len(scene.hosts))
    seconds = numbers.choice(_CUT_S)
    if seconds > _NOTICED_S and (scene.final_step - scene.view.step) * scene.step_s < seconds + _REJOIN_S:
        harm.skipped = "too near the end of the run, which would be over before the host is back"
        return
    harm.text = f"host {scene.hosts[number].name} is cut off for {seconds:g} s"
    scene.hosts.cut(number)
    try:
        yield from _pause(seconds)
    finally:
        scene.hosts.heal(number)


KINDS: dict[ChaosKind, Kind] = {
    "kill": Kind(kill),
    "hang": Kind(hang),
    "slow": Kind(slow, breaks=False),
    "partition": Kind(partition, breaks=False),
    "corrupt": Kind(corrupt, is_possible=_has_two_checkpoints),
    "diskfull": Kind(diskfull, breaks=False),
}


def _chunks(manifest: Path) -> set[str]:
    try:
        document: Any = json.loads(manifest.read_text())
        return set(document["chunks"])
    except (ValueError, KeyError, OSError):  # damaged before, or just removed
        return set()


def _pause(seconds: float) -> Iterator[None]:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        yield


def _signal(process: psutil.Process, number: int) -> None:
    """It may have ended; a process that has its number since is not signalled."""
    with suppress(psutil.NoSuchProcess, PermissionError, OSError):
        process.send_signal(number)
