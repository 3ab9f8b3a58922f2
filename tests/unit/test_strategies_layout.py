"""Where the parts of a tensor are: every element is on some rank once, whatever cuts it, and is found there again."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from distributed.strategies.data_parallel.fsdp import shard
from distributed.strategies.data_parallel.zero1 import share_out
from distributed.strategies.placement import Cut, Layout, rows_of

Cutter = Callable[[int, int], Cut | None]  # of a rank among so many


def along(dim: int, parts: int = 1, length: int = 24) -> Cutter:
    """Cut evenly, each of `parts` by itself, as a fused query, key and value is."""

    def cut(rank: int, ranks: int) -> Cut:
        part = length // parts
        share = part // ranks
        return Cut(dim, tuple((p * part + rank * share, p * part + (rank + 1) * share) for p in range(parts)))

    return cut


@pytest.mark.parametrize("data_ranks", [1, 2, 5, 16])
@pytest.mark.parametrize(
    ("shape", "cutter"),
    [
        ((24, 5), lambda rank, ranks: None),
        ((24, 5), along(0)),
        ((24, 5), along(0, parts=3)),
        ((7, 24), along(1)),
        ((7, 24, 2), along(1, parts=3)),
        ((24,), along(0, parts=2)),
        ((3,), lambda rank, ranks: None),
    ],
)
def test_shards_of_any_layout_cover_the_tensor_once(shape: tuple[int, ...], cutter: Cutter, data_ranks: int) -> None:
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    tensor_ranks = 2 if cutter(0, 2) else 1
    found, times = torch.full(shape, -1.0), torch.zeros(shape)
    for tensor_rank, data_rank in itertools.product(range(tensor_ranks), range(data_ranks)):
        layout = Layout(nn.ParameterDict({"w": torch.empty(shape)}))
        cut = cutter(tensor_rank, tensor_ranks)
        if cut is not None:
            layout.cut("w", cut)
        mine = layout.take("w", whole)
        low, high = rows_of(mine.shape[0], data_rank, data_ranks)
        layout.shard_rows("w", (low, high))
        held = mine[low:high].clone()
        own = layout.shard("w", held)
        assert [box for box, _ in own.pieces] == list(layout.boxes("w"))
        for box, piece in own.pieces:
            where = tuple(slice(*pair) for pair in box)
            found[where] = piece
            times[where] += 1
        back = torch.zeros_like(held)
        layout.take_shard("w", own, back)
        assert torch.equal(back, held)
    assert torch.equal(found, whole)
    assert (times == 1).all()


def test_rows_are_split_like_torch_chunk() -> None:
    for length, ranks in itertools.product(range(1, 20), range(1, 9)):
        chunks = [len(chunk) for chunk in torch.arange(length).chunk(ranks)]
        rows = [rows_of(length, rank, ranks) for rank in range(ranks)]
        assert [high - low for low, high in rows] == chunks + [0] * (ranks - len(chunks))


def test_tensor_of_another_rank_has_no_shard_here() -> None:
    layout = Layout(nn.Linear(2, 2))
    layout.leave_out("weight")
    assert not layout.is_here("weight")
    assert layout.shard("weight", None).pieces == ()
    assert layout.is_whole("bias")


def test_optimizer_state_owners_are_balanced_and_deterministic() -> None:
    sizes = {f"layers.{i}.{n}": size for i in range(13) for n, size in (("w", 4096), ("v", 1000), ("b", 64))}
    owners = share_out(sizes, 4)
    loads = [sum(size for name, size in sizes.items() if owners[name] == rank) for rank in range(4)]
    assert max(loads) < 1.3 * sum(loads) / 4
    assert share_out(dict(reversed(sizes.items())), 4) == owners
    owners = share_out({"embedding": 1000} | {f"layers.{i}": 100 for i in range(10)}, 2)
    assert [name for name, rank in owners.items() if rank == 0] == ["embedding"], "it is as large as all the others"


@pytest.mark.parametrize("mesh_shape", [(1024,), (4, 256)])
def test_layout_of_1024_ranks_needs_no_devices(mesh_shape: tuple[int, ...]) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=517, world_size=1024)
    try:
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp_replicate", "dp_shard")[-len(mesh_shape) :])
        with FakeTensorMode():
            model = nn.Sequential(nn.Embedding(32000, 4096), *(nn.Linear(4096, 14336) for _ in range(2)))
            layout = Layout(model)
            options: dict[str, Any] = {"precision": "bf16", "cpu_offload": False, "device": torch.device("cpu")}
            shard(model, layout, mesh, blocks=["1", "2"], reshard_after_forward=True, **options)
            held = layout.nbytes(dict(model.named_parameters()))
    finally:
        dist.destroy_process_group()
    whole = sum(p.numel() * 4 for p in model.parameters())
    rank = 517 % mesh_shape[-1]
    assert layout.boxes("1.weight") == (
        ((rank * 14336 // mesh_shape[-1], (rank + 1) * 14336 // mesh_shape[-1]), (0, 4096)),
    )
    assert held == pytest.approx(whole / mesh_shape[-1], rel=0.02)
