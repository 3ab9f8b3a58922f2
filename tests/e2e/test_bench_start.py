"""`distributed bench start` and `distributed bench tune` in small: real commands, real searches; no seconds here."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from distributed.bench.start import find_engines, time_start
from distributed.bench.tuning import time_search
from distributed.core.engines import ENGINES
from distributed.core.errors import ConfigError, LaunchError


def test_an_engine_is_timed_beside_a_start_by_hand(tmp_path: Path) -> None:
    target = tmp_path / "start.json"
    command = [sys.executable, "-m", "distributed.cli", "bench", "start", "--only", "fsdp", "--repeats", "1"]
    ended = subprocess.run([*command, "--json", str(target)], capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr
    record = json.loads(target.read_text())
    assert [(row["name"], row["peer"]) for row in record["rows"]] == [("fsdp", "torchrun"), ("torchrun", "")]
    for row in record["rows"]:
        assert 0 < row["first_step_s"] <= row["whole_s"]
        assert row["name"] in ended.stdout
    ours, by_hand = record["rows"]
    assert ours["of_peer"] == pytest.approx(ours["first_step_s"] / by_hand["first_step_s"], rel=0.01)
    assert by_hand["of_peer"] is None


def test_every_engine_has_a_script_of_its_models_and_one_by_hand() -> None:
    folder = Path(sys.modules["distributed.bench.start"].__file__ or "").parent
    for engine in ENGINES.entries.values():
        assert (folder / f"start_{engine.models}.py").exists()
        assert (folder / f"start_by_hand_{engine.peer}.py").exists()


def test_an_engine_that_is_not_installed_is_told_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES.entries, "ray", replace(ENGINES.entries["ray"], needs="no_such_module"))
    engines, missing = find_engines()
    assert "ray" not in engines
    assert "pytorch-ddp" in engines
    assert missing["ray"] == 'pip install "distributed-training[ray]"'


def test_an_unknown_engine_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="horovod"):
        find_engines(["horovot"])


def test_a_start_that_fails_shows_what_it_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('broken installation')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(LaunchError, match="broken installation"):
        time_start("torchrun", 2, str(tmp_path / "run"), by_hand=True)


def test_a_search_is_timed_by_the_clocks_of_its_trials(tmp_path: Path) -> None:
    found = time_search("ours", str(tmp_path / "search"), steps=20, trials=3, parallel=2)
    assert found.trials_s > 0
    assert found.wall_s >= found.trials_s / 2, "no search is quicker than its trials"
    assert found.ratio == pytest.approx(found.wall_s / (found.trials_s / 2))
