"""examples/04-ray, each script really run, on one cluster for all of them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import clean_environ
from tests.ray_clusters import RayNodes

FOLDER = Path(__file__).parents[2] / "examples" / "04-ray"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNodes]:
    nodes = RayNodes(tmp_path_factory.mktemp("ray"), head_cpus=3)
    yield nodes
    nodes.close()


def run(cluster: RayNodes, folder: Path, script: str, *arguments: str) -> str:
    """Run a script of the examples in a folder and return what it printed; it must succeed."""
    entry = {name: value for name, value in cluster.environ.items() if name.startswith("RAY_")}
    command = [cluster.python, str(FOLDER / script), "--address", cluster.address, *arguments]
    done = subprocess.run(command, cwd=folder, env=clean_environ(**entry), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_training_on_ray_learns_and_leaves_a_checkpoint(cluster: RayNodes, tmp_path: Path) -> None:
    printed = run(cluster, tmp_path, "ray_train.py", "--epochs", "4", "--run-dir", "run")
    ((accuracy, steps, ranks),) = re.findall(
        r"^accuracy (\S+) after (\d+) steps on (\d+) ranks$", printed, re.MULTILINE
    )
    assert float(accuracy) > 0.9
    assert (int(steps), int(ranks)) == (4 * 23, 2)
    ((checkpoint),) = re.findall(r"^checkpoint (\S+)$", printed, re.MULTILINE)
    assert (tmp_path / checkpoint / "manifest.json").exists()


def test_training_on_ray_data_uses_every_row(cluster: RayNodes, tmp_path: Path) -> None:
    printed = run(cluster, tmp_path, "ray_data.py", "--epochs", "2")
    ((rows, steps, accuracy),) = re.findall(
        r"^(\d+) rows, (\d+) steps on 2 ranks, accuracy (\S+)$", printed, re.MULTILINE
    )
    assert (int(rows), int(steps)) == (1797, 2 * 29)
    assert float(accuracy) > 0.8


def test_ray_tune_example_names_the_best_trial(cluster: RayNodes, tmp_path: Path) -> None:
    printed = run(cluster, tmp_path, "ray_tune.py", "--num-samples", "2", "--epochs", "2")
    trials = re.findall(r"val_accuracy (\S+)  reports \d+  (\{.*\})$", printed, re.MULTILINE)
    assert len(trials) == 2
    ((best),) = re.findall(r"^best config: (\{.*\})$", printed, re.MULTILINE)
    assert best == max(trials, key=lambda trial: float(trial[0]))[1]
