"""The event log and those who follow it, also over attempts, half lines and a crash."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

from distributed.core.events import CheckpointSaved, EpochStarted, Event, RunStarted, StepEnded, Warned, parse_event
from distributed.core.protocol.heartbeat import RECORD, Phase
from distributed.core.run_dir import RunDir
from distributed.observe.console import Console
from distributed.observe.event_log import EventLog
from distributed.observe.follow import Follower


class Collected:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def on(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        pass


def warned(number: int) -> Warned:
    return Warned(time=float(number), message=f"number {number}")


def beat(run_dir: Path, attempt: int, step: int, time_ns: int) -> None:
    path = RunDir(run_dir).attempt(attempt).heartbeat(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(RECORD.pack(step, time_ns, Phase.TRAINING, 0, b""))


def test_events_are_read_back_unchanged(tmp_path: Path) -> None:
    events: list[Event] = [
        StepEnded(time=2.0, step=5, epoch=0, loss=0.25, learning_rate=0.1, samples_per_second=9.0, metrics={"f1": 0.5}),
        CheckpointSaved(time=3.0, step=5, path="ckpt", seconds=0.1),
        Warned(time=4.0, message='quotes " and\nnewlines and ünïcode'),
    ]
    log = EventLog(tmp_path / "deep" / "events.jsonl")
    for event in events:
        log.on(event)
    log.close()
    log.on(warned(1))  # a late event after the end is not an error
    lines = (tmp_path / "deep" / "events.jsonl").read_text().splitlines()
    assert [parse_event(line) for line in lines] == events


def test_killed_writer_loses_no_event(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\n"
        "from distributed.core.events import Warned\n"
        "from distributed.observe.event_log import EventLog\n"
        "log = EventLog(sys.argv[1])\n"
        "for n in range(100): log.on(Warned(time=n, message='x' * 50))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = tmp_path / "events.jsonl"
    assert subprocess.run([sys.executable, "-c", script, str(path)]).returncode == -9
    assert [json.loads(line)["time"] for line in path.read_text().splitlines()] == list(range(100))


def test_processes_sharing_a_log_do_not_mix_lines(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from distributed.core.events import Warned\n"
        "from distributed.observe.event_log import EventLog\n"
        "log = EventLog(sys.argv[1])\n"
        "for n in range(300): log.on(Warned(time=n, message=sys.argv[2] * 5000))\n"
    )
    path = tmp_path / "events.jsonl"
    writers = [subprocess.Popen([sys.executable, "-c", script, str(path), letter]) for letter in "ab"]
    assert [writer.wait() for writer in writers] == [0, 0]
    # one that starts while another writes may take its line for torn and end it: an empty line, which is no event
    messages = [json.loads(line)["message"] for line in path.read_text().splitlines() if line]
    assert sorted(messages) == ["a" * 5000] * 300 + ["b" * 5000] * 300


def test_torn_last_line_does_not_swallow_the_next_event(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event":"Warned","ti')
    seen = Collected()
    follower = Follower(tmp_path, seen, from_end=False)
    log = EventLog(path)
    log.on(warned(1))
    follower.refresh()
    assert seen.events == [warned(1)]


def test_follower_waits_for_the_end_of_a_line(tmp_path: Path) -> None:
    seen = Collected()
    follower = Follower(tmp_path, seen)
    follower.refresh()  # nothing there yet
    line = warned(1).to_json().encode() + b"\n"
    with (tmp_path / "events.jsonl").open("ab", buffering=0) as file:
        file.write(line[:20])
        follower.refresh()
        assert seen.events == []
        file.write(line[20:] + b'{"event":"FromTheFuture","time":1}\n' + line)
        follower.refresh()
        follower.refresh()
    assert seen.events == [warned(1), warned(1)]


def test_follower_of_a_resumed_run_skips_its_past(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.on(warned(1))
    late, all_of_it = Collected(), Collected()
    followers = [Follower(tmp_path, late), Follower(tmp_path, all_of_it, from_end=False)]
    log.on(warned(2))
    for follower in followers:
        follower.refresh()
    assert late.events == [warned(2)]
    assert all_of_it.events == [warned(1), warned(2)]


def test_progress_follows_heartbeats_of_the_current_attempt(tmp_path: Path) -> None:
    beat(tmp_path, 0, step=90, time_ns=1)  # the past of a run that is resumed here
    stream, now = io.StringIO(), [0.0]
    console = Console(stream, clock=lambda: now[0])
    follower = Follower(tmp_path, console)
    log = EventLog(tmp_path / "events.jsonl")

    def shown() -> str:
        """What a step line says; its event is at step 0, so the number comes from the heartbeat."""
        now[0] += 10
        log.on(StepEnded(time=0, step=0, epoch=0, loss=1, learning_rate=1, samples_per_second=1))
        follower.refresh()
        return stream.getvalue().splitlines()[-1]

    log.on(
        RunStarted(
            time=0,
            run_dir="r",
            world_size=2,
            device="cpu",
            backend="pytorch-ddp",
            epochs=1,
            steps_per_epoch=100,
            total_steps=100,
            global_batch=8,
        )
    )
    log.on(EpochStarted(time=0, epoch=0, step=0))
    follower.refresh()
    assert "step 0/100" in shown()
    beat(tmp_path, 0, step=7, time_ns=2)
    follower.refresh()
    assert "step 7/100" in shown()
    beat(tmp_path, 1, step=12, time_ns=3)
    follower.start_attempt(1)
    follower.refresh()
    assert "step 7/100" in shown()  # what lay there before the attempt began is not its own
    beat(tmp_path, 1, step=13, time_ns=4)
    follower.refresh()
    assert "step 13/100" in shown()
