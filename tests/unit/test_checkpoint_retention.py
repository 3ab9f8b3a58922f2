"""Old checkpoints go, what the kept ones hold stays, and what may belong to a save of another process stays too."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.checkpoint.format.manifest import step_of
from distributed.checkpoint.restore.candidates import find
from distributed.checkpoint.restore.reading import load, verify
from distributed.checkpoint.save.retention import Collector, Known, Retention, choose
from distributed.checkpoint.save.saver import Saver
from distributed.checkpoint.save.staging import TensorStaging
from distributed.checkpoint.storage.chunks import ChunkStore, chunk_name
from distributed.checkpoint.storage.local import LocalStorage
from distributed.core.env import WorkerEnv
from distributed.core.errors import ConfigError
from distributed.runtime.session import Session


def alone() -> Session:
    return Session(WorkerEnv(), torch.device("cpu"), None)


def steps(root: Path) -> list[int]:
    return [found.step for found in find(str(root), True)]


def state(step: int) -> dict[str, Any]:
    model = {"frozen": torch.arange(2.0**17), "w": torch.full((2**17,), step), "b": torch.tensor(float(step))}
    return {"model": model}


def chosen(saved: list[Known], **how: Any) -> list[int | None]:
    return [step_of(name) for name in choose(saved, Retention(**how))]


def test_retention_keeps_last_every_best_and_pinned() -> None:
    saved = [Known(step, metric=float(step % 7)) for step in range(10, 101, 10)]
    assert choose(saved, Retention()) == []
    assert chosen(saved, keep_last=2) == [10, 20, 30, 40, 50, 60, 70, 80]
    assert chosen(saved, keep_last=1, keep_every=30) == [10, 20, 40, 50, 70, 80]
    assert 70 not in chosen(saved, keep_last=1, best="min")
    assert 20 not in chosen(saved, keep_last=1, best="max"), "the first of equals"
    assert 90 in chosen(saved, keep_last=1, best="max")
    assert 50 not in chosen(saved, keep_last=1, pinned=frozenset({"step-000050"}))
    assert chosen([Known(1, float("nan")), Known(2, 0.5), Known(3)], keep_last=1, best="min") == [1]


@pytest.mark.parametrize("wrong", [{"keep_last": 0}, {"keep_every": 5}, {"keep_last": 1, "best": "most"}])
def test_invalid_retention_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Retention(**wrong)


def test_removed_checkpoints_leave_no_chunk_and_kept_are_whole(tmp_path: Path) -> None:
    saver = Saver(str(tmp_path), alone(), TensorStaging(), keep_last=2, keep_every=4, best="max", asynchronous=False)
    for step in range(1, 10):
        saver.save(step, state(step), {"rng": {"n": torch.tensor(step)}}, metric=-abs(step - 3.0))
    assert steps(tmp_path) == [9, 8, 4, 3]
    used = set()
    for step in steps(tmp_path):
        path = str(tmp_path / f"step-{step:06d}")
        assert not verify(path).problems
        assert torch.equal(load(path).shared["model"]["w"], state(step)["model"]["w"])
        used |= {chunk_name(digest) for digest in load(path).manifest.chunks}
    assert set(LocalStorage(tmp_path).list("chunks")) == used
    assert not LocalStorage(tmp_path).list("parts")


def test_collection_spares_chunks_of_a_save_in_flight(tmp_path: Path) -> None:
    """Its chunks have no manifest yet: new ones, and old ones that it found and means to use again."""
    Saver(str(tmp_path), alone(), TensorStaging(), asynchronous=False).save(1, state(1), {})
    time.sleep(0.02)
    other = ChunkStore(LocalStorage(tmp_path))
    new, _ = other.put(b"new")
    reused, written = other.put(state(1)["model"]["w"].view(torch.uint8).numpy())
    assert written == 0
    abandoned, _ = other.put(b"abandoned")
    os.utime(tmp_path / chunk_name(abandoned), (0, 0))
    saver = Saver(str(tmp_path), alone(), TensorStaging(), keep_last=1, asynchronous=False)
    saver.save(2, state(2), {})
    assert steps(tmp_path) == [2]
    left = LocalStorage(tmp_path).list("chunks")
    assert chunk_name(new) in left
    assert chunk_name(reused) in left
    assert chunk_name(abandoned) not in left
    assert not verify(str(tmp_path / "step-000002")).problems


def test_collected_chunk_is_written_again_when_needed(tmp_path: Path) -> None:
    saver = Saver(str(tmp_path), alone(), TensorStaging(), keep_last=1, asynchronous=False)
    for step, content in ((1, 1), (2, 2), (3, 1)):
        saver.save(step, state(content), {})
    assert torch.equal(load(str(tmp_path / "step-000003")).shared["model"]["w"], state(1)["model"]["w"])


def test_unreadable_manifest_blocks_chunk_removal(tmp_path: Path) -> None:
    saver = Saver(str(tmp_path), alone(), TensorStaging(), asynchronous=False)
    for step in (1, 2, 3):
        saver.save(step, state(step), {})
    before = LocalStorage(tmp_path).list("chunks")
    manifest = tmp_path / "step-000002" / "manifest.json"
    good = manifest.read_bytes()
    manifest.write_bytes(good[:-20])
    collected = Collector(LocalStorage(tmp_path), Retention(keep_last=1), guard_s=0).collect()
    assert collected.blocked_by == ("step-000002",)
    assert LocalStorage(tmp_path).list("chunks") == before
    manifest.write_bytes(good)
    assert not verify(str(manifest.parent)).problems
    Collector(LocalStorage(tmp_path), Retention(keep_last=1), guard_s=0).collect()
    assert len(LocalStorage(tmp_path).list("chunks")) < len(before)
    assert not verify(str(tmp_path / "step-000003")).problems
