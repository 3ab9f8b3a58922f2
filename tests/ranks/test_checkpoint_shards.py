"""Ranks that each hold a part of the state write one checkpoint, and other numbers of ranks read it in other parts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from distributed.checkpoint.restore.reading import load, verify
from distributed.checkpoint.restore.restoring import restore
from distributed.checkpoint.save.saver import Saver
from distributed.checkpoint.save.staging import TensorStaging
from distributed.core.env import worker_env
from distributed.core.errors import CheckpointError
from distributed.runtime.session import Session
from distributed.runtime.tensor_shard import Box, TensorShard, whole_box, within
from distributed.testing import run_ranks
from distributed.train.checks.digest import digest


def session() -> Session:
    env = worker_env()
    assert env is not None
    return Session.open(env, device="cpu", collectives="gloo", timeout_s=60)


def whole(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "rows": torch.randn(1003, 1500, generator=generator),  # 6 MB: several chunks on 4 ranks
        "columns": torch.randn(700, 1001, generator=generator).to(torch.bfloat16),
        "fused": torch.randn(24, 5, generator=generator),
        "owned": torch.randn(1_500_000, generator=generator),
        "copied": torch.randn(6, generator=generator),
        "step": torch.tensor(float(step)),
    }


def share_of(length: int, rank: int, ranks: int) -> tuple[int, int]:
    return length * rank // ranks, length * (rank + 1) // ranks


def boxes_of(name: str, shape: tuple[int, ...], rank: int, ranks: int) -> tuple[Box, ...]:
    """What a rank has of each: rows, columns, a range of each third, everything or nothing."""
    if name == "rows":
        return ((share_of(shape[0], rank, ranks), (0, shape[1])),)
    if name == "columns":
        return (((0, shape[0]), share_of(shape[1], rank, ranks)),)
    if name == "fused":
        third = shape[0] // 3
        start, stop = share_of(third, rank, ranks)
        return tuple(((at + start, at + stop), (0, shape[1])) for at in range(0, shape[0], third))
    return (whole_box(shape),) if name in ("copied", "step") or rank == ranks - 1 else ()


def shard(name: str, tensor: torch.Tensor, rank: int, ranks: int) -> TensorShard:
    shape = tuple(tensor.shape)
    boxes = boxes_of(name, shape, rank, ranks)
    pieces = tuple((box, tensor[within(box, whole_box(shape))]) for box in boxes)
    return TensorShard(shape, tensor.dtype, pieces, stores=name not in ("copied", "step") or rank == 0)


def save(root: str) -> list[str]:
    mine, heard = session(), []
    saver = Saver(root, mine, TensorStaging())
    for step in (1, 2, 3):
        held = {name: shard(name, tensor, mine.rank, mine.world_size) for name, tensor in whole(step).items()}
        if step == 2:
            held["copied"] = replace(held["copied"], stores=True)  # by all ranks
        model = held | {"tied": held["rows"], "plain": torch.full((3,), step)}
        own = {"rng": {"words": torch.tensor([mine.rank, step])}}
        if step == 1:
            saver.prepare({"model": model}, own)
        try:
            saver.save(step, {"model": model, "progress": {"step": step}}, own, wait=True)
            heard.append(f"saved {step}")
        except CheckpointError as failed:
            heard.append(str(failed))
    return heard


def read(root: str) -> dict[str, Any]:
    """Rows are read as columns and the other way round; what one rank had is shared out."""
    mine = session()
    other = {"rows": "columns", "columns": "rows", "fused": "columns", "owned": "rows"}
    wanted: dict[str, tuple[Box, ...]] = {}

    def boxes(name: str, shape: tuple[int, ...]) -> tuple[Box, ...] | None:
        short = name.removeprefix("model/")
        if short not in other:
            return None
        rows = ((share_of(shape[0], mine.rank, mine.world_size), *whole_box(shape[1:])),)
        wanted[short] = rows if other[short] == "rows" else boxes_of("columns", shape, mine.rank, mine.world_size)
        return wanted[short]

    restored = restore(root, True, mine, boxes=boxes)
    assert restored is not None
    model, expected = restored.shared["model"], whole(restored.step)
    for name, boxes_here in wanted.items():
        assert [box for box, _ in model[name].pieces] == list(boxes_here)
        for box, piece in model[name].pieces:
            assert torch.equal(piece, expected[name][within(box, whole_box(tuple(expected[name].shape)))]), name
    for name in ("copied", "step"):
        assert torch.equal(model[name], expected[name])
    return {
        "step": restored.step,
        "own": restored.own,
        "tied": model["tied"] is model["rows"],
        "plain": model["plain"].tolist(),
        "chunks": len(restored.verified),
        "digest": digest(restored.shared),
    }


def test_shards_saved_by_four_ranks_load_on_three_and_one(tmp_path: Path) -> None:
    root = str(tmp_path)
    results = run_ranks(save, 4, root)
    assert all(heard == results[0] for heard in results)
    assert (results[0][0], results[0][2]) == ("saved 1", "saved 3")
    assert "model/copied" in results[0][1]
    assert not (tmp_path / "step-000002").exists()

    path = f"{root}/step-000003"
    assert not verify(path).problems
    loaded = load(path)
    for name, tensor in whole(3).items():
        assert torch.equal(loaded.shared["model"][name], tensor), name
    assert loaded.shared["model"]["tied"] is loaded.shared["model"]["rows"]
    entries = loaded.manifest.shared.tensors
    placements = {name.removeprefix("model/"): (e.placement, len(e.pieces)) for name, e in entries.items()}
    assert placements == {
        "rows": ("shard", 4),
        "columns": ("shard", 4),
        "fused": ("shard", 12),
        "owned": ("replicate", 1),
        "copied": ("replicate", 1),
        "step": ("replicate", 1),
        "plain": ("replicate", 1),
    }

    for ranks in (1, 3):
        found = run_ranks(read, ranks, root)
        assert all((result["step"], result["own"], result["tied"]) == (3, None, True) for result in found)
        assert all(result["plain"] == [3, 3, 3] for result in found)
    assert len({result["digest"] for result in found}) == 3
    assert all(result["chunks"] < len(loaded.manifest.chunks) for result in found), "no rank reads everything"
