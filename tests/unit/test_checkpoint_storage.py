"""Where checkpoints are kept: writes are whole or not at all, full and unwritable disks are told at the start."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry as loaded_file_systems

from distributed.checkpoint.restore.reading import load
from distributed.checkpoint.restore.restoring import restore
from distributed.checkpoint.save.saver import Saver
from distributed.checkpoint.save.staging import TensorStaging
from distributed.checkpoint.storage.remote import RemoteStorage
from distributed.checkpoint.storage.urls import LocalStorage, NotThere, Storage, check_writable, open_storage
from distributed.core.env import WorkerEnv
from distributed.core.errors import CheckpointError, MissingExtraError
from distributed.runtime.session import Session


def alone() -> Session:
    return Session(WorkerEnv(), torch.device("cpu"), None)


def places(tmp_path: Path) -> list[Storage]:
    return [open_storage(str(tmp_path / "local")), open_storage(f"memory://{tmp_path.name}/remote")]


def test_local_and_remote_storage_behave_alike(tmp_path: Path) -> None:
    for storage in places(tmp_path):
        assert storage.list() == []
        assert storage.children() == []
        assert storage.size("a/b") is None
        with pytest.raises(NotThere):
            storage.read("a/b")
        storage.delete("a/b")
        storage.write("a/b", b"0123456789")
        storage.write("c", memoryview(b"x"))
        assert storage.read("a/b") == b"0123456789"
        assert storage.read("a/b", 2, 3) == b"234"
        assert storage.read("a/b", 0, 100) == b"0123456789"
        assert storage.read("a/b", 0, 0) == b""
        storage.write("a/b", b"new")
        assert (storage.read("a/b"), storage.size("a/b")) == (b"new", 3)
        assert (storage.list(), storage.list("a"), storage.children()) == (["a/b", "c"], ["a/b"], ["a", "c"])
        storage.delete("a/b")
        assert storage.list() == ["c"]
        check_writable(storage)
        assert storage.list() == ["c"]


def test_checkpoint_is_saved_to_any_fsspec_url(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}/run"
    state = {"model": {"w": torch.randn(2**21), "b": torch.randn(4)}}
    saver = Saver(url, alone(), TensorStaging(), keep_last=1)
    for step in (1, 2):
        state["model"]["b"] += 1
        saver.save(step, state, {})
    path = saver.wait()
    assert path == f"{url}/step-000002"
    restored = restore(url, True, alone())
    assert restored is not None
    assert torch.equal(restored.shared["model"]["w"], state["model"]["w"])
    assert torch.equal(load(path).shared["model"]["b"], state["model"]["b"])


class Flaky(MemoryFileSystem):
    """Fails as often as it is told to."""

    protocol = "flaky"
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012
    failures = 0

    def _maybe(self) -> None:
        if Flaky.failures > 0:
            Flaky.failures -= 1
            raise ConnectionResetError("the connection was reset")

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        self._maybe()
        super().pipe_file(path, value, **options)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        self._maybe()
        return bytes(super().cat_file(path, start, end, **options))


def test_transient_storage_failures_are_retried_up_to_a_limit() -> None:
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    pauses: list[float] = []
    storage = RemoteStorage("flaky://run", tries=4, sleep=pauses.append)
    Flaky.failures = 3
    storage.write("a", b"1")
    assert storage.read("a") == b"1"
    assert len(pauses) == 3
    assert pauses[2] > pauses[0]
    Flaky.failures = 100
    with pytest.raises(CheckpointError, match="4 times"):
        storage.write("a", b"2")
    Flaky.failures = 0
    assert storage.read("a") == b"1"


@pytest.mark.parametrize(
    ("scheme", "package", "extra"),
    [
        ("s3", "s3fs", "s3"),
        ("gs", "gcsfs", "gs"),
        ("gcs", "gcsfs", "gs"),
        ("abfs", "adlfs", "abfs"),
        ("az", "adlfs", "abfs"),
    ],
)
def test_missing_library_of_a_cloud_names_its_extra(
    scheme: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # as where it is not installed
    monkeypatch.delitem(loaded_file_systems, scheme, raising=False)  # and nothing has used it before
    with pytest.raises(MissingExtraError, match=rf'pip install "distributed-training\[{extra}\]"'):
        open_storage(f"{scheme}://bucket/run")


def test_unwritable_or_full_storage_is_refused_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file"):
        check_writable(open_storage(str(tmp_path / "file" / "inside")))
    with pytest.raises(CheckpointError, match="free"):
        check_writable(open_storage(str(tmp_path / "new")), 2**60)
    with pytest.raises(CheckpointError, match="fsspec"):
        open_storage("nosuchscheme://x")
    saver = Saver("/proc/nowhere", alone(), TensorStaging())
    with pytest.raises(CheckpointError, match="/proc/nowhere"):
        saver.prepare({"model": {"w": torch.ones(3)}}, {})


def test_stale_temporary_files_are_swept(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.write("chunks/ab/abc", b"x")
    old, young = tmp_path / "chunks/ab/.abc.1.tmp", tmp_path / "chunks/ab/.abc.2.tmp"
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    assert storage.list() == ["chunks/ab/abc"]
    assert storage.sweep(3600) == 1
    assert young.exists()
    assert not old.exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 12 MiB."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small tmpfs needs root")
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(place)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_disk_full_during_a_save_keeps_the_last_checkpoint(small_disk: Path) -> None:
    saver = Saver(str(small_disk), alone(), TensorStaging(), keep_last=1, guard_s=0)
    first = {"model": {f"w{i}": torch.full((2**18,), i) for i in range(3)}}  # 6 MiB
    saver.save(1, first, {})
    saver.wait()
    second = {"model": {name: tensor + 100 for name, tensor in first["model"].items()} | {"x": torch.randn(2**18)}}
    with pytest.raises(CheckpointError, match="free"):
        saver.prepare(second, {})
    saver.save(2, second, {})
    with pytest.raises(CheckpointError, match="the disk is full"):
        saver.wait()
    restored = restore(str(small_disk), True, alone())
    assert restored is not None
    assert restored.step == 1
    assert all(torch.equal(restored.shared["model"][name], first["model"][name]) for name in first["model"])
    first["model"]["w0"] += 1
    saver.save(3, {"model": {"w0": first["model"]["w0"]}}, {})  # fits, and what the failed save left is removed
    saver.close()
    restored = restore(str(small_disk), True, alone())
    assert restored is not None
    assert restored.step == 3
    assert len(LocalStorage(small_disk).list("chunks")) == 1
