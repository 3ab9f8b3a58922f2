"""`distributed chaos` on real runs: faults are recovered from and compared, and nothing is left behind."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from distributed.chaos import disk
from distributed.chaos.hosts import Hosts
from tests.conftest import clean_environ
from tests.e2e.survival import wait_until

SCRIPT = Path(__file__).with_name("soak_train.py")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "distributed.cli", "chaos", *arguments]


def chaos(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command("--run-dir", str(folder / "run"), *arguments),
        cwd=folder,
        env=clean_environ(),
        capture_output=True,
        text=True,
        timeout=240,
    )


def run(folder: Path, *arguments: str) -> dict[str, Any]:
    """A chaos run that passes: its figures."""
    done = chaos(folder, "--script", str(SCRIPT), "--json", "figures.json", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "IDENTICAL" in done.stdout
    figures: dict[str, Any] = json.loads((folder / "figures.json").read_text())
    assert figures["passed"]
    assert (figures["samples"]["lost"], figures["samples"]["repeated"]) == (0, 0)
    assert figures["weights"]["is_identical"]
    assert figures["recovered"] == len(figures["injuries"])
    return figures


def processes_of(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if str(folder) in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def test_kills(tmp_path):
    figures = run(tmp_path, "--kills", "3", "--steps", "80", "checkpoint_frequency=7 steps")
    assert figures["faults"] == {"kill": 3}
    assert figures["attempts"] >= 4
    assert all(injury["broke"] for injury in figures["injuries"])
    assert 0 < figures["goodput"] < 1
    assert processes_of(tmp_path) == []


def test_a_hang_is_named_and_a_damaged_checkpoint_passed_over(tmp_path):
    arguments = ["--faults", "hang,corrupt", "--kills", "2", "--steps", "80", "hang_timeout_s=2"]
    figures = run(tmp_path, *arguments, "checkpoint_frequency=3 steps")
    assert figures["faults"] == {"hang": 1, "corrupt": 1}
    hang, corrupt = (next(i for i in figures["injuries"] if i["kind"] == kind) for kind in ("hang", "corrupt"))
    rank = re.findall(r"rank (\d)", hang["text"])[0]
    assert any(note.startswith(f"rank {rank} named") for note in hang["notes"])
    assert corrupt["source"].startswith(str(tmp_path))
    assert corrupt["lost_steps"] > 0


@pytest.mark.skipif(disk.available() is not None, reason=str(disk.available()))
def test_a_disk_that_is_full_for_a_while_costs_a_checkpoint_and_no_more(tmp_path):
    arguments = ["--faults", "diskfull", "--kills", "1", "--steps", "150", "checkpoint_frequency=10 steps"]
    figures = run(tmp_path, *arguments)
    assert re.fullmatch(r"[1-9]\d* saves failed", figures["injuries"][0]["notes"][0])
    assert figures["attempts"] == 1
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
    assert (tmp_path / "run/disturbed/checkpoints/step-000150/manifest.json").exists()


@pytest.mark.skipif(Hosts.available() is not None, reason=str(Hosts.available()))
def test_hosts_that_are_killed_on_and_cut_off(tmp_path):
    arguments = ["--faults", "kill,partition", "--nodes", "2", "--kills", "2", "--steps", "120", "--seed", "3"]
    figures = run(tmp_path, *arguments)
    assert figures["faults"] == {"kill": 1, "partition": 1}
    assert processes_of(tmp_path) == []


def test_a_difference_is_found_and_fails(tmp_path):
    """A script that is not the same twice: it takes its weights from the clock."""
    text = SCRIPT.read_text().replace("torch.manual_seed(0)", "torch.manual_seed(time.time_ns())")
    (tmp_path / "train.py").write_text(text)
    done = chaos(tmp_path, "--script", "train.py", "--kills", "1", "--steps", "30")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "DIFFERENT: 4 of 4 tensors" in done.stdout
    assert "FAILED" in done.stdout


@pytest.mark.parametrize(("number", "during"), [(signal.SIGINT, "undisturbed"), (signal.SIGTERM, "disturbed")])
def test_stopping_ends_the_runs(tmp_path, number, during):
    faults = "kill,diskfull" if disk.available() is None else "kill"
    arguments = ["--script", str(SCRIPT), "--faults", faults, "--steps", "50", "--run-dir", str(tmp_path / "run")]
    running = subprocess.Popen(
        command(*arguments, "--mtbf", "1h", "log_every_n_steps=1"),
        cwd=tmp_path,
        env=clean_environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    wait_until(lambda: (tmp_path / f"run/{during}/events.jsonl").exists(), f"the {during} run has begun")
    running.send_signal(number)
    shown, _ = running.communicate(timeout=60)
    assert running.returncode == 130, shown
    assert "Traceback" not in shown
    wait_until(lambda: processes_of(tmp_path) == [], "all processes have ended")
    assert str(tmp_path) not in Path("/proc/mounts").read_text()


def test_all_that_is_wrong_is_told_at_once_and_nothing_starts(tmp_path):
    done = chaos(
        tmp_path, "--script", "nothere.py", "--faults", "kil,partition", "--mtbf", "soon", "checkpoint_dir=x", "epoch=3"
    )
    assert done.returncode == 2
    for told in ("nothere.py", "did you mean kill", "--nodes 2", "15s", "checkpoint_dir", "did you mean epochs"):
        assert told in done.stderr, done.stderr
    assert not (tmp_path / "run").exists()


def test_a_script_that_fails_by_itself_or_does_not_train(tmp_path):
    (tmp_path / "fails.py").write_text("raise ValueError('the data is bad')")
    done = chaos(tmp_path, "--script", "fails.py", "--run-dir", "a")
    assert done.returncode == 1
    assert "the data is bad" in done.stderr
    (tmp_path / "idle.py").write_text("print('hello')")
    done = chaos(tmp_path, "--script", "idle.py", "--run-dir", "b")
    assert done.returncode == 3
    assert "no training was seen" in done.stderr
