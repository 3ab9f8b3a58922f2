"""`distributed chaos` on real runs: faults are recovered from and compared, and nothing is left behind."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from distributed.chaos import disk
from distributed.chaos.hosts import Hosts
from tests.conftest import clean_environ
from tests.e2e.survival import wait_until
from tests.template import SOCKET
from tests.warm_python import WarmPython

WARM = WarmPython("distributed.cli.main", "distributed.chaos.verdict")
SCRIPT = Path(__file__).with_name("soak_train.py")


def command(*arguments: str) -> list[str]:
    return [*WARM.command, "-m", "distributed.cli", "chaos", *arguments]


def environ() -> dict[str, str]:
    """Without the template: faults are for ranks that are found among a launcher's children."""
    return {name: value for name, value in clean_environ().items() if name != SOCKET}


def chaos(folder: Path, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command("--run-dir", str(folder / "run"), *arguments),
        cwd=folder,
        env=environ() if env is None else env,
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


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """One run with a fault of each kind that this machine can have: its folder and its figures."""
    folder = tmp_path_factory.mktemp("chaos")
    kinds = ["kill", "hang", "corrupt", *(["diskfull"] if disk.available() is None else [])]
    arguments = ["--faults", ",".join(kinds), "--kills", str(len(kinds)), "--steps", "120", "--seed", "59"]  # far apart
    figures = run(folder, *arguments, "hang_timeout_s=2", "checkpoint_frequency=3 steps")
    assert figures["faults"] == dict.fromkeys(kinds, 1)
    return folder, figures


def injury(disturbed: tuple[Path, dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = (each for each in disturbed[1]["injuries"] if each["kind"] == kind)
    return found


def test_a_kill_is_recovered_from_and_nothing_is_left(disturbed):
    folder, figures = disturbed
    assert injury(disturbed, "kill")["broke"]
    assert figures["attempts"] >= 4
    assert 0 < figures["goodput"] < 1
    assert processes_of(folder) == []


def test_chaos_names_hung_rank_and_skips_damaged_checkpoint(disturbed):
    hang, corrupt = injury(disturbed, "hang"), injury(disturbed, "corrupt")
    rank = re.findall(r"rank (\d)", hang["text"])[0]
    assert hang["broke"]
    assert any(note.startswith(f"rank {rank} named") for note in hang["notes"])
    assert corrupt["broke"]
    assert corrupt["source"].startswith(str(disturbed[0]))
    assert corrupt["lost_steps"] > 0


@pytest.mark.skipif(disk.available() is not None, reason=str(disk.available()))
def test_chaos_with_full_disk_only_fails_saves(disturbed):
    full = injury(disturbed, "diskfull")
    assert re.fullmatch(r"[1-9]\d* saves failed", full["notes"][0])
    assert not full["broke"]
    assert str(disturbed[0]) not in Path("/proc/mounts").read_text()
    assert (disturbed[0] / "run/disturbed/checkpoints/step-000120/manifest.json").exists()


@pytest.mark.skipif(Hosts.available() is not None, reason=str(Hosts.available()))
def test_chaos_on_two_hosts_survives_kill_and_partition(tmp_path):
    arguments = ["--faults", "kill,partition", "--nodes", "2", "--kills", "2", "--steps", "120", "--seed", "3"]
    figures = run(tmp_path, *arguments)
    assert figures["faults"] == {"kill": 1, "partition": 1}
    assert processes_of(tmp_path) == []


def test_chaos_fails_script_with_unseeded_weights(tmp_path):
    """A script that is not the same twice: it takes its weights from the clock."""
    text = SCRIPT.read_text().replace("torch.manual_seed(0)", "torch.manual_seed(time.time_ns())")
    (tmp_path / "train.py").write_text(text)
    done = chaos(tmp_path, "--script", "train.py", "--kills", "1", "--steps", "30")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "DIFFERENT: 4 of 4 tensors" in done.stdout
    assert "FAILED" in done.stdout


@pytest.mark.parametrize(("number", "during"), [(signal.SIGINT, "undisturbed"), (signal.SIGTERM, "disturbed")])
def test_stopped_chaos_ends_its_runs(tmp_path, number, during):
    faults = "kill,diskfull" if disk.available() is None else "kill"
    arguments = ["--script", str(SCRIPT), "--faults", faults, "--steps", "50", "--run-dir", str(tmp_path / "run")]
    running = subprocess.Popen(
        command(*arguments, "--mtbf", "1h", "log_every_n_steps=1"),
        cwd=tmp_path,
        env=environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_until(lambda: (tmp_path / f"run/{during}/events.jsonl").exists(), f"the {during} run has begun")
    running.send_signal(number)
    shown, _ = running.communicate(timeout=60)
    assert running.returncode == 130, shown
    assert "Traceback" not in shown
    wait_until(lambda: processes_of(tmp_path) == [], "all processes have ended")
    assert str(tmp_path) not in Path("/proc/mounts").read_text()


def test_chaos_reports_all_bad_input_before_starting(tmp_path):
    done = chaos(
        tmp_path, "--script", "nothere.py", "--faults", "kil,partition", "--mtbf", "soon", "checkpoint_dir=x", "epoch=3"
    )
    assert done.returncode == 2
    for told in ("nothere.py", "did you mean kill", "--nodes 2", "15s", "checkpoint_dir", "did you mean epochs"):
        assert told in done.stderr, done.stderr
    assert not (tmp_path / "run").exists()


def test_chaos_refuses_script_that_fails_or_does_not_train(tmp_path):
    (tmp_path / "fails.py").write_text("raise ValueError('the data is bad')")
    done = chaos(tmp_path, "--script", "fails.py", "--run-dir", "a", env=clean_environ())
    assert done.returncode == 1
    assert "the data is bad" in done.stderr
    (tmp_path / "idle.py").write_text("print('hello')")
    done = chaos(tmp_path, "--script", "idle.py", "--run-dir", "b", env=clean_environ())
    assert done.returncode == 3
    assert "no training was seen" in done.stderr
