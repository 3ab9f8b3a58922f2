"""Several real ranks write one checkpoint together, and any number of ranks reads it."""

from __future__ import annotations

import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch

from distributed.checkpoint.format.tensors import digest_components
from distributed.checkpoint.restore.reading import load, verify
from distributed.checkpoint.restore.restoring import restore
from distributed.checkpoint.save.saver import Saver
from distributed.checkpoint.save.staging import TensorStaging
from distributed.checkpoint.storage.chunks import chunk_name
from distributed.checkpoint.storage.local import LocalStorage
from distributed.core.env import WorkerEnv, worker_env
from distributed.core.errors import CheckpointError
from distributed.runtime.session import Session
from distributed.testing import run_ranks


def session() -> Session:
    env = worker_env()
    assert env is not None
    return Session.open(env, device="cpu", collectives="gloo", timeout_s=60)


def state(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    model = {f"w{i}": torch.randn(3_000_000, generator=generator) for i in range(3)}  # 12 MB each: chunks of one tensor
    return {"model": model | {"b": torch.randn(5, generator=generator)}, "progress": {"step": step}}


def own(rank: int, step: int) -> dict[str, Any]:
    return {"rng": {"words": torch.tensor([rank, step]), "step": step}}


def save_twice(root: str) -> dict[str, Any]:
    mine, passed, saved = session(), Counter[str](), []
    saver = Saver(root, mine, TensorStaging(), at=lambda point: passed.update([point]), on_saved=saved.append)
    for step in (1, 2):
        saver.save(step, state(step), own(mine.rank, step), {"step": step})
    return {
        "path": saver.wait(),
        "chunks": passed["chunk written"],
        "saved": saved,
        "published": passed["manifest written"],
    }


def save_late_on_rank_1(root: str) -> dict[str, float]:
    """When this rank was at each point for the first time; rank 1 saves half a second after rank 0."""
    mine, reached = session(), dict[str, float]()
    at = partial(note, reached)
    saver = Saver(root, mine, TensorStaging(), neighbours=mine.neighbours, at=at)
    mine.barrier("both are ready")
    time.sleep(0.5 * mine.rank)
    saver.save(1, state(1), own(mine.rank, 1))
    saver.wait()
    return reached


def note(reached: dict[str, float], point: str) -> None:
    reached.setdefault(point, time.monotonic())


def read(root: str) -> dict[str, Any]:
    mine = session()
    restored = restore(root, True, mine)
    assert restored is not None
    result = {
        "step": restored.step,
        "digests": digest_components(restored.shared),
        "own": None if restored.own is None else restored.own["rng"]["words"].tolist(),
        "resharded": restored.report.resharded,
        "skipped": [path for path, _ in restored.report.skipped],
        "text": str(restored.report),
    }
    return result


def test_rank_that_has_copied_hashes_when_its_neighbours_have(tmp_path: Path) -> None:
    first, late = run_ranks(save_late_on_rank_1, 2, str(tmp_path))
    assert first["copied"] < late["copied"] < first["chunk written"]


def test_checkpoint_of_three_ranks_loads_at_any_world_size(tmp_path: Path) -> None:
    root = str(tmp_path)
    results = run_ranks(save_twice, 3, root)
    assert {result["path"] for result in results} == {f"{root}/step-000002"}
    assert [result["published"] for result in results] == [2, 0, 0]
    assert all(6 <= result["chunks"] <= 12 for result in results), "two saves of ten chunks, and each rank's own"
    for result in results:
        assert [done.step for done in result["saved"]] == [1, 2]
        assert result["saved"][0].written_bytes == result["saved"][0].total_bytes > 36_000_000
    path = f"{root}/step-000002"
    assert not verify(path).problems
    loaded = load(path)
    assert loaded.manifest.world_size == 3
    assert loaded.manifest.meta == {"step": 2, "sequence": 2}
    assert [loaded.own[rank]["rng"]["words"][0].item() for rank in range(3)] == [0, 1, 2]
    assert LocalStorage(tmp_path).list("parts") == []

    alone = Saver(
        str(tmp_path / "alone"), Session(WorkerEnv(), torch.device("cpu"), None), TensorStaging(), asynchronous=False
    )
    alone.save(2, state(2), own(0, 2))
    single = load(str(tmp_path / "alone" / "step-000002")).manifest
    assert single.shared == loaded.manifest.shared, "any number of ranks makes the same chunks"

    for rank, result in enumerate(run_ranks(read, 2, root)):
        assert (result["step"], result["own"], result["resharded"]) == (2, None, True), rank
        assert result["digests"] == digest_components(state(2))
        assert "saved by 3 ranks, loaded by 2" in result["text"]
    victim = tmp_path / chunk_name(loaded.manifest.own[1].tensors["rng/words"].pieces[0].refs[0].chunk)
    victim.write_bytes(b"x" * 16)  # only rank 1 reads it; all must go back together
    for rank, result in enumerate(run_ranks(read, 3, root)):
        assert (result["step"], result["own"]) == (1, [rank, 1])
        assert result["skipped"] == [path]
        assert victim.name[:12] in result["text"]


def fail_on_rank_1(root: str) -> list[str]:
    mine, broken = session(), {"now": False}

    def fail(point: str) -> None:
        if broken["now"] and mine.rank == 1 and point.startswith("unnamed: chunks"):
            raise OSError(5, "Input/output error")

    saver = Saver(LocalStorage(root, at=fail), mine, TensorStaging())
    heard: list[str] = []
    for step in (1, 2, 3, 4):
        broken["now"] = step == 2
        try:
            saver.save(step, state(step), own(mine.rank, step))
            saver.wait()
            heard.append(f"saved {step}")
        except CheckpointError as failed:
            heard.append(str(failed))
    other = {"model": {"w": torch.zeros(3 + mine.rank)}}
    try:
        saver.save(5, other, {}, wait=True)
    except CheckpointError as failed:
        heard.append(str(failed))
    return heard


def test_failed_save_on_one_rank_raises_on_all_then_recovers(tmp_path: Path) -> None:
    first, second = run_ranks(fail_on_rank_1, 2, str(tmp_path))
    assert first == second
    assert "Input/output error" in first[1]
    assert [first[0], *first[2:4]] == ["saved 1", "saved 3", "saved 4"]
    assert "rank 1 holds another state than rank 0" in first[4]
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000001", "step-000003", "step-000004"]
    assert not verify(str(tmp_path / "step-000004")).problems


class LateDisk(LocalStorage):
    """A client of a shared disk that does not see what other hosts write before it has looked for it some times."""

    def __init__(self, root: str, looks: int) -> None:
        super().__init__(root)
        self._looks, self._mine, self._seen = looks, set[str](), Counter[str]()

    def write(self, name: str, data: Any) -> None:
        self._mine.add(name)
        super().write(name, data)

    def size(self, name: str) -> int | None:
        if name.startswith("chunks/") and name not in self._mine and super().size(name) is not None:
            self._seen.update([name])
            if self._seen[name] <= self._looks:
                return None
        return super().size(name)


def save_late(root: str, looks: int) -> str:
    mine = session()
    saver = Saver(LateDisk(root, looks) if mine.is_main else root, mine, TensorStaging())
    saver._publisher.visible_s = 1.0
    saver.save(1, {"model": {"w": torch.arange(2e6), "v": torch.ones(2_000_000)}}, own(mine.rank, 1))
    try:
        return saver.wait() or ""
    except CheckpointError as error:
        return str(error)


def test_save_waits_for_late_files_then_names_the_rank(tmp_path: Path) -> None:
    for told in run_ranks(save_late, 2, str(tmp_path / "late"), 3):
        assert told == str(tmp_path / "late" / "step-000001")
    assert not verify(str(tmp_path / "late" / "step-000001")).problems
    for told in run_ranks(save_late, 2, str(tmp_path / "apart"), 10**9):
        assert told.startswith("rank 1 on ")
        assert "does not see it after" in told
    assert not list((tmp_path / "apart").glob("step-*")), "there is no manifest before its chunks"
