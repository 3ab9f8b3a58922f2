"""reproducible='bitwise' on a GPU: one device, shared by 1, 2 and 4 processes that talk over gloo.

NCCL refuses two ranks on one GPU, and so does the planner; so the plan is made by hand, and this file is also the rank.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from distributed.core.env import WorkerEnv
from distributed.core.mesh import MeshSpec
from distributed.core.plan import BatchPlan, CheckpointPlan, OptimizerPlan, Plan, PrecisionPlan
from distributed.data.source import Source
from distributed.launch.ports import free_port
from distributed.train.task import Task
from distributed.worker import Job, open_session, run_rank

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def train(rank: int, ranks: int, port: int, precision: str, folder: str) -> str:
    """The digest of the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Unflatten(1, (3, 8, 8)), nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.2),
        nn.Flatten(), nn.Linear(576, 256), nn.GELU(), nn.Linear(256, 10),
    )  # fmt: skip
    data = TensorDataset(torch.randn(200, 192), torch.randint(0, 10, (200,)))
    run_dir = f"{folder}/{ranks}-{precision}"
    plan = Plan(
        run_dir=run_dir,
        batch=BatchPlan(32 // ranks, ranks, leaves=8, least_leaf=2),
        mesh=MeshSpec(dp_replicate=ranks),
        device="cuda",
        collectives="gloo",
        seed=3,
        epochs=2,
        precision=PrecisionPlan(precision, scaler_init_scale=1024.0),
        optimizer=OptimizerPlan("adamw", 0.01, clip_norm=0.5),
        checkpoint=CheckpointPlan(f"{run_dir}/checkpoints"),
    )
    env = WorkerEnv(rank=rank, local_rank=rank, world_size=ranks, local_world_size=ranks, master_port=port)
    session = open_session(plan, env)
    run_rank(Job(plan, Task(model), Source(data, shuffle=True), None), session, shows_progress=False)
    total = hashlib.sha256()
    for value in model.state_dict().values():
        total.update(value.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_bitwise_ranks_sharing_a_gpu_have_the_same_bytes(precision: str, tmp_path: Path) -> None:
    found: dict[int, set[str]] = {}
    for ranks in (1, 2, 4):
        more = [str(ranks), str(free_port()), precision, str(tmp_path)]
        commands = [[sys.executable, __file__, str(rank), *more] for rank in range(ranks)]
        started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
        found[ranks] = {process.communicate(timeout=120)[0].split()[-1] for process in started}
        assert [process.returncode for process in started] == [0] * ranks
    assert found[1] == found[2] == found[4]


if __name__ == "__main__":
    print(train(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]))
