"""Scripts that know nothing of us, with more ranks than there are GPUs: started so that NCCL takes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.conftest import fresh_cli

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
