"""Parameters in bf16 and layers in fp8 where FSDP shards the state: they learn as in one process, nothing is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from distributed.checkpoint.restore.reading import load
from distributed.core.env import WorkerEnv, worker_env
from distributed.core.mesh import MeshSpec
from distributed.core.plan import BatchPlan, OptimizerPlan, Plan, PrecisionPlan, ShardPlan
from distributed.data.loading.loader import Microbatch
from distributed.runtime.session import Session
from distributed.strategies.torch_mesh import TorchMesh
from distributed.testing import run_ranks
from distributed.train.task import Task
from tests.float8 import quick_products
from tests.meshes import Trained, train

FSDP = {"num_gpus": 2, "batch_size": 4, "backend": "fsdp"}
KINDS = ("compensated", "stochastic")
STEPS = 10


def train_ways(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in KINDS:
        settings = FSDP | {"bf16_parameters": kind, "gradient_clipping": 1.0}
        found[kind] = train("fsdp_grad_op", folder / kind, max_steps=STEPS, **settings)
        first = train("fsdp_grad_op", folder / f"{kind}-cut", max_steps=STEPS // 2, **settings)
        again = settings | {"resume_from_checkpoint": first.checkpoint}
        found[f"{kind} resumed"] = train("fsdp_grad_op", folder / f"{kind}-again", max_steps=STEPS, **again)
        grad_op = settings | {"sharding": "grad_op", "batch_size": 2, "gradient_accumulation_steps": 2}
        found[f"{kind} grad_op"] = train("fsdp_grad_op", folder / f"{kind}-grad-op", max_steps=STEPS, **grad_op)
    to_ddp = {"resume_from_checkpoint": found["stochastic"].checkpoint}
    found["goes on whole"] = train("ddp", folder / "whole", max_steps=STEPS + 2, gradient_clipping=1.0, **to_ddp)
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    folder = tmp_path_factory.mktemp("low")
    one = train("one", folder / "one", max_steps=STEPS, gradient_clipping=1.0)
    return {"fp32": one} | run_ranks(train_ways, 2, folder)[0]


@pytest.mark.parametrize("way", [*KINDS, *(f"{kind} grad_op" for kind in KINDS)])
def test_sharded_parameters_in_bf16_learn_as_in_fp32(way: str, trained: dict[str, Trained]) -> None:
    assert trained[way].losses == pytest.approx(trained["fp32"].losses, rel=0.03)
    assert trained[way].norms == pytest.approx(trained["fp32"].norms, rel=0.1)
    assert trained[way].losses[-1] < trained[way].losses[0]


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoint_of_bf16_shards_holds_fp32(kind: str, trained: dict[str, Trained]) -> None:
    weights = load(trained[kind].checkpoint, ranks=()).shared["model"]
    assert {value.dtype for value in weights.values()} == {torch.float32}
    is_rounded = all(torch.equal(value, value.bfloat16().float()) for value in weights.values())
    assert is_rounded == (kind == "stochastic")


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_bf16_shards_have_same_bytes(kind: str, trained: dict[str, Trained]) -> None:
    whole, cut = (load(trained[name].checkpoint, ranks=()).shared for name in (kind, f"{kind} resumed"))
    assert all(torch.equal(value, cut["model"][name]) for name, value in whole["model"].items())
    for name, state in whole["optimizer"]["state"].items():
        assert torch.equal(state["exp_avg"], cut["optimizer"]["state"][name]["exp_avg"]), name


def test_bf16_shards_resume_as_whole_fp32_parameters(trained: dict[str, Trained]) -> None:
    found = trained["goes on whole"].losses
    assert len(found) == 2
    assert max(found) < trained["stochastic"].losses[0]


def train_groups(folder: Path) -> Trained:
    return train("hybrid", folder, max_steps=4, bf16_parameters="stochastic", check_replicas=True)


def test_replicas_of_a_bf16_shard_are_rounded_alike(tmp_path: Path, trained: dict[str, Trained]) -> None:
    """The ranks compare what they hold alike as they train."""
    found = run_ranks(train_groups, 4, tmp_path)[0]
    assert found.losses == pytest.approx(trained["stochastic"].losses[:4], rel=0.03)


@quick_products()
def step_in_fp8(ranks: int) -> tuple[list[float], list[str], set[str]]:
    env = worker_env() or WorkerEnv()
    session = Session.open(env, device="cpu", collectives="gloo", timeout_s=60)
    plan = Plan(
        run_dir="",
        batch=BatchPlan(4096 // ranks, ranks),
        mesh=MeshSpec(dp_shard=ranks),
        shard=ShardPlan("full") if ranks > 1 else ShardPlan(),
        precision=PrecisionPlan("fp8"),
        optimizer=OptimizerPlan(learning_rate=1e-3, clip_norm=1.0),
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 1280), nn.ReLU(), nn.Linear(1280, 1280), nn.ReLU(), nn.Linear(1280, 4))
    strategy = TorchMesh(plan)
    strategy.setup(Task(model, nn.CrossEntropyLoss()), session)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4096, 16, generator=generator)
    rows = slice(session.rank * 4096 // ranks, (session.rank + 1) * 4096 // ranks)
    micro = Microbatch((x[rows], (x[rows, 0] > 0).long()), 1.0, 4096 // ranks)
    losses = [torch.tensor(float(strategy.train_step([micro]).loss)) for _ in range(3)]
    means = [float(session.sum("loss", loss)) / ranks for loss in losses]
    kinds = {type(parameter).__name__ for parameter in model.parameters()}
    strategy.close()
    return means, [str(decision) for decision in strategy.decisions], kinds


def test_sharded_fp8_layers_match_one_process() -> None:
    alone, notes, _ = step_in_fp8(1)
    together, told, kinds = run_ranks(step_in_fp8, 2, 2)[0]
    assert told == notes
    assert "1 of 3 linear layers (2)" in told[0]
    assert kinds == {DTensor.__name__}
    assert together == pytest.approx(alone, rel=5e-3)  # weights pass through bf16 on their way to 8 bits
