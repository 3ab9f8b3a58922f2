"""More ranks than there are GPUs, on NCCL: of scripts that know nothing of us, of `fit` itself, and of torchrun."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import clean_environ, fresh_cli

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

BEGINNING = """
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Linear(8, 2).cuda()
"""
STEPS = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.randn(4 * world, 8)
for _ in range(3):
    optimizer.zero_grad()
    model(data[rank::world].cuda()).square().mean().backward()
    optimizer.step()
"""
END = """
alone = nn.Linear(8, 2)
alone.load_state_dict(first)
optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    alone(data).square().mean().backward()
    optimizer.step()
torch.testing.assert_close(trained.cpu(), alone.weight.detach())
print(f"rank {rank} of {world} has the weights of one process", flush=True)
dist.destroy_process_group()
"""
KEPT = "first = {name: value.cpu().clone() for name, value in model.state_dict().items()}\n"
DDP = (
    BEGINNING
    + KEPT
    + "model = DistributedDataParallel(model, device_ids=[local_rank])\n"
    + STEPS
    + "trained = model.module.weight.detach()\n"
    + END
)
FSDP = (
    BEGINNING
    + KEPT
    + "from torch.distributed.fsdp import fully_shard\nfully_shard(model)\n"
    + STEPS
    + "trained = model.weight.full_tensor().detach()\n"
    + END
)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("script", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_plain_script_on_shared_gpus_matches_one_process(tmp_path: Path, script: str, ranks: int) -> None:
    (tmp_path / "plain.py").write_text(script)
    asked = torch.cuda.device_count() * ranks
    done = fresh_cli(tmp_path, "train", "--script", "plain.py", "--num-gpus", str(asked), "--share-gpus")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (done.stdout + done.stderr).count(f"of {asked} has the weights of one process") == asked


TRAINER = """
import sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
from distributed import PyTorchDDPTrainer, Trainer

name, ranks = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2))
x = torch.randn(48, 8)
settings = dict(batch_size=8 // ranks, epochs=2, learning_rate=0.01, seed=1, tf32=False, progress=False, run_dir=name)
if ranks > 1:
    settings |= dict(share_gpus=True)
if name == "fsdp":
    trainer = Trainer(model, num_gpus=ranks, backend="fsdp", **settings)
else:
    trainer = PyTorchDDPTrainer(model=model, num_gpus=ranks, **settings)
trainer.fit(TensorDataset(x, (x[:, 0] > 0).long()))
trainer.save_model(f"{name}.safetensors")
if trainer.is_main:
    weights = trainer.model.state_dict()
    assert all(type(weight) is torch.Tensor for weight in weights.values()), weights
    torch.save(weights, f"{name}.pt")
"""


def test_fit_in_a_plain_script_shares_gpus(tmp_path: Path) -> None:
    """As a user has it: no launcher of ours, or torchrun; the model is whole after `fit`, and in its file."""
    (tmp_path / "plain.py").write_text(TRAINER)
    ranks = 2 * torch.cuda.device_count()
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    for name, launcher, size in (
        ("one", [], 1),
        ("ddp", [], ranks),
        ("fsdp", [], ranks),
        ("torchrun", torchrun, ranks),
    ):
        command = [sys.executable, *launcher, "plain.py", name, str(size)]
        done = subprocess.run(command, cwd=tmp_path, env=clean_environ(), capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stdout + done.stderr
        weights = torch.load(tmp_path / f"{name}.pt", map_location="cpu", weights_only=True)
        torch.testing.assert_close(load_file(tmp_path / f"{name}.safetensors"), weights, rtol=0, atol=0)
        one = load_file(tmp_path / "one.safetensors")
        torch.testing.assert_close(weights, one, rtol=1e-5, atol=1e-6)
