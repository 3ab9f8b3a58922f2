"""Damage of every sort is found: no wrong load, and the last checkpoint that is whole is used."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.checkpoint.format.tensors import digest_components
from distributed.checkpoint.restore.reading import load
from distributed.checkpoint.restore.restoring import Restored, restore
from distributed.checkpoint.save.saver import Saver
from distributed.checkpoint.save.staging import TensorStaging
from distributed.checkpoint.storage.chunks import ChunkStore, Damaged, chunk_name
from distributed.checkpoint.storage.urls import open_storage
from distributed.core.env import WorkerEnv
from distributed.core.errors import CheckpointError
from distributed.runtime.session import Session

STEPS = (10, 20)


def alone() -> Session:
    return Session(WorkerEnv(), torch.device("cpu"), None)


def state(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    frozen = torch.arange(70_000, dtype=torch.float32)  # large enough for a chunk of its own
    model = {"frozen": frozen, "w": torch.randn(66_000, generator=generator), "b": torch.randn(9, generator=generator)}
    return {"model": model, "optimizer": {"step": torch.tensor(float(step))}, "progress": {"step": step}}


class Store:
    """Two checkpoints, and the files that only the newer one needs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        saver = Saver(str(root), alone(), TensorStaging(), asynchronous=False)
        for step in STEPS:
            saver.save(step, state(step), {"rng": {"words": torch.arange(step)}})
        self.manifest = root / "step-000020" / "manifest.json"
        older, newer = (load(str(root / f"step-{step:06d}")).manifest for step in STEPS)
        self.own = [root / chunk_name(digest) for digest in newer.chunks if digest not in older.chunks]
        self.shared = [root / chunk_name(digest) for digest in newer.chunks if digest in older.chunks]
        self.content = {path: path.read_bytes() for path in [self.manifest, *self.own, *self.shared]}
        self.digests = {step: digest_components(state(step)) for step in STEPS}
        assert len(self.own) >= 3
        assert self.shared

    def repair(self, touched: list[Path]) -> None:
        for path in touched:
            if path in self.content:
                path.write_bytes(self.content[path])
            else:
                path.unlink()

    def restore(self) -> Restored | None:
        """What a resumed run gets; whatever it is, it is exactly what was saved at its step."""
        restored = restore(str(self.root), True, alone())
        assert restored is not None
        assert digest_components(restored.shared) == self.digests[restored.step], "loaded what was never saved"
        assert restored.own is not None
        assert restored.own["rng"]["words"].tolist() == list(range(restored.step))
        return restored


Injection = Callable[[Store, random.Random], list[Path]]


def flip_chunk(store: Store, chance: random.Random) -> list[Path]:
    return [flip(chance.choice(store.own), store, chance)]


def flip_shared_chunk(store: Store, chance: random.Random) -> list[Path]:
    return [flip(chance.choice(store.shared), store, chance)]


def flip_manifest(store: Store, chance: random.Random) -> list[Path]:
    return [flip(store.manifest, store, chance)]


def flip(path: Path, store: Store, chance: random.Random) -> Path:
    content = bytearray(store.content[path])
    for _ in range(chance.choice((1, 1, 1, 2, 8))):
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)
    return path


def truncate_chunk(store: Store, chance: random.Random) -> list[Path]:
    path = chance.choice(store.own)
    path.write_bytes(store.content[path][: chance.randrange(len(store.content[path]))])
    return [path]


def lengthen_chunk(store: Store, chance: random.Random) -> list[Path]:
    path = chance.choice(store.own)
    path.write_bytes(store.content[path] + chance.randbytes(chance.randrange(1, 100)))
    return [path]


def swap_chunks(store: Store, chance: random.Random) -> list[Path]:
    one, other = chance.sample(store.own, 2)
    one.write_bytes(store.content[other])
    other.write_bytes(store.content[one])
    return [one, other]


def lose_chunk(store: Store, chance: random.Random) -> list[Path]:
    path = chance.choice(store.own)
    path.unlink()
    return [path]


def tear_manifest(store: Store, chance: random.Random) -> list[Path]:
    content = store.content[store.manifest]
    cut = chance.randrange(len(content) - 1)  # without its newline alone it is whole
    rest = b"\0" * (len(content) - cut) if chance.random() < 0.5 else b""
    store.manifest.write_bytes(content[:cut] + rest)
    return [store.manifest]


def zero_block(store: Store, chance: random.Random) -> list[Path]:
    """What a disk that lost power can leave: a block of zeros in a file of the right size."""
    path = chance.choice(store.own)
    content = bytearray(store.content[path])
    start = chance.randrange(max(1, len(content) - 512))
    content[start : start + 512] = bytes(len(content[start : start + 512]))
    path.write_bytes(content)
    return [path]


def older_manifest(store: Store, chance: random.Random) -> list[Path]:
    shutil.copyfile(store.root / "step-000010" / "manifest.json", store.manifest)
    return [store.manifest]


def stale_files(store: Store, chance: random.Random) -> list[Path]:
    """Left by killed saves: they are harmless."""
    source = store.content[chance.choice(list(store.content))]
    name = chance.choice(["step-000020/.manifest.json.0a.tmp", "chunks/.abc.tmp", "parts/t/step-000030-0-rank-0.json"])
    path = store.root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(source[: chance.randrange(len(source))])
    return [path]


INJECTORS: dict[Injection, int] = {  # with their share
    flip_chunk: 4,
    flip_manifest: 6,
    flip_shared_chunk: 1,
    truncate_chunk: 2,
    lengthen_chunk: 1,
    swap_chunks: 1,
    lose_chunk: 1,
    tear_manifest: 2,
    zero_block: 1,
    older_manifest: 1,
    stale_files: 1,
}
HARMLESS = {stale_files}


@pytest.mark.parametrize("injections", [800, pytest.param(10_000, marks=pytest.mark.soak)])
def test_injected_corruption_is_never_loaded(injections: int, tmp_path: Path) -> None:
    fast = Path("/dev/shm")
    root = tmp_path if not os.access(fast, os.W_OK) else fast / f"corruption-{os.getpid()}"
    try:
        inject(Store(root), random.Random(0), injections)
    finally:
        if root != tmp_path:
            shutil.rmtree(root, ignore_errors=True)


def inject(store: Store, chance: random.Random, injections: int) -> None:
    ended: dict[str, Counter[str]] = {injector.__name__: Counter() for injector in INJECTORS}
    for _ in range(injections):
        injector = chance.choices(list(INJECTORS), list(INJECTORS.values()))[0]
        touched = injector(store, chance)
        same = all(
            path in store.content and path.exists() and path.read_bytes() == store.content[path] for path in touched
        )
        try:
            restored = store.restore()
            assert restored is not None
            if restored.step == 20:
                ended[injector.__name__]["unaffected"] += 1
                assert same or injector in HARMLESS or injector is flip_manifest
            else:
                ended[injector.__name__]["older one used"] += 1
                assert "step-000020" in restored.report.skipped[0][0]
        except CheckpointError as refused:
            ended[injector.__name__]["refused"] += 1
            if injector is not flip_shared_chunk or "step-000010" not in str(refused):  # which both need
                raise
        finally:
            store.repair(touched)
    print({name: dict(counts) for name, counts in ended.items()})
    assert sum(sum(counts.values()) for counts in ended.values()) == injections
    # A flip can turn an `e` of a number into `E`, or a space into another: the content is then the same.
    assert ended["flip_manifest"]["unaffected"] <= 0.01 * sum(ended["flip_manifest"].values())
    restored = store.restore()
    assert restored is not None
    assert restored.step == 20


@pytest.mark.parametrize("damage", [b"abX", b"ab", b"abcd", b""], ids=["changed", "shorter", "longer", "empty"])
def test_damaged_chunk_raises_instead_of_loading(damage: bytes, tmp_path: Path) -> None:
    chunks = ChunkStore(open_storage(str(tmp_path)))
    digest, _ = chunks.put(b"abc")
    assert chunks.get(digest, 3) == b"abc"
    (tmp_path / chunk_name(digest)).write_bytes(damage)
    with pytest.raises(Damaged):
        chunks.get(digest, 3)


def test_damaged_checkpoint_report_names_chunk_and_file(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.own[0].unlink()
    restored = store.restore()
    assert restored is not None
    assert restored.step == 10
    assert store.own[0].name[:12] in str(restored.report)
    assert str(store.own[0]) in str(restored.report)
    with pytest.raises(CheckpointError, match="missing"):
        restore(str(tmp_path), str(tmp_path / "step-000020"), alone())
