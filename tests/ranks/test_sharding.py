"""Sharded data parallelism on real ranks: it trains what one process trains, and each rank holds its share only.

All begin on the meta device. Weights are in double precision, so that a wrong mean or norm shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from distributed.strategies.data_parallel.fsdp import accumulate, shard
from distributed.strategies.data_parallel.gradient_norm import GradientNorm
from distributed.strategies.data_parallel.zero1 import ShardedOptimizer, rebind
from distributed.strategies.model.blocks import find_blocks
from distributed.strategies.model.materialize import is_meta, materialize
from distributed.strategies.placement import Layout, local
from distributed.testing import run_ranks
from tests.meshes import joined

VOCAB, HIDDEN, LENGTH, BATCH, ACCUMULATION, STEPS, CLIP, SEED = 64, 32, 8, 8, 2, 20, 0.5, 11
CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out, self.up, self.down = (nn.Linear(*shape) for shape in ((32, 32), (32, 128), (128, 32)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 4, 8).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, HIDDEN))
        return x + self.down(F.gelu(self.up(x)))


class GPT(nn.Module):
    """A small transformer with a tied head, a parameter with fewer rows than ranks, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.scale = nn.Parameter(torch.empty(3))
        self.register_buffer("positions", torch.empty(LENGTH, HIDDEN), persistent=False)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head.weight = self.tokens.weight

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)
        self.positions.copy_(torch.sin(torch.arange(LENGTH * HIDDEN).view(LENGTH, HIDDEN)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale.prod()


@dataclass(frozen=True)
class Case:
    mesh: tuple[int, ...] = (4,)
    reshard: bool = True
    zero1: bool = False
    precision: str = "fp32"
    offload: bool = False
    scaler: bool = False
    steps: int = STEPS
    dtype: torch.dtype = torch.float64


CASES = {
    "full": Case(),
    "hybrid": Case(mesh=(2, 2)),
    "gradients_and_state": Case(reshard=False),
    "state": Case(zero1=True),
    "state_scaler": Case(zero1=True, scaler=True),
    "offload": Case(offload=True, steps=3),
    "bf16": Case(precision="bf16", dtype=torch.float32),
    "fp16": Case(precision="fp16", dtype=torch.float32, scaler=True, steps=3),
}


def make_model(dtype: torch.dtype) -> nn.Module:
    with torch.device("meta"):
        return GPT().to(dtype)


def batches(steps: int) -> Iterator[list[torch.Tensor]]:
    """A global batch for each step, as micro-batches; sequences that count upwards, which can be learnt."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        starts = torch.randint(0, VOCAB, (ACCUMULATION, BATCH, 1), generator=generator)
        yield list((starts + torch.arange(LENGTH + 1)) % VOCAB)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / ACCUMULATION


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def train_alone(dtype: torch.dtype) -> dict[str, Any]:
    model = make_model(dtype)
    materialize(model, Layout(model), CPU, SEED)
    first = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer, losses, norms = make_optimizer(model), [], []
    for micros in batches(STEPS):
        loss = torch.stack([loss_of(model, micro) for micro in micros]).sum()
        loss.backward()
        losses.append(loss.item())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "first": first, "last": model.state_dict()}


def nbytes(tensors: list[Any]) -> int:
    return sum(local(t).numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))


def pieces(model: nn.Module, layout: Layout) -> dict[str, Any]:
    shards = {name: layout.shard(name, p.detach()) for name, p in model.named_parameters()}
    return {n: (p.stores, [(box, piece.clone()) for box, piece in p.pieces]) for n, p in shards.items()}


def train_in_ranks(case: Case) -> dict[str, Any]:
    model = make_model(case.dtype)
    layout, before = Layout(model), {id(p): name for name, p in model.named_parameters()}
    optimizer: Any = make_optimizer(model)  # of parameters that will be replaced
    called: nn.Module = model
    if not case.zero1:
        axes = ("dp_replicate", "dp_shard")[-len(case.mesh) :]
        mesh = init_device_mesh("cpu", case.mesh, mesh_dim_names=axes)
        options: dict[str, Any] = {"precision": case.precision, "cpu_offload": case.offload, "device": CPU}
        shard(model, layout, mesh, blocks=find_blocks(model), reshard_after_forward=case.reshard, **options)
    materialize(model, layout, CPU, SEED)
    rebind(optimizer, before, model, layout)
    if case.zero1:
        called = DistributedDataParallel(model)
        names = {p: name for name, p in model.named_parameters()}
        optimizer = ShardedOptimizer(optimizer, names, dist.group.WORLD, layout, joined())
    copies = dist.get_world_size() if case.zero1 else case.mesh[0] if len(case.mesh) == 2 else 1
    gradient = GradientNorm(dict(model.named_parameters()), layout, lambda name: copies, joined())
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=case.scaler)
    first, losses, norms = pieces(model, layout), [], []
    share = slice(dist.get_rank() * 2, dist.get_rank() * 2 + 2)
    for micros in batches(case.steps):
        total = torch.zeros(())
        for index, micro in enumerate(micros):
            synchronizes = index == len(micros) - 1
            if not case.zero1:
                accumulate([model], synchronizes)
            with called.no_sync() if case.zero1 and not synchronizes else nullcontext():  # type: ignore[operator]
                part = loss_of(called, micro[share])
                scaler.scale(part).backward()
            total = total + part.detach()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
        scaler.unscale_(optimizer) if case.scaler else None
        norms.append(gradient.clip(CLIP).item())
        gradients = nbytes([p.grad for p in model.parameters()])
        scaler.step(optimizer)
        scaler.update()
        for parameter in model.parameters():
            parameter.grad = None
    states = (optimizer.optimizer if case.zero1 else optimizer).state
    held = [value for state in states.values() for value in state.values()]
    return {
        "losses": losses,
        "norms": norms,
        "first": first,
        "last": pieces(model, layout),
        "bytes": nbytes(list(model.parameters())) + gradients + nbytes(held),
        "state_bytes": nbytes(held),
        "tied": model.head.weight is model.tokens.weight,
        "buffer": model.positions,
    }


def run_all(cases: dict[str, Case]) -> dict[str, dict[str, Any]]:
    return {name: train_in_ranks(case) for name, case in cases.items()}


def assemble(like: dict[str, torch.Tensor], ranks: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The whole tensors of what those ranks hold that store it; each element must be there once."""
    whole = {}
    for name in ranks[0]:
        value, times = torch.zeros_like(like[name]), torch.zeros(like[name].shape)
        for stores, boxes in (rank[name] for rank in ranks):
            for box, piece in boxes if stores else []:
                where = tuple(slice(*pair) for pair in box)
                value[where] = piece
                times[where] += 1
        assert times.min() == times.max() == 1, name
        whole[name] = value
    return whole


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, dict[str, Any]]]:
    return run_ranks(run_all, 4, CASES)


@pytest.fixture(scope="module")
def alone() -> dict[torch.dtype, dict[str, Any]]:
    return {dtype: train_alone(dtype) for dtype in (torch.float64, torch.float32)}


@pytest.mark.parametrize("name", ["full", "hybrid", "gradients_and_state", "state", "state_scaler", "offload"])
def test_sharded_ranks_match_one_process(name: str, ranks: Any, alone: Any) -> None:
    expected = alone[torch.float64]
    for rank in ranks:
        count = len(rank[name]["losses"])
        assert rank[name]["losses"] == pytest.approx(expected["losses"][:count], abs=1e-6)
        assert rank[name]["norms"] == pytest.approx(expected["norms"][:count], abs=1e-6)
        assert rank[name]["tied"]
    assert min(expected["norms"]) > 0, "a norm that is clipped"
    assert max(expected["norms"]) > CLIP
    assert expected["losses"][-1] < expected["losses"][0] / 2


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_sharded_mixed_precision_is_close_to_fp32(name: str, ranks: Any, alone: Any) -> None:
    for rank in ranks:
        losses = rank[name]["losses"]
        assert losses == pytest.approx(alone[torch.float32]["losses"][: len(losses)], rel=0.05, abs=0.02)


@pytest.mark.parametrize("name", ["full", "hybrid", "gradients_and_state"])
def test_shards_of_all_ranks_make_the_whole_model(name: str, ranks: Any, alone: Any) -> None:
    expected = alone[torch.float64]
    first = assemble(expected["first"], [rank[name]["first"] for rank in ranks])
    assert all(torch.equal(value, expected["first"][key]) for key, value in first.items()), "the same bytes at first"
    last = assemble(expected["last"], [rank[name]["last"] for rank in ranks])
    for key, value in last.items():
        torch.testing.assert_close(value, expected["last"][key], atol=1e-6, rtol=0, msg=key)
    assert all(torch.equal(rank[name]["buffer"], ranks[0][name]["buffer"]) for rank in ranks)


def test_each_rank_holds_only_its_shard(ranks: Any, alone: Any) -> None:
    model = make_model(torch.float64)
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    tensors = len(list(model.parameters()))
    for rank in ranks:
        assert rank["full"]["bytes"] == pytest.approx(whole * 4 / 4, abs=4 * tensors * 8), "one of each row of AdamW's"
        assert rank["hybrid"]["bytes"] == pytest.approx(whole * 4 / 2, abs=4 * tensors * 8)
    shares = [rank["state"]["state_bytes"] for rank in ranks]
    assert sum(shares) == pytest.approx(2 * whole, abs=tensors * 8)
    assert max(shares) < 2 * whole / 4 * 1.5


def test_meta_device_model_is_recognised() -> None:
    assert is_meta(make_model(torch.float32))
    assert not is_meta(nn.Linear(2, 2))
