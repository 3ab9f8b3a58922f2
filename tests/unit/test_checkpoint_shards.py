"""Tensors that ranks hold in parts come back byte for byte in any other parts, and what does not fit is refused."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from distributed.checkpoint.exchange.catalog import open_one
from distributed.checkpoint.exchange.diff import compare
from distributed.checkpoint.exchange.export import export_checkpoint
from distributed.checkpoint.exchange.verify import verify_all
from distributed.checkpoint.format.boxes import box_shape, find_fault
from distributed.checkpoint.format.digests import digest_bytes, digest_json
from distributed.checkpoint.format.layout import ChunkPlan, share
from distributed.checkpoint.format.manifest import Manifest, Part, manifest_file, render, step_name
from distributed.checkpoint.format.parsing import Damaged, component_digests, parse_chunks, parse_part
from distributed.checkpoint.format.tensors import digest_components
from distributed.checkpoint.format.tree_spec import TreeSpec
from distributed.checkpoint.restore.gathering import Boxes
from distributed.checkpoint.restore.reading import load, verify
from distributed.checkpoint.restore.restoring import Restored, restore
from distributed.checkpoint.save.assembly import (
    RankPart,
    StoredChunk,
    assemble,
    chunk_lengths,
    parse_rank_part,
    render_rank_part,
    stored_boxes,
)
from distributed.checkpoint.save.outline import outline
from distributed.checkpoint.save.saver import Saver
from distributed.checkpoint.save.staging import HostBuffer, TensorStaging, copy_chunks
from distributed.checkpoint.storage.chunks import ChunkStore, chunk_name
from distributed.checkpoint.storage.local import LocalStorage
from distributed.core.env import WorkerEnv
from distributed.core.errors import CheckpointError
from distributed.runtime.session import Session
from distributed.runtime.tensor_shard import Box, TensorShard, whole_box
from distributed.train.checks.digest import digest

TYPES = (torch.float32, torch.bfloat16, torch.int8, torch.float64, torch.bool, torch.complex128, torch.float8_e5m2)
SHAPES = ((), (0,), (5, 0, 2), (1,), (7,), (16, 6), (5, 7), (3, 4, 5), (2, 3, 2, 4), (1, 40), (600_000,), (700, 3001))


def alone() -> Session:
    return Session(WorkerEnv(), torch.device("cpu"), None)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Every byte is random, so that one in a wrong place shows."""
    count = torch.Size(shape).numel() * dtype.itemsize
    words = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return (words % 2).to(torch.bool).reshape(shape) if dtype == torch.bool else words.view(dtype).reshape(shape)


def part_of(whole: torch.Tensor, box: Box) -> torch.Tensor:
    return whole[tuple(slice(*pair) for pair in box)]


def random_cuts(numbers: random.Random, box: Box, most: int) -> list[Box]:
    """A tiling of a box: it is cut in two again and again, along any dimension; a cut may leave one side empty."""
    boxes = [box]
    for _ in range(numbers.randrange(most)):
        one = boxes.pop(numbers.randrange(len(boxes)))
        if not one:
            return [one]
        dim = numbers.randrange(len(one))
        at = numbers.randint(*one[dim])
        boxes += [(*one[:dim], pair, *one[dim + 1 :]) for pair in ((one[dim][0], at), (at, one[dim][1]))]
    return boxes


def split(whole: torch.Tensor, owners: Sequence[Sequence[Box]], stores: bool = True) -> list[TensorShard]:
    """A shard for each rank; the pieces are views, most of them not contiguous."""
    shape = tuple(whole.shape)
    return [
        TensorShard(shape, whole.dtype, tuple((box, part_of(whole, box)) for box in boxes), stores) for boxes in owners
    ]


def deal(numbers: random.Random, boxes: Sequence[Box], ranks: int) -> list[list[Box]]:
    owners: list[list[Box]] = [[] for _ in range(ranks)]
    for box in boxes:
        owners[numbers.randrange(ranks)].append(box)
    return owners


def save_as(root: Path, trees: Sequence[dict[str, Any]], step: int = 1) -> Manifest:
    """A save of several ranks in one process: each stores its part, and rank 0 puts them together."""
    storage = LocalStorage(root)
    chunks = ChunkStore(storage)

    def store(plan: Sequence[ChunkPlan], tensors: dict[str, torch.Tensor]) -> list[StoredChunk]:
        stored = []
        for chunk, content in copy_chunks(plan, tensors, HostBuffer(pinned=False)):
            found, _ = chunks.put(content)
            blocks = [digest_bytes(content[s.offset : s.offset + s.length]) for s in chunk.ranges]
            stored.append(StoredChunk(found, tuple(blocks)))
        return stored

    parts, first = [], None
    for rank, tree in enumerate(trees):
        whole, tensors = outline(tree)
        first = first or whole
        places = {id(chunk): index for index, chunk in enumerate(whole.plan)}
        mine = share(list(whole.plan), rank, len(trees))
        shared = {places[id(chunk)]: done for chunk, done in zip(mine, store(mine, tensors), strict=True)}
        in_boxes = store(whole.box_plan, tensors)
        lengths = chunk_lengths(whole.box_plan, in_boxes)
        part = RankPart(
            rank,
            signature=whole.signature,
            shared=shared,
            own=Part({}, {}),
            chunks=lengths,
            written_bytes=0,
            boxes=stored_boxes(whole, in_boxes),
        )
        parts.append(parse_rank_part(render_rank_part(part), "part"))
    assert isinstance(first, TreeSpec)
    manifest = assemble(step, first, parts, meta={}, metric=None, frameworks={})
    storage.write(manifest_file(step_name(step)), render(manifest))
    return manifest


def these(by_name: dict[str, tuple[Box, ...]]) -> Boxes:
    return lambda name, shape: by_name.get(name)


def read_as(root: Path, wanted: Boxes) -> Restored:
    restored = restore(str(root), True, alone(), boxes=wanted)
    assert restored is not None
    return restored


@pytest.mark.parametrize(("seed", "dtype"), [(seed, TYPES[seed % len(TYPES)]) for seed in range(35)])
def test_saved_shards_load_as_any_other_shards(tmp_path: Path, seed: int, dtype: torch.dtype) -> None:
    numbers = random.Random(seed)
    ranks = numbers.randint(1, 6)
    whole = {str(number): filled(shape, dtype, seed + number) for number, shape in enumerate(SHAPES)}
    whole["odd"] = filled((3,), torch.int8, seed)  # what is packed after it begins at an odd byte
    trees: list[dict[str, Any]] = [{"model": {"plain": filled((11, 3), dtype, 99)}} for _ in range(ranks)]
    for name, tensor in whole.items():
        cuts = random_cuts(numbers, whole_box(tuple(tensor.shape)), 9)
        for tree, shard in zip(trees, split(tensor, deal(numbers, cuts, ranks)), strict=True):
            tree["model"][name] = shard
    manifest = save_as(tmp_path, trees)
    assert manifest.shared.tensors["model/plain"].placement == "replicate"
    path = str(tmp_path / "step-000001")
    assert not verify(path).problems
    whole["plain"] = trees[0]["model"]["plain"]

    loaded = load(path).shared["model"]
    assert all(raw(loaded[name]) == raw(tensor) for name, tensor in whole.items())
    wanted = {name: random_cuts(numbers, whole_box(tuple(tensor.shape)), 9) for name, tensor in whole.items()}
    wanted |= {name: boxes[: numbers.randint(0, len(boxes))] for name, boxes in wanted.items()}
    restored = read_as(tmp_path, lambda name, shape: tuple(wanted[name.removeprefix("model/")]))
    for name, tensor in whole.items():
        shard = restored.shared["model"][name]
        assert (shard.shape, shard.dtype) == (tuple(tensor.shape), tensor.dtype)
        assert [box for box, _ in shard.pieces] == wanted[name]
        for box, piece in shard.pieces:
            assert piece.is_contiguous()
            assert (tuple(piece.shape), piece.dtype) == (box_shape(box), tensor.dtype)
            assert raw(piece) == raw(part_of(tensor, box)), (name, box)


def test_whole_tensors_read_as_shards_are_saved_whole_again(tmp_path: Path) -> None:
    model: dict[str, Any] = {
        "w": torch.randn(3000, 700),
        "b": torch.randn(7),
        "scale": torch.tensor(2.5),
        "none": torch.empty(0, 3),
    }
    model["half"] = torch.randn(5).to(torch.bfloat16)
    Saver(str(tmp_path / "a"), alone(), TensorStaging(), asynchronous=False).save(1, {"model": model, "step": 3}, {})
    halves: list[dict[str, tuple[Box, ...]]] = [
        {"model/w": (((0, 3000), (0, 333)),), "model/b": (((0, 3),),)},
        {"model/w": (((0, 3000), (333, 700)),), "model/b": (((3, 7),),)},
    ]
    trees = [read_as(tmp_path / "a", these(half)).shared for half in halves]
    assert all(isinstance(tree["model"]["scale"], torch.Tensor) for tree in trees)
    save_as(tmp_path / "b", trees)
    found = load(str(tmp_path / "b" / "step-000001")).shared
    assert found["step"] == 3
    assert digest_components(found) == digest_components({"model": model, "step": 3})


def test_shard_load_reads_only_the_chunks_it_needs(tmp_path: Path) -> None:
    rows = filled((4096, 4096), torch.float32, 1)  # 64 MiB
    model = {"w": rows, "other": filled((2**21,), torch.float32, 2)}
    Saver(str(tmp_path), alone(), TensorStaging(), asynchronous=False).save(1, {"model": model}, {})
    read = read_as(tmp_path, lambda name, shape: (((1024, 2048), (5, 9)),) if name == "model/w" else ())
    assert raw(read.shared["model"]["w"].pieces[0][1]) == raw(rows[1024:2048, 5:9])
    assert read.shared["model"]["other"].pieces == ()
    assert len(read.verified) == 4
    for digest_ in read.manifest.chunks.keys() - read.verified:
        (tmp_path / chunk_name(digest_)).unlink()
    assert len(read_as(tmp_path, lambda name, shape: (((1024, 2048), (5, 9)),) if "w" in name else ()).verified) == 4
    with pytest.raises(CheckpointError, match="missing"):
        read_as(tmp_path, lambda name, shape: (((1024, 2049), (5, 9)),) if name == "model/w" else ())


def test_tensor_of_one_rank_is_stored_as_replicated(tmp_path: Path) -> None:
    whole = {"large": torch.randn(3_000_000), "small": torch.randn(3, 5).t(), "scalar": torch.tensor(1.5)}
    whole["none"] = torch.empty(0, 2)
    owners = {"large": 1, "small": 0, "scalar": 2, "none": 1}
    trees: list[dict[str, Any]] = [
        {
            "model": {
                name: split(tensor, [[whole_box(tuple(tensor.shape))] if owners[name] == rank else []])[0]
                for name, tensor in whole.items()
            }
        }
        for rank in range(3)
    ]
    manifest = save_as(tmp_path / "parts", trees)
    Saver(str(tmp_path / "plain"), alone(), TensorStaging(), asynchronous=False).save(1, {"model": whole}, {})
    plain = load(str(tmp_path / "plain" / "step-000001")).manifest
    assert manifest.digests == plain.digests == digest_components({"model": whole})
    for name, entry in manifest.shared.tensors.items():
        assert (entry.placement, [piece.ranges for piece in entry.pieces]) == ("replicate", [None])
        assert entry.digest == plain.shared.tensors[name].digest
    assert manifest.shared.tensors["model/large"] == plain.shared.tensors["model/large"], "the same chunks"


def test_saver_copies_shards_before_it_returns(tmp_path: Path) -> None:
    whole = filled((64, 3000), torch.float32, 0)
    state = whole.clone()
    left, right = ((0, 64), (0, 1700)), ((0, 64), (1700, 3000))
    shard = split(state, [[right, left]])[0]
    shared = {"model": {"w": shard, "tied": shard, "plain": torch.ones(3)}}
    own = {"rng": {"words": split(torch.arange(4), [[((0, 4),)]])[0]}}
    saver = Saver(str(tmp_path), alone(), TensorStaging())
    saver.prepare(shared, own)
    for step in (1, 2):
        saver.save(step, shared, own)
        saver.wait()
    saver.save(3, shared, own)
    state.zero_()
    saver.close()
    found = load(str(tmp_path / "step-000003"))
    assert torch.equal(found.shared["model"]["w"].view(torch.int32), whole.view(torch.int32))
    assert found.shared["model"]["tied"] is found.shared["model"]["w"]
    assert found.own[0]["rng"]["words"].tolist() == [0, 1, 2, 3]
    entry = found.manifest.shared.tensors["model/w"]
    assert (entry.placement, [piece.ranges for piece in entry.pieces]) == ("shard", [left, right])
    assert saver.last_saved is not None
    assert saver.last_saved.written_bytes == 0, "the same bytes were stored by the first save"
    assert saver.last_saved.total_bytes == whole.nbytes + 12 + 32
    read = read_as(tmp_path, lambda name, shape: (left,) if name == "model/w" else None)
    assert read.shared["model"]["tied"] is read.shared["model"]["w"]
    as_it_was = split(whole, [[left, right]])[0]
    live = digest_components({"model": {**shared["model"], "w": as_it_was, "tied": as_it_was}})
    assert found.manifest.digests["model"] == live["model"]


BAD_CUTS: dict[str, list[list[Box]]] = {
    "a gap": [[((0, 2), (0, 6))], [((3, 4), (0, 6))]],
    "an overlap": [[((0, 3), (0, 6))], [((2, 4), (0, 6))]],
    "an overlap as large as a gap": [[((0, 2), (0, 6))], [((1, 3), (0, 6))]],
    "twice the same": [[((0, 4), (0, 6))], [((0, 4), (0, 6))]],
    "nothing": [[], []],
}


@pytest.mark.parametrize("name", BAD_CUTS)
def test_shards_that_do_not_cover_the_tensor_are_refused(tmp_path: Path, name: str) -> None:
    whole = torch.arange(24).reshape(4, 6)
    trees = [{"model": {"good": torch.ones(2), "w": shard}} for shard in split(whole, BAD_CUTS[name])]
    with pytest.raises(CheckpointError, match="model/w"):
        save_as(tmp_path, trees)
    assert not (tmp_path / "step-000001").exists()


def test_replica_that_is_not_stored_does_no_harm(tmp_path: Path) -> None:
    whole = torch.arange(24).reshape(4, 6)
    shards = [*split(whole, [[whole_box((4, 6))]]), *split(whole * 0, [[whole_box((4, 6))]], stores=False)]
    save_as(tmp_path, [{"model": {"w": shard}} for shard in shards])
    assert torch.equal(load(str(tmp_path / "step-000001")).shared["model"]["w"], whole)


def test_signature_depends_on_shape_and_dtype_not_on_ranges() -> None:
    whole = torch.arange(24).reshape(4, 6)
    one, other = split(whole, [[((0, 2), (0, 6))], [((2, 4), (0, 6))]])
    signatures = [
        outline({"model": {"w": leaf}})[0].signature
        for leaf in (
            one,
            other,
            whole,
            replace(one, shape=(5, 6)),
            TensorShard((4, 6), torch.float32),
            TensorShard((4, 6), torch.int64),
        )
    ]
    assert signatures[0] == signatures[1] == signatures[5]
    assert len(set(signatures)) == 4


@pytest.mark.parametrize(
    "shard",
    [
        TensorShard((4, 6), torch.float32, ((((0, 2), (0, 6)), torch.zeros(2, 5)),)),
        TensorShard((4, 6), torch.float32, ((((3, 5), (0, 6)), torch.zeros(2, 6)),)),
        TensorShard((4, 6), torch.float32, ((((0, 2),), torch.zeros(2)),)),
        TensorShard((4, 6), torch.float32, ((((0, 2), (0, 6)), torch.zeros(2, 6, dtype=torch.float64)),)),
        TensorShard((4, 6), torch.quint8),
    ],
)
def test_inconsistent_shard_is_refused_by_name(tmp_path: Path, shard: TensorShard) -> None:
    with pytest.raises(CheckpointError, match="model/w"):
        Saver(str(tmp_path), alone(), TensorStaging()).save(1, {"model": {"w": shard}}, {})


def test_range_outside_the_stored_tensor_is_refused_by_name(tmp_path: Path) -> None:
    Saver(str(tmp_path), alone(), TensorStaging(), asynchronous=False).save(1, {"model": {"w": torch.ones(4, 6)}}, {})
    bad: list[Box] = [((0, 5), (0, 6)), ((0, 4),), ((3, 2), (0, 6)), ((-1, 2), (0, 6))]
    for box in bad:
        with pytest.raises(CheckpointError, match="model/w"):
            read_as(tmp_path, these({"model/w": (box,)}))


def test_restore_report_compares_whole_shapes(tmp_path: Path) -> None:
    Saver(str(tmp_path), alone(), TensorStaging(), asynchronous=False).save(
        1, {"model": {"w": torch.ones(4, 6), "v": torch.ones(2)}}, {}
    )
    expected = {
        "w": TensorShard((4, 6), torch.float32),
        "v": TensorShard((3,), torch.float32),
        "new": TensorShard((1,), torch.int8),
    }
    restored = restore(str(tmp_path), True, alone(), expected={"model": expected}, boxes=lambda name, shape: ())
    assert restored is not None
    assert restored.report.missing == ("model/new",)
    assert len(restored.report.mismatched) == 1
    assert "model/v" in restored.report.mismatched[0]


def forge(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the tensor model/w of a manifest, with digests that fit where it can be read at all."""
    document = json.loads(path.read_text())
    change(document["shared"]["tensors"]["model/w"])
    del document["digest"]
    try:
        part = parse_part(document["shared"], parse_chunks(document["chunks"], ""), "")
        document["digests"] = component_digests(part, (Part({}, {}),))
    except CheckpointError:
        pass
    path.write_text(json.dumps(document | {"digest": digest_json(document)}))


def straddle(entry: dict[str, Any]) -> None:
    digest_, offset, length = entry["pieces"][0]["refs"][0]
    entry["pieces"][0]["refs"] = [[digest_, offset, 5], [digest_, offset + 5, length - 5]]


FORGERIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "overlap": lambda entry: entry["pieces"][1]["ranges"].__setitem__(0, [0, 2]),
    "outside": lambda entry: entry["pieces"][1]["ranges"].__setitem__(0, [3, 5]),
    "a gap": lambda entry: entry["pieces"].pop(),
    "larger shape": lambda entry: entry.update(shape=[5, 6]),
    "no ranges": lambda entry: entry["pieces"][0].update(ranges=None),
    "one dimension": lambda entry: entry["pieces"][0].update(ranges=[[0, 12]]),
    "backwards": lambda entry: entry["pieces"][0]["ranges"].__setitem__(0, [2, 0]),
    "too few bytes": lambda entry: entry["pieces"][0]["refs"][0].__setitem__(2, 44),
    "too many dimensions": lambda entry: (
        entry.update(shape=[4, 6] + [1] * 40),
        [piece["ranges"].extend([[0, 1]] * 40) for piece in entry["pieces"]],
    ),
    "an element in two chunks": straddle,
}


@pytest.mark.parametrize("name", FORGERIES)
def test_forged_shard_ranges_are_refused(tmp_path: Path, name: str) -> None:
    cut = [[((0, 2), (0, 6))], [((2, 4), (0, 6))]]
    trees = [{"model": {"w": shard}} for shard in split(torch.arange(24.0).reshape(4, 6), cut)]
    manifest = replace(save_as(tmp_path, trees), world_size=1, own=(Part({}, {}),))
    path = tmp_path / "step-000001" / "manifest.json"
    path.write_bytes(render(manifest))
    forge(path, lambda entry: None)
    assert load(str(path.parent)).shared["model"]["w"].flatten().tolist() == list(range(24))
    forge(path, FORGERIES[name])
    with pytest.raises(Damaged):
        load(str(path.parent))
    with pytest.raises(CheckpointError):
        read_as(tmp_path, lambda name, shape: (((0, 1), (0, 6)),))


def test_damage_in_a_shard_is_found_and_named(tmp_path: Path) -> None:
    whole = filled((2048, 512), torch.float32, 3)
    cuts = [[((0, 2048), (start, start + 128))] for start in range(0, 512, 128)]
    manifest = save_as(tmp_path, [{"model": {"w": shard}} for shard in split(whole, cuts)])
    victim = tmp_path / chunk_name(manifest.shared.tensors["model/w"].pieces[2].refs[0].chunk)
    victim.write_bytes(victim.read_bytes()[:-1] + b"\0")
    path = str(tmp_path / "step-000001")
    assert "model/w" in verify(path).problems[0]
    (verdict,) = verify_all([(path, LocalStorage(tmp_path), "step-000001")])
    assert "model/w" in verdict.problems[0]
    sound = read_as(tmp_path, lambda name, shape: (((0, 2048), (0, 256)),))
    assert raw(sound.shared["model"]["w"].pieces[0][1]) == raw(whole[:, :256])
    with pytest.raises(CheckpointError, match="changed"):
        read_as(tmp_path, lambda name, shape: (((0, 2048), (0, 257)),))
    with pytest.raises(Damaged, match="model/w"):
        export_checkpoint(open_one(path), str(tmp_path / "m.safetensors"))


def test_diff_compares_content_across_shardings(tmp_path: Path) -> None:
    whole = {"w": filled((1000, 900), torch.bfloat16, 1), "v": torch.randn(40, 3), "same": torch.randn(9)}

    def save(folder: str, rows: bool, change: float = 0.0) -> str:
        first = {"w": whole["w"], "v": whole["v"] + change}
        boxes = {
            name: [((0, 30), (0, t.shape[1])), ((30, t.shape[0]), (0, t.shape[1]))]
            if rows
            else [((0, t.shape[0]), (0, 2)), ((0, t.shape[0]), (2, t.shape[1]))]
            for name, t in first.items()
        }
        shards = {name: split(t, [[box] for box in boxes[name]]) for name, t in first.items()}
        save_as(
            tmp_path / folder,
            [{"model": {n: p[rank] for n, p in shards.items()} | {"same": whole["same"]}} for rank in range(2)],
        )
        return str(tmp_path / folder / "step-000001")

    by_rows, by_columns, changed = save("a", True), save("b", False), save("c", False, 0.5)
    plain = str(tmp_path / "d" / "step-000001")
    save_as(tmp_path / "d", [{"model": whole}, {"model": whole}])
    for one, other in ((by_rows, by_columns), (by_rows, plain), (plain, by_columns)):
        found = compare(open_one(one), open_one(other))
        assert found.is_empty, found
        assert found.equal == 3
    found = compare(open_one(by_rows), open_one(changed))
    assert [(change.name, change.elements, change.differing) for change in found.changed] == [("model/v", 120, 120)]
    assert found.changed[0].largest == pytest.approx(0.5)


def test_exports_of_shards_hold_whole_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = random.Random(5)
    whole = {
        "w": filled((300, 1000), torch.float64, 1),
        "b": torch.randn(7),
        "cube": filled((3, 50, 70), torch.int16, 2),
    }
    shards = {
        n: split(t, deal(numbers, random_cuts(numbers, whole_box(tuple(t.shape)), 12), 3)) for n, t in whole.items()
    }
    save_as(tmp_path, [{"model": {name: parts[rank] for name, parts in shards.items()}} for rank in range(3)])
    opened = open_one(str(tmp_path))
    monkeypatch.setattr("distributed.checkpoint.exchange.named_tensors._RUN_BYTES", 10_000)
    out = safetensors.torch.load_file(export_checkpoint(opened, str(tmp_path / "m.safetensors")).files[0])
    other = torch.load(export_checkpoint(opened, str(tmp_path / "m.pt"), "pt").files[0], weights_only=True)
    for name, tensor in whole.items():
        assert raw(out[name]) == raw(other[name]) == raw(tensor), name
        assert out[name].shape == tensor.shape


def test_shard_digest_depends_on_range_shape_and_values() -> None:
    whole = torch.randn(8, 6)
    top, bottom = split(whole, [[((0, 4), (0, 6))], [((4, 8), (0, 6))]])
    same = TensorShard((8, 6), torch.float32, ((((0, 4), (0, 6)), whole[:4].clone()),))
    moved = TensorShard((8, 6), torch.float32, ((((4, 8), (0, 6)), whole[:4]),))
    longer = replace(same, shape=(9, 6))
    changed = TensorShard((8, 6), torch.float32, ((((0, 4), (0, 6)), whole[:4] + 1e-3),))
    nothing = TensorShard((8, 6), torch.float32)
    assert digest({"w": top}) == digest({"w": same})
    assert len({digest({"w": leaf}) for leaf in (top, bottom, moved, longer, changed, nothing, whole)}) == 7


def test_many_shard_ranges_are_checked_and_limited() -> None:
    columns: list[Box] = [((0, 10), (start, start + 1)) for start in range(4096)]
    assert find_fault(columns, (10, 4096)) == ""
    assert "overlap" in find_fault([*columns[:-1], ((9, 10), (17, 18))], (10, 4096))
    assert find_fault([*columns, ((0, 10), (4096, 4097))], (10, 4097))
    assert find_fault([(), ()], ())
    assert not find_fault([()], ())


MEMORY = """
import sys, threading, time
import psutil, torch
from distributed.checkpoint.restore.restoring import restore
from distributed.core.env import WorkerEnv
from distributed.runtime.session import Session

session = Session(WorkerEnv(), torch.device("cpu"), None)
process, peak, done = psutil.Process(), 0, False
quarter = lambda name, shape: (((0, shape[0]), (0, shape[1] // 4)),)
restore(sys.argv[1], True, session, boxes=lambda name, shape: ())  # so that everything is imported

def watch():
    global peak
    while not done:
        peak = max(peak, process.memory_info().rss)
        time.sleep(0.001)

before = process.memory_info().rss
watcher = threading.Thread(target=watch)
watcher.start()
restored = restore(sys.argv[1], True, session, boxes=quarter)
done = True
watcher.join()
held = sum(shard.nbytes for shard in restored.shared["model"].values())
print(held, peak - before)
"""


def test_loading_a_quarter_never_holds_the_whole_in_memory(tmp_path: Path) -> None:
    """8 tensors of 24 MB, cut by rows, are read by columns: every chunk is needed, and few are in memory at a time."""
    whole = {f"w{i}": filled((3000, 2000), torch.float32, i) for i in range(8)}
    cuts: list[list[Box]] = [[((start, start + 750), (0, 2000))] for start in range(0, 3000, 750)]
    shards = {name: split(tensor, cuts) for name, tensor in whole.items()}
    save_as(tmp_path, [{"model": {name: parts[rank] for name, parts in shards.items()}} for rank in range(4)])
    script = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEMORY), str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert script.returncode == 0, script.stderr
    own, peak = map(int, script.stdout.split())
    assert own == 8 * 6_000_000
    largest = 24_000_000
    assert peak < 1.5 * (largest + own), "a small part of the 192 MB"
