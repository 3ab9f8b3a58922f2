"""`save_model` writes what ranks have saved in parts, in a process that never holds it whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.utils.data import TensorDataset

from distributed import Trainer
from distributed.checkpoint.format.tensors import digest_tensor
from distributed.core.history import History
from distributed.testing import run_ranks
from tests.conftest import clean_environ

MIB = 2**20
LAYERS = 12
WIDTHS = {"small": 16, "large": 2048}  # of the large model a tensor has 16 MiB, a rank's shard 96 MiB
ALLOWANCE = 32 * MIB  # chunks that are kept, and what an allocator does not give back

_SAVE = """
import sys
from pathlib import Path
from torch import nn
from distributed import Trainer
from distributed.core.history import History
trainer = Trainer(nn.Linear(1, 1))
trainer.history = History.load(Path(sys.argv[1]))
trainer.save_model(sys.argv[2])
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(int(status["VmHWM"].split()[0]) * 1024)
"""


def train_shards(folder: str) -> dict[str, str]:
    """Two models of the same layers, one of them of a size that shows; what the larger one is at last."""
    found: dict[str, str] = {}
    for name, width in WIDTHS.items():
        torch.manual_seed(0)
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
        trainer = Trainer(model, loss_fn=nn.MSELoss(), optimizer="sgd", backend="fsdp", device="cpu", progress=False)
        data = TensorDataset(torch.randn(4, width), torch.randn(4, width))
        history = trainer.fit(data, batch_size=2, max_steps=1, checkpoint_dir=f"{folder}/{name}")
        if trainer.is_main:
            history.save(Path(folder, f"{name}.json"))
            found = {key: digest_tensor(value) for key, value in model.state_dict().items()}
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    folder = tmp_path_factory.mktemp("shards")
    return folder, run_ranks(train_shards, 2, str(folder))[0]


def peak(folder: Path, name: str) -> int:
    """Of a new process that writes the model, in bytes."""
    command = [sys.executable, "-c", _SAVE, str(folder / f"{name}.json"), str(folder / f"{name}.safetensors")]
    return int(subprocess.run(command, capture_output=True, text=True, check=True, env=clean_environ()).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="a process's own peak is read from /proc")
def test_save_model_needs_less_than_a_shard_and_a_tensor(trained: tuple[Path, dict[str, str]]) -> None:
    folder, expected = trained
    tensor = 4 * WIDTHS["large"] ** 2
    shard = LAYERS * tensor // 2
    more = peak(folder, "large") - peak(folder, "small")
    assert more < tensor + ALLOWANCE < shard + tensor
    assert History.load(folder / "large.json").world_size == 2
    with safe_open(folder / "large.safetensors", "pt") as file:
        assert {key: digest_tensor(file.get_tensor(key)) for key in file.keys()} == expected  # noqa: SIM118
