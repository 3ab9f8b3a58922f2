"""examples/05-advanced, each script really run, on small settings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import run_warm

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
