"""kill -9 at every point of a save: afterwards the last whole checkpoint loads, and the next save cleans up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch

from distributed.checkpoint.restore.reading import verify
from distributed.checkpoint.restore.restoring import restore
from distributed.checkpoint.save.saver import Saver
from distributed.checkpoint.save.staging import TensorStaging
from distributed.checkpoint.storage.chunks import chunk_name
from distributed.checkpoint.storage.local import LocalStorage
from distributed.core.env import WorkerEnv
from distributed.runtime.session import Session
from tests.conftest import clean_environ

# One process imports torch; each history is a child of it that ends itself in the middle of its second save.
SAVES = """
import json, os, signal, sys, threading
import torch
from distributed.checkpoint.storage.local import LocalStorage
from distributed.checkpoint.save.saver import Saver
from distributed.checkpoint.save.staging import TensorStaging
from distributed.core.env import WorkerEnv
from distributed.runtime.session import Session

torch.set_num_threads(1)


def state(step):
    model = {"frozen": torch.arange(2.0**17), "w": torch.full((2**17,), step), "b": torch.full((5,), float(step))}
    return {"model": model, "progress": {"step": step}}


def history(root, kill_at):
    armed, passed, lock = False, [], threading.Lock()

    def at(point):
        with lock:
            if armed:
                if len(passed) == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                passed.append(point)

    session = Session(WorkerEnv(), torch.device("cpu"), None)
    saver = Saver(LocalStorage(root, at=at), session, TensorStaging(), keep_last=1, at=at)
    saver.save(10, state(10), {"rng": {"n": torch.tensor(10)}}, wait=True)
    armed = True
    saver.save(20, state(20), {"rng": {"n": torch.tensor(20)}}, wait=True)
    return passed


root = sys.argv[1]
child_reads, child_writes = os.pipe()
if os.fork() == 0:
    os.write(child_writes, json.dumps(history(f"{root}/whole", None)).encode())
    os._exit(0)
os.wait()
points = json.loads(os.read(child_reads, 1 << 16))
for index in range(len(points)):
    if os.fork() == 0:
        history(f"{root}/{index}", index)
        os._exit(0)
    assert os.WTERMSIG(os.wait()[1]) == signal.SIGKILL, index
print(json.dumps(points))
"""


def test_last_whole_checkpoint_survives_kill_at_every_point(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", SAVES, str(tmp_path)], env=clean_environ(), capture_output=True, text=True, timeout=200
    )
    assert run.returncode == 0, run.stderr
    points = json.loads(run.stdout)
    for named in ("copied", "chunk written", "chunks written", "part written", "before the manifest"):
        assert named in points
    for named in ("manifest written", "garbage: manifest removed", "garbage: chunk removed"):
        assert named in points
    assert sum(point.startswith(("unsynced:", "unnamed:")) for point in points) >= 10
    published = points.index("manifest written")
    found = [check(tmp_path / str(index)) for index in range(len(points))]
    assert set(found[: published - 1]) == {10}, "before the manifest has its name there is only the older one"
    assert set(found[published:]) == {20}
    assert check(tmp_path / "whole") == 20


def check(root: Path) -> int:
    """What a run resumes from, which is exactly what was saved; and that the next save leaves no garbage."""
    session = Session(WorkerEnv(), torch.device("cpu"), None)
    restored = restore(str(root), True, session)
    assert restored is not None
    step = restored.step
    model = restored.shared["model"]
    assert restored.shared["progress"] == {"step": step}
    assert torch.equal(model["w"], torch.full((2**17,), step))
    assert torch.equal(model["frozen"], torch.arange(2.0**17))
    assert model["b"].tolist() == [float(step)] * 5
    assert restored.own == {"rng": {"n": torch.tensor(step)}}
    assert not restored.report.skipped, "a killed save leaves nothing that looks like a checkpoint"
    saver = Saver(
        str(root), session, TensorStaging(), keep_last=1, guard_s=0, known=restored.verified, asynchronous=False
    )
    saver.save(30, restored.shared, {})
    assert not verify(str(root / "step-000030")).problems
    manifest = restore(str(root), True, session)
    assert manifest is not None
    left = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    assert left == {"step-000030/manifest.json", *(chunk_name(digest) for digest in manifest.manifest.chunks)}
    assert set(LocalStorage(root).list()) == left
    return step
