"""A checkpoint that somebody made to do harm is refused with a clear error: no code is run, little memory is taken."""

from __future__ import annotations

import json
import os
import pickle
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from distributed.checkpoint.format.digests import digest_bytes, digest_json
from distributed.checkpoint.format.manifest import render
from distributed.checkpoint.format.parsing import NewerFormat, component_digests, parse_chunks, parse_part
from distributed.checkpoint.restore.reading import load, verify
from distributed.checkpoint.restore.restoring import restore
from distributed.checkpoint.save.saver import Saver
from distributed.checkpoint.save.staging import TensorStaging
from distributed.checkpoint.storage.urls import LocalStorage, check_name
from distributed.core.env import WorkerEnv
from distributed.core.errors import CheckpointError
from distributed.runtime.session import Session

Document = dict[str, Any]


def alone() -> Session:
    return Session(WorkerEnv(), torch.device("cpu"), None)


class Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch {self.path}",))


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    saver = Saver(str(tmp_path / "ckpt"), alone(), TensorStaging(), asynchronous=False)
    model = {"w": torch.ones(100_000), "b": torch.ones(3), "big": torch.zeros(2**20)}
    state = {"model": model, "progress": {"step": 7}}
    saver.save(7, state, {"rng": {}})
    return tmp_path / "ckpt" / "step-000007" / "manifest.json"


def forge(path: Path, change: Callable[[Document], None], *, components: bool = True) -> None:
    """Change a manifest as somebody would who knows the format: with digests that fit."""
    document = json.loads(path.read_text())
    change(document)
    del document["digest"]
    if components:
        try:
            chunks = parse_chunks(document["chunks"], "")
            parts = [parse_part(part, chunks, "") for part in (document["shared"], *document["own"])]
            document["digests"] = component_digests(parts[0], tuple(parts[1:]))
        except (CheckpointError, KeyError, TypeError, AttributeError):
            pass  # refused before the digests are looked at
    path.write_text(json.dumps(document | {"digest": digest_json(document)}))


def tensor(document: Document) -> Document:
    found: Document = document["shared"]["tensors"]["model/w"]
    return found


def refs(document: Document) -> list[Any]:
    found: list[Any] = tensor(document)["pieces"][0]["refs"]
    return found


def rename_chunk(document: Document, name: str) -> None:
    old = refs(document)[0][0]
    document["chunks"][name] = document["chunks"].pop(old)
    refs(document)[0][0] = name


def rename_tensor(document: Document, name: str) -> None:
    document["shared"]["tensors"][name] = document["shared"]["tensors"].pop("model/w")
    document["shared"]["skeleton"]["model"]["w"] = {"__tensor__": name}


def bomb(document: Document) -> None:
    """A chunk of 4 MiB that is there, used so often that the state would fill the memory."""
    entry = document["shared"]["tensors"]["model/big"]
    ref = entry["pieces"][0]["refs"][0]
    times = psutil.virtual_memory().total // ref[2] + 1
    entry["pieces"][0]["refs"] = [ref] * times
    entry["shape"] = [times * ref[2] // 4]


def shard(*boxes: list[list[int]]) -> Callable[[Document], None]:
    def change(document: Document) -> None:
        digest = refs(document)[0][0]
        entry = tensor(document)
        entry["placement"] = "shard"
        entry["pieces"] = [
            {"ranges": box, "refs": [[digest, 0, 4 * (box[0][1] - box[0][0])]] if box[0][1] > box[0][0] else []}
            for box in boxes
        ]

    return change


ATTACKS: dict[str, Callable[[Document], Any]] = {
    "chunk outside": lambda d: rename_chunk(d, "../../../../etc/passwd"),
    "chunk absolute": lambda d: rename_chunk(d, "/etc/passwd"),
    "chunk with NUL": lambda d: rename_chunk(d, "a" * 63 + "\0"),
    "chunk in capitals": lambda d: rename_chunk(d, "A" * 64),
    "tensor outside": lambda d: rename_tensor(d, "../../w"),
    "tensor absolute": lambda d: rename_tensor(d, "/w"),
    "tensor with NUL": lambda d: rename_tensor(d, "w\0"),
    "absurd shape": lambda d: tensor(d).update(shape=[2**59, 2**59]),
    "absurd shape with zero": lambda d: tensor(d).update(
        shape=[0, 2**59, 2**59], pieces=[{"ranges": None, "refs": []}]
    ),
    "too large a shape": lambda d: tensor(d).update(shape=[10**12]),
    "negative shape": lambda d: tensor(d).update(shape=[-100_000]),
    "bool as a shape": lambda d: tensor(d).update(shape=[True, 100_000]),
    "float as a shape": lambda d: tensor(d).update(shape=[1e5]),
    "many dimensions": lambda d: tensor(d).update(shape=[1] * 100 + [100_000]),
    "unknown type": lambda d: tensor(d).update(dtype="object"),
    "type as a path": lambda d: tensor(d).update(dtype=["float32"]),
    "negative offset": lambda d: refs(d)[0].__setitem__(1, -4),
    "past the end": lambda d: refs(d)[0].__setitem__(1, 4),
    "absurd chunk": lambda d: d["chunks"].update({refs(d)[0][0]: 2**50}),
    "empty chunk": lambda d: d["chunks"].update({refs(d)[0][0]: 0}),
    "longer than stored": lambda d: d["chunks"].update({refs(d)[0][0]: d["chunks"][refs(d)[0][0]] + 4}),
    "chunk not listed": lambda d: d["chunks"].pop(refs(d)[0][0]),
    "chunk not used": lambda d: d["chunks"].update({"0" * 64: 4}),
    "piece twice": lambda d: tensor(d)["pieces"].append(tensor(d)["pieces"][0]),
    "overlapping boxes": shard([[0, 60_000]], [[40_000, 80_000]]),
    "boxes with a gap": shard([[0, 40_000]], [[60_000, 100_000]]),
    "box outside": shard([[0, 100_001]]),
    "empty box": shard([[0, 100_000]], [[5, 5]]),
    "tensor of nowhere": lambda d: d["shared"]["skeleton"].update(x={"__tensor__": "nowhere"}),
    "list as a key": lambda d: d["shared"]["skeleton"].update(x={"__pairs__": [[[1], 2]]}),
    "no pairs": lambda d: d["shared"]["skeleton"].update(x={"__pairs__": 5}),
    "marks mixed": lambda d: d["shared"]["skeleton"].update(x={"__tuple__": [], "__pairs__": []}),
    "many ranks": lambda d: d.update(world_size=2**40),
    "own missing": lambda d: d.update(own=[]),
    "another step": lambda d: d.update(step=8),
    "negative step": lambda d: d.update(step=-1),
    "more keys": lambda d: d.update(code="import os"),
    "a list": lambda d: d.update(shared=[]),
    "metric": lambda d: d.update(metric="high"),
    "bomb": bomb,
}


@pytest.mark.parametrize("name", ATTACKS)
def test_forged_manifest_is_refused(manifest: Path, name: str) -> None:
    forge(manifest, ATTACKS[name])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError) as refused:
        load(str(manifest.parent))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 * 1024, "in KiB"
    assert refused.value.problems[0].do
    with pytest.raises(CheckpointError):
        restore(str(manifest.parent.parent), True, alone())


def test_manifest_forged_without_change_loads(manifest: Path) -> None:
    """So that the attacks above are refused for what they change."""
    forge(manifest, lambda document: None)
    assert load(str(manifest.parent)).shared["progress"] == {"step": 7}
    forge(manifest, shard([[0, 60_000]], [[60_000, 100_000]]))
    assert load(str(manifest.parent)).shared["model"]["w"].eq(1).all()


def test_mismatched_component_digests_are_refused(manifest: Path) -> None:
    forge(manifest, lambda document: document["digests"].update(model="0" * 64), components=False)
    with pytest.raises(CheckpointError, match="components"):
        load(str(manifest.parent))


def test_pickle_in_place_of_a_chunk_or_manifest_is_never_run(manifest: Path, tmp_path: Path) -> None:
    trap = tmp_path / "owned"
    payload = pickle.dumps(Payload(trap))
    chunk = next(path for path in (manifest.parent.parent / "chunks").rglob("*") if path.is_file())
    good = chunk.read_bytes()
    for content in (payload, payload.ljust(len(good), b"\0")):
        chunk.write_bytes(content)
        with pytest.raises(CheckpointError):
            load(str(manifest.parent))
    chunk.write_bytes(good)
    named = chunk.parent.parent / digest_bytes(payload)[:2] / digest_bytes(payload)
    named.parent.mkdir(exist_ok=True)
    named.write_bytes(payload)  # a chunk whose hash is right: its bytes become numbers, nothing else

    def use(document: Document) -> None:
        rename_chunk(document, named.name)
        document["chunks"][named.name] = len(payload)
        refs(document)[0][2] = len(payload)
        tensor(document).update(dtype="uint8", shape=[len(payload)])

    forge(manifest, use)
    assert bytes(load(str(manifest.parent)).shared["model"]["w"].numpy()) == payload
    manifest.write_bytes(payload)
    with pytest.raises(CheckpointError, match="damaged"):
        load(str(manifest.parent))
    assert not trap.exists()


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"format": 2, "format": 2}',
        b"[]",
        b"null",
        b"",
        b"\xff\xfe",
        b'{"format": ' + b"9" * 10_000 + b"}",
        b'{"format": "2"}',
        b'{"format": true}',
        b'{"format": 1}',
    ],
)
def test_invalid_manifest_text_is_refused(manifest: Path, text: bytes) -> None:
    manifest.write_bytes(text)
    with pytest.raises(CheckpointError):
        load(str(manifest.parent))
    assert verify(str(manifest.parent)).problems


def test_deeply_nested_manifest_is_refused(manifest: Path) -> None:
    def nest(document: Document) -> None:
        deep: Any = 1
        for _ in range(200):
            deep = [deep]
        document["shared"]["skeleton"]["x"] = deep

    forge(manifest, nest)
    with pytest.raises(CheckpointError, match="nested"):
        load(str(manifest.parent))


def test_checkpoint_of_newer_format_raises_and_is_not_skipped(manifest: Path) -> None:
    root = str(manifest.parent.parent)
    Saver(root, alone(), TensorStaging(), asynchronous=False).save(8, {"model": {"w": torch.ones(2)}}, {})
    newer = manifest.parent.parent / "step-000008" / "manifest.json"
    newer.write_text(newer.read_text().replace('"format":2', '"format":3'))
    with pytest.raises(NewerFormat, match="upgrade"):
        load(str(newer.parent))
    with pytest.raises(CheckpointError, match="upgrade"):
        restore(root, True, alone())


def test_huge_manifest_or_chunk_is_not_read_whole(manifest: Path) -> None:
    good = manifest.read_bytes()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    chunk = next(path for path in (manifest.parent.parent / "chunks").rglob("*") if path.is_file())
    os.truncate(chunk, 2**36)  # 64 GiB of holes
    with pytest.raises(CheckpointError, match="bytes"):
        load(str(manifest.parent))
    os.truncate(chunk, 4)
    manifest.write_bytes(good)
    os.truncate(manifest, 2**36)
    with pytest.raises(CheckpointError, match="longer"):
        load(str(manifest.parent))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1024 * 1024, "in KiB"


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/../b", "a//b", "", "a\0b", ".", "..", "a/.hidden", "a\\b", "C:x"]
)
def test_storage_names_outside_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    storage = LocalStorage(tmp_path / "inside")
    for use in (check_name, storage.read, storage.size, storage.delete, lambda n: storage.write(n, b"x")):
        with pytest.raises(CheckpointError):
            use(name)
    assert not list(tmp_path.iterdir())


def test_manifest_render_and_parse_are_inverse(manifest: Path) -> None:
    loaded = load(str(manifest.parent)).manifest
    assert render(loaded) == manifest.read_bytes()
