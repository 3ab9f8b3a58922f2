"""What sharding is made of, on two ranks: equal first weights, shares of an optimizer's state, parts of a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from distributed.core.errors import TaskError
from distributed.strategies.data_parallel.fsdp import shard
from distributed.strategies.data_parallel.zero1 import ShardedOptimizer
from distributed.strategies.model.materialize import send_weights
from distributed.strategies.placement import Cut, Layout
from distributed.testing import run_ranks
from tests.meshes import joined

CPU = torch.device("cpu")


def differ_then_agree() -> dict[str, Any]:
    """Each rank has made its own model; then two of them share out the optimizer's state."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))
    model[0].weight.data = model[0].weight.data.t()  # dense, but not in order
    model[1].running_mean.fill_(dist.get_rank())
    equal = torch.arange(16.0)  # on all ranks
    model.register_buffer("equal", equal)
    model.register_buffer("swapped", torch.tensor([0.0, 1.0] if dist.get_rank() else [1.0, 0.0]))
    versions = {name: value._version for name, value in model.named_buffers()}
    send_weights(model, joined())
    written = {name for name, value in model.named_buffers() if value._version != versions[name]}
    assert written == ({"1.running_mean", "swapped"} if dist.get_rank() else set()), "only what differed is written"
    assert model.swapped.tolist() == [1.0, 0.0]
    del model.equal, model.swapped
    values = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    names = {p: name for name, p in model.named_parameters()}
    sharded = ShardedOptimizer(optimizer, names, dist.group.WORLD, Layout(model), joined())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        sharded.step()
        schedule.step()
    with pytest.raises(TaskError, match="LBFGS"):
        ShardedOptimizer(torch.optim.LBFGS(model.parameters()), names, dist.group.WORLD, Layout(model), joined())
    last = {name: value.clone() for name, value in model.state_dict().items()}
    owned = [name for name in names.values() if sharded.owns(name)]
    has_state = [names[p] for p in optimizer.state]
    return {"sent": values, "last": last, "bytes": sharded.state_bytes(), "owned": owned, "has_state": has_state}


class Stage(nn.Module):
    """Some blocks of a model, and what comes after them."""

    def __init__(self, blocks: list[nn.Module], scale: nn.Parameter) -> None:
        super().__init__()
        self.blocks, self.scale = nn.ModuleList(blocks), scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.scale


def shard_a_part() -> dict[str, Any]:
    """Of three blocks the first is on other ranks, and of the second one matrix is cut; the third is tied to the root.

    Returns how far its gradients are from those of the same without sharding.
    """

    def make() -> Any:
        torch.manual_seed(3)
        blocks = [nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh()) for _ in range(3)]
        made = Stage(blocks, nn.Parameter(torch.ones(6)))
        blocks[2].register_parameter("scale", made.scale)
        return made

    model, plain = make(), make()
    layout = Layout(model)
    cut = Cut(0, ((0, 2), (3, 4)))
    for each in (model, plain):
        each.blocks[1][0].weight = nn.Parameter(cut.take(each.blocks[1][0].weight.detach()))
        each.blocks[1].append(nn.ZeroPad1d((0, 3)))
    layout.cut("blocks.1.0.weight", cut)
    model.blocks[0][0].weight = nn.Parameter(torch.empty(6, 6, device="meta"))
    layout.leave_out("blocks.0.0.weight")
    stage = Stage([*model.blocks[1:]], model.scale)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    options: dict[str, Any] = {"precision": "fp32", "cpu_offload": False, "device": CPU, "roots": [stage]}
    blocks = ["blocks.0", "blocks.1", "blocks.2"]
    shard(model, layout, mesh, blocks=blocks, reshard_after_forward=True, **options)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    mine = x[dist.get_rank() * 2 :][:2]
    stage(mine).square().mean().backward()
    Stage([*plain.blocks[1:]], plain.scale)(x).square().mean().backward()
    wrong = 0.0
    for name in ("blocks.1.0.weight", "blocks.2.0.weight", "scale"):
        gradient, expected = model.get_parameter(name).grad, plain.get_parameter(name).grad
        wrong = max(wrong, (gradient.full_tensor() - expected).abs().max().item())
    assert model.scale is model.blocks[2].scale is stage.scale
    return {"wrong": wrong, "left_out": type(model.blocks[0][0].weight), "boxes": layout.boxes("blocks.1.0.weight")}


def overflow_on_one_rank() -> list[float]:
    """The scale after a step in which only rank 1's rows have an infinite gradient, and how far the weights moved."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False)
    layout, whole = Layout(model), model.weight
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    options: dict[str, Any] = {"precision": "fp16", "cpu_offload": False, "device": CPU}
    shard(model, layout, mesh, blocks=[], reshard_after_forward=True, **options)
    assert not whole.untyped_storage().nbytes(), "whoever holds the whole parameter keeps no memory"
    before = model.weight.full_tensor().detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    factor = torch.tensor([1.0, 1.0, 1.0, float("inf")])
    scaler.scale((model(torch.ones(2, 4)) * factor).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return [scaler.get_scale(), (model.weight.full_tensor() - before).abs().sum().item()]


def run_small_ones() -> dict[str, Any]:
    return differ_then_agree() | {"part": shard_a_part(), "overflow": overflow_on_one_rank()}


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return run_ranks(run_small_ones, 2)


def test_submodule_is_sharded_and_excluded_parameter_is_not(two_ranks: Any) -> None:
    for rank, found in enumerate(two_ranks):
        assert found["part"]["wrong"] < 1e-6
        assert found["part"]["left_out"] is nn.Parameter, "not sharded"
        assert found["part"]["boxes"] == ((((0, 2), (0, 6)),), (((3, 4), (0, 6)),))[rank]


def test_an_overflow_on_one_rank_skips_the_step_on_all(two_ranks: Any) -> None:
    assert [found["overflow"] for found in two_ranks] == [[2.0, 0.0], [2.0, 0.0]]


def test_ranks_start_equal_and_shard_the_optimizer_state(two_ranks: Any) -> None:
    one, other = two_ranks
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))
    assert torch.equal(other["sent"]["0.weight"], expected[0].weight.t())
    optimizer = torch.optim.Adam(expected.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    expected[0].weight.data = expected[0].weight.data.t()
    for _ in range(2):
        for parameter in expected.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        schedule.step()
    for name, value in expected.state_dict().items():
        assert torch.equal(one["sent"][name], other["sent"][name])
        assert torch.equal(one["last"][name], other["last"][name])
        torch.testing.assert_close(one["last"][name], value, msg=name)
    assert {*one["owned"], *other["owned"]} == {name for name, _ in expected.named_parameters()}
    assert not {*one["owned"]} & {*other["owned"]}
    assert (set(one["has_state"]), set(other["has_state"])) == (set(one["owned"]), set(other["owned"]))
    assert one["bytes"] == pytest.approx(other["bytes"], rel=0.1)
