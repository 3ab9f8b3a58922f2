"""One run at a time has a folder: the living are respected, whoever is gone holds nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

from distributed.checkpoint.save.saver import Saver
from distributed.checkpoint.save.staging import TensorStaging
from distributed.checkpoint.storage.ownership import FolderTakenError, LockObject, check_held, hold_folder
from distributed.checkpoint.storage.remote import RemoteStorage
from distributed.checkpoint.storage.urls import open_storage
from distributed.core.env import WorkerEnv
from distributed.core.errors import CheckpointError, LaunchError
from distributed.core.locks import STALE_S, InUse, Lock, LockFile, Owner, Seen
from distributed.core.run_dir import LOCK
from distributed.launch.run_lock import owned
from distributed.runtime.session import Session
from tests.conftest import clean_environ

HOLD = """
import sys, time
from pathlib import Path
from distributed.core.locks import Lock, LockFile, Owner
Lock(LockFile(Path(sys.argv[1])), Owner.me("theirs")).acquire()
print("held", flush=True)
time.sleep(60)
"""


def lock(folder: Path, token: str = "mine", said: list[str] | None = None) -> Lock:
    return Lock(LockFile(folder), Owner.me(token), say=lambda text: said.append(text) if said is not None else None)


def leave(folder: Path, owner: Owner, age_s: float = 0.0) -> None:
    (folder / LOCK).write_bytes(owner.to_text())
    os.utime(folder / LOCK, (time.time() - age_s,) * 2)


def of_another_host() -> Owner:
    return replace(Owner.me("theirs"), host="another", pid=1)


def test_folder_lock_holds_until_its_process_is_killed(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=clean_environ()
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    with pytest.raises(LaunchError) as refused, owned(tmp_path, resume=False):
        pass
    assert f"process {process.pid} on " in str(refused.value)
    assert "another run_dir" in str(refused.value)
    assert os.listdir(tmp_path) == [LOCK], "nothing was written"
    process.send_signal(signal.SIGKILL)
    while not Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].startswith(" Z"):
        time.sleep(0.01)  # dead, and nobody has asked for its exit code
    said: list[str] = []
    with lock(tmp_path, said=said).acquire():
        assert "is gone" in said[0]
    process.wait()
    assert os.listdir(tmp_path) == []


def test_lock_of_a_reused_pid_is_stale(tmp_path: Path) -> None:
    leave(tmp_path, replace(Owner.me("theirs"), started="0"))
    lock(tmp_path).acquire().release()
    assert os.listdir(tmp_path) == []


def test_second_run_of_a_process_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    with lock(tmp_path).acquire(), pytest.raises(InUse):
        lock(tmp_path, "another").acquire(timeout_s=0.6)
    with lock(tmp_path, "another").acquire():
        pass


def test_release_leaves_the_lock_of_another_launch(tmp_path: Path) -> None:
    first = lock(tmp_path).acquire()
    assert first.is_held()
    leave(tmp_path, Owner.me("another"))
    assert not first.is_held()
    first.release()
    assert os.listdir(tmp_path) == [LOCK]


def test_resuming_run_waits_for_the_previous_run(tmp_path: Path) -> None:
    first = lock(tmp_path).acquire()
    threading.Timer(0.3, first.release).start()
    said: list[str] = []
    with lock(tmp_path, "another", said).acquire(timeout_s=60):
        assert "waiting" in said[0]


def test_restarted_world_of_the_same_launch_takes_the_lock(tmp_path: Path) -> None:
    leave(tmp_path, replace(of_another_host(), token="mine"))
    with lock(tmp_path).acquire():
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


def test_lock_of_another_host_is_stale_without_heartbeat(tmp_path: Path) -> None:
    leave(tmp_path, of_another_host(), age_s=STALE_S / 2)
    threading.Timer(0.2, lambda: os.utime(tmp_path / LOCK)).start()
    with pytest.raises(InUse):
        lock(tmp_path).acquire()
    leave(tmp_path, of_another_host(), age_s=STALE_S + 1)
    lock(tmp_path).acquire().release()


def test_stale_lock_is_taken_by_one_of_many(tmp_path: Path) -> None:
    for _ in range(8):
        leave(tmp_path, replace(Owner.me("theirs"), started="0"))
        locks = [lock(tmp_path, f"run-{number}") for number in range(4)]
        got: list[Lock] = []
        ready = threading.Barrier(len(locks))

        def race(one: Lock, ready: threading.Barrier = ready, got: list[Lock] = got) -> None:
            ready.wait()
            with contextlib.suppress(InUse):
                got.append(one.acquire())

        threads = [threading.Thread(target=race, args=(one,)) for one in locks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(got) == 1
        got[0].release()


def test_leftover_lock_guard_is_removed_after_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    leave(tmp_path, replace(Owner.me("theirs"), started="0"))
    guard = tmp_path / f".{LOCK}.taking"
    guard.touch()

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 2:
            os.utime(guard, (time.time() - STALE_S - 1,) * 2)

    monkeypatch.setattr(time, "sleep", nap)
    with lock(tmp_path).acquire():
        assert len(naps) == 3, "twice while somebody may be at work, once after it was removed"
        assert os.listdir(tmp_path) == [LOCK]


def test_hidden_process_is_not_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    living, gone = replace(Owner.me("theirs"), pid=1), replace(Owner.me("theirs"), pid=ended.pid)
    ended.wait()
    for says in (psutil.NoSuchProcess, psutil.AccessDenied):  # of others' processes, with hidepid=2 and hidepid=1

        def hide(pid: int, says: type[psutil.Error] = says) -> None:
            raise (psutil.NoSuchProcess if pid == ended.pid else says)(pid)

        monkeypatch.setattr(psutil, "Process", hide)
        assert living.is_gone is None
        assert gone.is_gone is True


class Guarded(LockFile):
    """Another one makes its guard right after the one that was left over is looked at."""

    def _now(self) -> float:
        now = super()._now()
        os.utime(next(self.folder.glob("*.taking"), self.folder))
        return now


def test_lock_guard_in_use_by_another_stays(tmp_path: Path) -> None:
    guard = tmp_path / f".{LOCK}.taking"
    leave(tmp_path, of_another_host())
    guard.touch()
    os.utime(guard, (time.time() - STALE_S - 1,) * 2)
    assert not Guarded(tmp_path).take(Seen(of_another_host().to_text(), 0.0), b"mine")
    assert sorted(os.listdir(tmp_path)) == [guard.name, LOCK]


class Watched(RemoteStorage):
    """Whoever reads first waits until the other has read, too."""

    def __init__(self, url: str, both_read: threading.Barrier) -> None:
        super().__init__(url)
        self.first_look = both_read.wait

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        text = super().read(name, start, length)
        self.first_look(60)
        self.first_look = lambda timeout=None: 0
        return text


def test_stale_lock_object_is_taken_by_one_of_two() -> None:
    url, stale = f"memory://{uuid.uuid4().hex}", of_another_host().to_text()
    open_storage(url).write(LOCK, stale)
    both_read, both_wrote = threading.Barrier(2), threading.Barrier(2)
    places = [LockObject(Watched(url, both_read), sleep=lambda _: both_wrote.wait(60)) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        got = list(pool.map(lambda place, text: place.take(Seen(stale, 0.0), text), places, [b"one", b"two"]))
    assert sorted(got) == [False, True]
    assert open_storage(url).read(LOCK) == (b"one" if got[0] else b"two")


@pytest.mark.parametrize("make", [lambda path: str(path), lambda path: f"memory://{uuid.uuid4().hex}"])
def test_checkpoint_folder_has_one_writer(tmp_path: Path, make: Callable[[Path], str]) -> None:
    url = make(tmp_path / "checkpoints")
    first = hold_folder(open_storage(url), "mine", resume=False)
    with pytest.raises(CheckpointError, match="in use by process"):
        hold_folder(open_storage(url), "another", resume=False)
    hold_folder(open_storage(url), "mine", resume=False)  # a restarted world of the same launch
    first.release()
    storage = open_storage(url)
    hold_folder(storage, "another", resume=False).release()
    storage.write(LOCK, replace(Owner.me("theirs"), started="0").to_text())
    hold_folder(storage, "mine", resume=False).release()
    assert storage.size(LOCK) is None


@pytest.mark.parametrize("make", [lambda path: str(path), lambda path: f"memory://{uuid.uuid4().hex}"])
@pytest.mark.parametrize("left", [of_another_host().to_text(), None], ids=["taken", "taken and released"])
@pytest.mark.parametrize("when", ["chunk written", "manifest written"])
def test_save_in_flight_stops_when_another_run_took_the_folder(
    tmp_path: Path, make: Callable[[Path], str], left: bytes | None, when: str
) -> None:
    storage = open_storage(make(tmp_path / "checkpoints"))
    held, taken_at = hold_folder(storage, "mine", resume=False), ""

    def at(point: str) -> None:
        if point == taken_at:
            storage.write(LOCK, left) if left is not None else storage.delete(LOCK)

    session = Session(WorkerEnv(), torch.device("cpu"), None)
    saver = Saver(storage, session, TensorStaging(), keep_last=1, check_held=partial(check_held, held), at=at)
    saver.save(1, {"model": {"w": torch.ones(3)}}, {}, wait=True)
    taken_at = when
    saver.save(2, {"model": {"w": torch.zeros(3)}}, {})
    with pytest.raises(FolderTakenError, match="taken by another run"):
        saver.wait()
    found = {name for name in storage.list() if name.endswith("manifest.json")}
    before = {"step-000002/manifest.json"} if when == "manifest written" else set()
    assert found == {"step-000001/manifest.json", *before}
    held.release()
    assert (storage.read(LOCK) if storage.size(LOCK) is not None else None) == left


def test_run_that_lost_its_directory_raises_and_is_not_requeued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distributed.core.locks.BEAT_S", 0.01)
    stopped = threading.Event()

    def run() -> None:
        with owned(tmp_path, resume=False):
            leave(tmp_path, of_another_host())
            assert stopped.wait(60)
            raise SystemExit(75)  # what a stop by SIGTERM ends with

    before = signal.signal(signal.SIGTERM, lambda *signalled: stopped.set())
    try:
        with pytest.raises(LaunchError, match="was taken by another run"):
            run()
    finally:
        signal.signal(signal.SIGTERM, before)
