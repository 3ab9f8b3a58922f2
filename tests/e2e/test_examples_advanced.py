"""examples/05-advanced, each script really run, on small settings."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.conftest import clean_environ, run_warm
from tests.template import SOCKET
from tests.warm_python import WarmPython

FOLDER = Path(__file__).parents[2] / "examples" / "05-advanced"


def differences(printed: str) -> dict[str, float]:
    """Of each curve, by its name, the largest difference from the plain loop's."""
    found = re.findall(r"^(?:\[r0\] )?(.*?)\s+loss [\d.]+ … [\d.]+, largest difference (\S+)$", printed, re.MULTILINE)
    return {name: float(off) for name, off in found}


def test_meshes_of_2_and_3_axes_match_hand_written_loop(tmp_path: Path) -> None:
    meshes = ["dp2.tp2", "pp2.dp2.tp2"]
    options = [word for mesh in meshes for word in ("--mesh", mesh)]
    found = differences(run_warm(tmp_path, str(FOLDER / "hybrid_parallelism.py"), "--steps", "4", *options))
    assert list(found) == meshes
    assert max(found.values()) < 1e-5


def test_launchers_mesh_setting_matches_hand_written_loop(tmp_path: Path) -> None:
    command = ["-m", "distributed", "train", "--num-gpus", "2", "--script", str(FOLDER / "hybrid_parallelism.py")]
    found = differences(run_warm(tmp_path, *command, "pipeline_parallel=2", "--", "--steps", "2"))
    assert found == {"the launcher's mesh": pytest.approx(0, abs=1e-5)}


def test_accumulation_matches_one_global_batch_on_any_ranks(tmp_path: Path) -> None:
    command = [str(FOLDER / "gradient_accumulation.py"), "--steps", "4", "--ranks", "1", "3"]
    found = differences(run_warm(tmp_path, *command))
    assert [name[:7] for name in found] == ["1 ranks", "1 ranks", "3 ranks"]
    assert max(found.values()) < 1e-5


def test_accumulation_under_launcher_matches_one_global_batch(tmp_path: Path) -> None:
    command = ["-m", "distributed", "train", "--num-gpus", "2", "--script", str(FOLDER / "gradient_accumulation.py")]
    found = differences(run_warm(tmp_path, *command, "--", "--steps", "3"))
    assert [name[:7] for name in found] == ["2 ranks"] * 2
    assert max(found.values()) < 1e-5


def test_overlap_example_prints_a_ratio_for_each_variant(tmp_path: Path) -> None:
    printed = run_warm(
        tmp_path, str(FOLDER / "communication_overlap.py"), "--rounds", "1", "--steps", "2", "--width", "32"
    )
    ratios = [float(ratio) for ratio in re.findall(r" (\d+\.\d\d)   \d+\.\d\d …", printed)]
    assert len(ratios) == 6
    assert ratios[0] == 1
    assert all(ratio > 0 for ratio in ratios)


ALONGSIDE = ["gan", "vae", "reinforce", "lbfgs", "bert_f1"]
_CHAOS = WarmPython("distributed.cli.main", "distributed.chaos.verdict")


@pytest.mark.parametrize("name", ALONGSIDE)
def test_own_step_matches_hand_written_loop(name: str, tmp_path: Path) -> None:
    ranks = ["1", "2", "3"]
    printed = run_warm(tmp_path, str(FOLDER / f"{name}.py"), "--epochs", "2", "--ranks", *ranks)
    found = re.findall(r" on (\d) ranks?: loss \S+ … \S+, largest difference (\S+)$", printed, re.MULTILINE)
    assert [on for on, _ in found] == ranks
    assert max(float(off) for _, off in found) <= 1e-6


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("gan", "lbfgs") else pytest.param(name, marks=pytest.mark.soak)
        for name in (*ALONGSIDE, "vit_ema")
    ],
)
def test_own_step_survives_a_killed_rank_with_same_bytes(name: str, tmp_path: Path) -> None:
    """Ranks of a launcher, which finds them among its children: without the template."""
    arguments = ["--faults", "kill", "--kills", "2", "--steps", "60", "--num-gpus", "2", "--json", "figures.json"]
    settings = ["epochs=1000", "checkpoint_frequency=5 steps"]
    script = ["--script", str(FOLDER / f"{name}.py"), "--run-dir", str(tmp_path / "run")]
    command = [*_CHAOS.command, "-m", "distributed.cli", "chaos", *script, *arguments, *settings]
    environ = {name: value for name, value in clean_environ().items() if name != SOCKET}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["recovered"] == 2
    assert figures["weights"]["is_identical"]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_averaged_vision_transformer_matches_hand_written_loop(ranks: int, tmp_path: Path) -> None:
    printed = run_warm(tmp_path, str(FOLDER / "vit_ema.py"), "--images", "144", "--num-gpus", str(ranks))
    found = dict(re.findall(r"^(\w+) +largest difference (\S+)$", printed, re.MULTILINE))
    assert list(found) == ["weights", "averages", "validation"]
    assert max(map(float, found.values())) <= 1e-6
    assert f"{ranks} ranks, 9 updates" in printed
