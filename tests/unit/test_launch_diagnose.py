"""A failed run is diagnosed from what it left: recorded logs of many launchers, and run directories of ours."""

from __future__ import annotations

import json
import os
import re
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from distributed.cli.main import app
from distributed.core.errors import ConfigError
from distributed.core.events import AttemptEnded, Event, RankFailed, RankStalled, RunEnded
from distributed.core.protocol.failure import FailureRecord
from distributed.core.run_dir import RunDir
from distributed.launch.diagnose import causes
from distributed.launch.diagnose.causes import TIERS, known_causes
from distributed.launch.diagnose.diagnosis import Diagnosis, diagnose
from distributed.launch.diagnose.lines import _HEAD_BYTES, _TAIL_BYTES
from distributed.launch.diagnose.text import to_json, to_text

TRACEBACK = "Traceback (most recent call last):\n"
RECORDED = sorted((Path(__file__).parent / "failures").glob("*.log"))


def found_in(diagnosis: Diagnosis) -> tuple[str, int | None]:
    assert diagnosis.first is not None
    return diagnosis.first.cause.name, diagnosis.first.line.rank


@pytest.mark.parametrize("log", RECORDED, ids=lambda log: log.stem)
def test_recorded_failure_is_named_with_its_rank(log: Path) -> None:
    """The name of a file says what its failure is: cause.rank.where-it-is-from.log."""
    cause, rank = log.name.split(".")[:2]
    assert found_in(diagnose(log)) == (cause, None if rank == "host" else int(rank))


def test_most_causes_have_a_recorded_failure() -> None:
    recorded = {log.name.partition(".")[0] for log in RECORDED}
    assert recorded - {cause.name for cause in known_causes()} == {"unknown"}
    assert len(RECORDED) >= 45
    assert {cause.name for cause in known_causes() if cause.tier == "cause"} - recorded == set()


def test_table_of_causes_is_whole() -> None:
    table = tomllib.loads(Path(causes.__file__).with_name("causes.toml").read_text())
    assert [cause.name for cause in known_causes()] == list(table)
    for name, entry in table.items():
        assert entry.keys() <= {"title", "signs", "do", "tier", "signals"}, name
        assert entry.get("tier", "cause") in TIERS
        assert entry["do"], name
        for sign in entry["signs"]:
            re.compile(sign)


@pytest.mark.parametrize("log", RECORDED, ids=lambda log: log.stem)
def test_no_line_of_a_cause_is_passed_over_unread(log: Path) -> None:
    """What is looked for before the causes are, for speed, is in every line that shows one."""
    for line in log.read_text().splitlines():
        shown = [cause.name for cause in known_causes() if cause.pattern.search(line)]
        assert [cause.name for cause in causes.causes_of(line)] == shown, line


def test_same_line_of_all_ranks_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "all.log").write_text("".join(f"[r{rank}] CUDA out of memory\n" for rank in range(8)))
    text = to_text(diagnose(tmp_path))
    assert "first:    rank 0" in text
    assert "also:     ranks 1-7: a GPU ran out of memory" in text


def test_healthy_log_has_no_failure(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text("step 1 loss 2.0\n0 errors found, no warnings\nsaved the model\n")
    diagnosis = diagnose(tmp_path / "run.log")
    assert diagnosis.first is None
    assert "no failure was found" in to_text(diagnosis)


def test_error_that_was_survived_long_ago_is_not_the_cause(tmp_path: Path) -> None:
    early = ["[r1] CUDA out of memory: this batch is skipped"] + [f"[r1] step {step}" for step in range(2000)]
    late = ["[r0] Traceback (most recent call last):", '[r0]   File "t.py", line 3, in <module>']
    late += ["[r0] OSError: [Errno 28] No space left on device"]
    (tmp_path / "run.log").write_text("\n".join([*early, *late]))
    assert found_in(diagnose(tmp_path)) == ("disk-full", 0)


def test_beginning_and_end_of_a_long_log_are_read(tmp_path: Path) -> None:
    log = tmp_path / "rank-2.log"
    line = b"step 1 loss 2.0 and some more text that nobody needs\n"
    with log.open("wb") as file:
        file.write(line * ((_HEAD_BYTES + _TAIL_BYTES) // len(line) + 10))
        file.write(b"RuntimeError: CUDA error: an illegal memory access was encountered\n")
    diagnosis = diagnose(tmp_path)
    assert found_in(diagnosis) == ("illegal-memory-access", 2)
    assert diagnosis.first is not None
    assert diagnosis.first.line.place == str(log)  # its number is not known


def test_log_that_is_no_text_is_read(tmp_path: Path) -> None:
    (tmp_path / "rank-0.log").write_bytes(bytes(range(256)) * 40 + b"\n\x1b[31mtorch.OutOfMemoryError: CUDA\x1b[0m\n")
    assert found_in(diagnose(tmp_path)) == ("gpu-out-of-memory", 0)


def test_log_cannot_steer_the_terminal(tmp_path: Path) -> None:
    """Of lines, and of messages that ranks have written down."""
    evil = "\x1b]0;title\x07\x1b[2J\x08\x9b31m"
    (tmp_path / "rank-0.log").write_text(f"10%\r100% {evil}CUDA out of memory{evil}\n")
    error = tmp_path / "attempt_0" / "1" / "error.json"
    error.parent.mkdir(parents=True)
    error.write_text(json.dumps({"message": f"OSError: No space left on device{evil}"}))
    text = to_text(diagnose(tmp_path))
    assert "CUDA out of memory" in text or "No space left" in text
    assert not [letter for letter in text if (ord(letter) < 32 and letter != "\n") or letter in "\x9b\x7f"]


def test_last_attempt_of_torchrun_counts(tmp_path: Path) -> None:
    for attempt, rank, text in ((0, 0, "CUDA out of memory"), (1, 3, "OSError: [Errno 28] No space left on device")):
        folder = tmp_path / "none_x" / f"attempt_{attempt}" / str(rank)
        folder.mkdir(parents=True)
        (folder / "stderr.log").write_text(text + "\n")
    error = {"message": {"message": "OSError: [Errno 28] No space", "extraInfo": {"timestamp": "1700000000"}}}
    (tmp_path / "none_x" / "attempt_1" / "3" / "error.json").write_text(json.dumps(error))
    assert found_in(diagnose(tmp_path)) == ("disk-full", 3)


class Run:
    """A run directory as ours leaves it."""

    def __init__(self, folder: Path) -> None:
        self.dir = RunDir(folder)

    def write(self, attempt: int, rank: int, text: str, record: FailureRecord | None = None) -> None:
        place = self.dir.attempt(attempt)
        place.path.mkdir(parents=True, exist_ok=True)
        place.log(rank).write_text(text)
        if record is not None:
            record.write(place.failure(rank))

    def happened(self, *events: Event) -> None:
        with self.dir.events.open("a") as file:
            file.writelines(event.to_json() + "\n" for event in events)


def record(rank: int, kind: str, message: str, *, time: float, collateral: bool = False) -> FailureRecord:
    trace = f'Traceback (most recent call last):\n  File "/me/train.py", line {rank + 30}, in step\n{kind}: {message}'
    return FailureRecord(rank, "n1", 7, time, kind, message, trace, 1, collateral)


def test_run_directory_names_the_rank_that_caused_it(tmp_path: Path) -> None:
    run = Run(tmp_path)
    lost = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"
    run.write(0, 0, "step 1\n", record(0, "RuntimeError", lost, time=100.0, collateral=True))
    run.write(0, 1, "step 1\n", record(1, "ValueError", "sample 13 has no label", time=100.4))
    failed = RankFailed(time=101.0, rank=1, host="n1", message="ValueError: sample 13 has no label", log_path="")
    run.happened(failed)
    diagnosis = diagnose(tmp_path)
    assert found_in(diagnosis) == ("unknown", 1)
    text = to_text(diagnosis)
    assert "ValueError: sample 13 has no label" in text
    assert "where:    /me/train.py:31 in step" in text
    assert "also:     rank 0: the connection to another rank broke" in text


def test_faults_that_a_run_survived_are_listed(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.write(0, 0, "")
    run.happened(
        AttemptEnded(time=1.0, attempt=0, cause="machine", message="killed by SIGKILL", rank=1, host="n1", step=20),
        RankStalled(
            time=2.0, rank=1, host="n1", step=30, where="data.py:9 in read", late_seconds=9, deadline_seconds=5
        ),
        RunEnded(time=3.0, status="done", step=40, seconds=3.0, samples_per_second=1.0),
    )
    text = to_text(diagnose(tmp_path))
    assert "the run has ended well" in text
    assert "attempt 0 ended after step 20 (machine): killed by SIGKILL" in text
    assert "it stood in data.py:9 in read" in text


def test_run_that_was_moved_is_read_where_it_is(tmp_path: Path) -> None:
    run = Run(tmp_path / "copied")
    run.write(2, 5, "torch.OutOfMemoryError: CUDA out of memory\n")
    path = "/cluster/gone/run/attempts/2/rank-5.log"
    run.happened(RankFailed(time=1.0, rank=5, host="n2", message="ended with exit code 1", log_path=path))
    assert found_in(diagnose(tmp_path / "copied")) == ("gpu-out-of-memory", 5)


def test_torn_records_are_passed_over(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.write(0, 0, "RuntimeError: CUDA error: invalid device ordinal\n")
    run.dir.attempt(0).failure(0).write_text('{"rank": 0, "hos')
    run.dir.events.write_text('{"event": "RankFailed", "rank"')
    assert found_in(diagnose(tmp_path)) == ("no-gpu", 0)


def test_secrets_in_logs_are_not_shown(tmp_path: Path) -> None:
    (tmp_path / "rank-0.log").write_text("OSError: [Errno 28] No space left on device: token=hf_" + "a" * 30 + "\n")
    diagnosis = diagnose(tmp_path)
    assert "hf_a" not in to_text(diagnosis) + json.dumps(to_json(diagnosis))


def test_logs_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "rank-0.log").write_text("CUDA out of memory\n")
    (tmp_path / "rank-1.log").symlink_to(tmp_path / "gone")
    os.mkfifo(tmp_path / "rank-2.log")  # reading it would wait for ever
    text = to_text(diagnose(tmp_path))
    assert "cause:    a GPU ran out of memory" in text
    for rank in (1, 2):
        assert f"could not be read: {tmp_path / f'rank-{rank}.log'}" in text


@pytest.mark.parametrize("make", [None, "empty"])
def test_nothing_to_read_is_an_error_that_says_so(tmp_path: Path, make: str | None) -> None:
    path = tmp_path / "x"
    if make is not None:
        path.mkdir()
    with pytest.raises(ConfigError, match=r"nothing at|no logs in"):
        diagnose(path)


def test_command_prints_text_and_json() -> None:
    log = str(next(log for log in RECORDED if log.name.startswith("gpu-out-of-memory")))
    shown = CliRunner().invoke(app, ["diagnose", log])
    assert shown.exit_code == 0, shown.output
    assert "cause:    a GPU ran out of memory [gpu-out-of-memory]" in shown.output
    found = json.loads(CliRunner().invoke(app, ["diagnose", log, "--json"]).output)
    assert found["first"]["rank"] == 1
    assert found["first"]["do"]
    assert "preempted" in CliRunner().invoke(app, ["diagnose", "--causes"]).output


@pytest.mark.parametrize("part", ["/dev/shm ", "Assertion `index ", "connect() ", "unable to open file "])
def test_line_of_a_megabyte_is_read_in_moments(part: str, tmp_path: Path) -> None:
    """Patterns that begin anew at each part took the square of the line: hours. A test that hangs fails."""
    log = tmp_path / "rank-2.log"
    log.write_text(part * (1_000_000 // len(part)) + "CUDA out of memory\n")
    assert found_in(diagnose(log)) == ("gpu-out-of-memory", None)
    diagnosis = diagnose(tmp_path)
    assert found_in(diagnosis) == ("gpu-out-of-memory", 2)
    assert len(diagnosis.first.line.text) < 5_000  # type: ignore[union-attr]


def test_traceback_at_the_end_of_a_very_long_log_is_read(tmp_path: Path) -> None:
    """Its lines have no numbers. What was survived further up, in the part that is read, is not the end."""
    log = tmp_path / "rank-2.log"
    errors = [
        f'{TRACEBACK}  File "/me/t.py", line {n}, in f\n{e}\n' for n, e in ((3, "OSError: x"), (8, "KeyError: y"))
    ]
    log.write_text(_TAIL_BYTES * "step\n" + errors[0] + 1000 * "step\n" + errors[1])
    diagnosis = diagnose(tmp_path)
    assert diagnosis.first is not None
    assert (diagnosis.first.where, diagnosis.first.line.rank) == ("/me/t.py:8 in f", 2)
