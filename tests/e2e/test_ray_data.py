"""Ray Data as input: every row once an epoch, the same bytes as from memory, though a rank is killed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from distributed.data.checks.ledger import check_ledgers
from tests.ray_clusters import RayNodes

ROWS = 203

COMMON = f"""
import hashlib
import json
import os
import signal
from pathlib import Path

import numpy as np
import ray
import ray.data
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distributed import RayRows, Trainer

ROWS = {ROWS}
COMPUTED = Path(__file__).parent / "computed"  # rows, by whoever computes them


def table():
    x = np.random.default_rng(0).normal(size=(ROWS, 8)).astype("float32")
    return x, (x[:, 0] > 0).astype("int64") + (x[:, 1] > 0)


def compute(batch):
    x = table()[0][batch["id"]]
    with open(COMPUTED, "a") as file:
        file.write("".join(f"{{number}}\\n" for number in batch["id"]))
    return {{"x": x, "label": (x[:, 0] > 0).astype("int64") + (x[:, 1] > 0)}}


def dataset():
    return ray.data.range(ROWS, override_num_blocks=5).map_batches(compute)


class DiesOnce(nn.Module):
    \"\"\"Rank 1 is gone in its 9th step, as if somebody had killed it.\"\"\"

    def __init__(self, marker):
        super().__init__()
        self.layers, self.marker, self.calls = nn.Linear(8, 3), marker, 0

    def forward(self, x):
        self.calls += self.training
        marker = Path(self.marker) if self.marker else None
        if marker and self.calls == 9 and torch.distributed.get_rank() == 1 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.layers(x)


def train(data, backend, folder, marker=""):
    torch.manual_seed(0)
    trainer = Trainer(
        DiesOnce(marker),
        loss_fn=nn.CrossEntropyLoss(),
        backend=backend,
        device="cpu",
        num_gpus=2,
        epochs=2,
        checkpoint_frequency="4 steps",
        sample_ledger=True,
        progress=False,
        run_dir=folder,
    )
    history = trainer.fit(DataLoader(data, batch_size=8, shuffle=True))
    return {{"bytes": digest(trainer.model), "loss": history["loss"], "steps": history.steps}}


def digest(model):
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in model.state_dict().values())).hexdigest()
"""

DRIVER = """
import subprocess
import sys

from distributed.core.errors import DataError
from distributed.data.source import read_source


def refusal(do):
    try:
        do()
    except DataError as refused:
        return str(refused)
    return "not refused"


def computed():
    return sorted(map(int, COMPUTED.read_text().split())) if COMPUTED.exists() else []


def no_room():
    os.environ.update(RANK="0", WORLD_SIZE="1", DISTRIBUTED_RUN_DIR="here")
    try:
        RayRows(dataset())
    finally:
        for name in ("RANK", "WORLD_SIZE", "DISTRIBUTED_RUN_DIR"):
            del os.environ[name]


address, python = sys.argv[1:]
ray.init(address=address, log_to_driver=False)
x, labels = table()
rows = RayRows(dataset(), columns=("x", "label"))
found = {
    "computed": computed(),
    "in order": all(torch.equal(rows[i][0], torch.from_numpy(x[i])) for i in range(ROWS)),
    "memory": train(TensorDataset(torch.from_numpy(x), torch.from_numpy(labels)), "pytorch-ddp", "memory"),
    "ray": train(rows, "ray", "ray", marker=os.path.abspath("died")),
    "died": Path("died").exists(),
    "beside": train(rows, "pytorch-ddp", "beside"),
}
COMPUTED.unlink()
command = [python, "-m", "distributed.cli", "train", "--script", "in_ranks.py", "--backend", "ray"]
command += ["--address", address, "--num-gpus", "2", "--device", "cpu"]
ended = subprocess.run([*command, "--run-dir", "script"], capture_output=True, text=True)
found |= {"script": ended.returncode, "said": ended.stdout + ended.stderr}
found["computed in ranks"] = computed()
found["named"] = {name: list(value.shape) for name, value in RayRows(dataset())[0].items()}
found["refused"] = {
    "column": refusal(lambda: RayRows(dataset(), columns=("x", "colour"))),
    "workers": refusal(lambda: read_source(DataLoader(rows, batch_size=8, num_workers=2), "train_loader")),
    "not of Ray": refusal(lambda: RayRows([1, 2])),
}
holder = ray.remote(num_cpus=3)(type("Holder", (), {"is_there": lambda self: True})).remote()
ray.get(holder.is_there.remote())
found["refused"]["no room"] = refusal(no_room)
Path("found.json").write_text(json.dumps(found))
"""

IN_RANKS = """
torch.manual_seed(0)
model = nn.Linear(8, 3)
trainer = Trainer(model, loss_fn=lambda out, label: nn.functional.cross_entropy(out, label), batch_size=8, epochs=1)
trainer.fit(dataset().rename_columns({"x": "input"}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ray-data")


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    """All runs, on one cluster: two ranks, and a CPU beside them to compute on."""
    (folder / "driver.py").write_text(COMMON + DRIVER)
    (folder / "in_ranks.py").write_text(COMMON + IN_RANKS)
    nodes = RayNodes(folder, head_cpus=3)
    try:
        command = [nodes.python, "driver.py", nodes.address, nodes.python]
        ended = subprocess.run(command, cwd=folder, env=nodes.environ, capture_output=True, text=True, timeout=580)
    finally:
        nodes.close()
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


def test_ray_dataset_is_computed_once_in_row_order(found: dict[str, Any]) -> None:
    assert found["computed"] == list(range(ROWS))
    assert found["in order"]


def test_ray_data_with_killed_rank_matches_bytes_of_memory_data(found: dict[str, Any]) -> None:
    assert found["died"], "a rank was killed"
    assert found["ray"]["steps"] == found["memory"]["steps"] == 26
    assert found["ray"]["bytes"] == found["memory"]["bytes"]
    assert found["ray"]["loss"] == found["memory"]["loss"]


def test_killed_rank_leaves_every_row_used_once_an_epoch(found: dict[str, Any], folder: Path) -> None:
    report = check_ledgers(folder / "ray" / "ledger", ROWS)
    assert report.is_exact, str(report)
    assert report.samples == 2 * ROWS


def test_local_ranks_read_the_same_ray_data_rows(found: dict[str, Any]) -> None:
    assert found["beside"]["bytes"] == found["memory"]["bytes"]


def test_ranks_running_the_script_compute_ray_dataset_once(found: dict[str, Any]) -> None:
    assert found["script"] == 0, found["said"]
    assert found["computed in ranks"] == list(range(ROWS))


def test_ray_sample_without_columns_is_a_dict_by_name(found: dict[str, Any]) -> None:
    assert found["named"] == {"x": [8], "label": []}


def test_unusable_ray_data_is_refused_with_its_reason(found: dict[str, Any]) -> None:
    refused = found["refused"]
    assert "'colour'" in refused["column"]
    assert "x, label" in refused["column"]
    assert "num_workers=2" in refused["workers"]
    assert "list" in refused["not of Ray"]
    assert "no CPU left" in refused["no room"]
