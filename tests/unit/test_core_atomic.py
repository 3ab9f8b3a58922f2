"""What ranks unpickle is what their launcher wrote, in files that belong to this user alone."""

from __future__ import annotations

import os
import pickle
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distributed.core.atomic import (
    Sealed,
    make_private,
    open_sealed,
    read_sealed,
    replace_file,
    replace_folder,
    write_private,
    write_sealed,
)
from distributed.core.errors import LaunchError
from distributed.train.job_reading import load_job
from distributed.trainers.payload import write_payload


class Trap:
    """Leaves a file where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._mark,)


@contextmanager
def everyone_may_write() -> Iterator[None]:
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_folders_and_files_are_private_under_any_umask(tmp_path: Path) -> None:
    with everyone_may_write():
        folder = make_private(tmp_path / "runs" / "a")
        write_private(folder / "plan.json", "{}")
        shared = tmp_path / "shared"
        shared.mkdir(0o775)
    assert (mode(folder), mode(folder / "plan.json")) == (0o700, 0o600)
    assert mode(make_private(shared)) == 0o775, "what the user made stays as it is"


def test_open_reader_keeps_old_content_after_a_rewrite(tmp_path: Path) -> None:
    write_private(tmp_path / "file", b"first")
    with (tmp_path / "file").open("rb") as reader:
        write_private(tmp_path / "file", b"2")
        assert reader.read() == b"first"
    assert os.listdir(tmp_path) == ["file"]


def job(value: float) -> Any:
    return {"model": nn.Linear(2, 1), "data": torch.full((40_000,), value)}


def test_payload_is_loaded_from_the_file_the_launcher_wrote(tmp_path: Path) -> None:
    sealed = write_payload_of(tmp_path, 1.0)
    found: Any = load_job(tmp_path, sealed)
    (tmp_path / sealed.name).unlink()
    other = write_payload_of(tmp_path, 2.0)
    assert other.name == sealed.name
    assert found["data"].eq(1).all(), "what a rank has mapped does not change"
    again: Any = load_job(tmp_path, sealed)
    assert again["data"].eq(1).all(), "the launcher keeps its file open for those who come later"


def write_payload_of(folder: Path, value: float) -> Sealed:
    return write_payload(job(value), folder / "payload.pt")


@pytest.mark.parametrize("how", ["another content", "the same size", "no archive", "a link", "a fifo"])
def test_replaced_payload_file_is_refused_and_not_run(tmp_path: Path, how: str) -> None:
    sealed = write_payload_of(tmp_path, 1.0)
    payload, mark = tmp_path / sealed.name, tmp_path / "mark"
    size = payload.stat().st_size
    payload.unlink()
    if how == "no archive":
        payload.write_bytes(pickle.dumps(Trap(mark)).ljust(size, b"\0"))
    elif how == "a link":
        torch.save(Trap(mark), tmp_path / "trap")
        payload.symlink_to(tmp_path / "trap")
    elif how == "a fifo":
        os.mkfifo(payload, 0o600)
    else:
        torch.save([Trap(mark), torch.zeros(10)], payload)
    payload.chmod(0o600)
    gone = replace(sealed, descriptor=-1, size=payload.stat().st_size if how == "the same size" else sealed.size)
    with pytest.raises(LaunchError, match="is not the file that the launcher of this run wrote"):
        load_job(tmp_path, gone)
    load_job(tmp_path, sealed)
    assert not mark.exists()


def test_sealed_file_with_other_owner_mode_or_content_is_refused(tmp_path: Path) -> None:
    sealed = write_sealed(tmp_path / "code", b"code")
    assert read_sealed(tmp_path, sealed) == b"code"
    with pytest.raises(LaunchError, match="owns it"):
        open_sealed(tmp_path, replace(sealed, owner=sealed.owner + 1))
    (tmp_path / "code").chmod(0o620)
    with pytest.raises(LaunchError, match="others may write to it"):
        read_sealed(tmp_path, sealed)
    write_private(tmp_path / "code", b"edoc")
    with pytest.raises(LaunchError, match="its content is not what was written"):
        read_sealed(tmp_path, sealed)


def test_shared_file_mode_follows_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        replace_file(tmp_path / "shared", "1")
        write_private(tmp_path / "own", "1")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"shared": 0o640, "own": 0o600}


def test_replace_folder_swaps_in_the_new_folder(tmp_path: Path) -> None:
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    replace_folder(tmp_path / "new", tmp_path / "old")
    assert [path.name for path in tmp_path.rglob("*")] == ["old", "new"]
