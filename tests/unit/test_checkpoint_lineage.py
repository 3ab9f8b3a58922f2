"""Several runs in one checkpoint folder: none removes, replaces or hides what another wrote."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import torch

from distributed.checkpoint.exchange.catalog import list_checkpoints, open_one
from distributed.checkpoint.format.manifest import Manifest
from distributed.checkpoint.restore.candidates import find
from distributed.checkpoint.restore.reading import load, verify
from distributed.checkpoint.save.retention import Collector, Retention
from distributed.checkpoint.save.saver import Saver
from distributed.checkpoint.save.staging import TensorStaging
from distributed.checkpoint.storage.lineage import Lineage, check_unused, choose_lineage, whole_names
from distributed.checkpoint.storage.manifests import open_checkpoint, read_manifest
from distributed.checkpoint.storage.urls import open_storage
from distributed.core.env import WorkerEnv
from distributed.runtime.session import Session

A, B = "a" * 32, "b" * 32
LATER = Lineage(B, B[:8])  # a run that is not the first of its folder


def save(url: str, lineage: Lineage, *steps: int, value: float = 0.0, **how: Any) -> str:
    session = Session(WorkerEnv(), torch.device("cpu"), None)
    saver = Saver(url, session, TensorStaging(), lineage=lineage, asynchronous=False, **how)
    for step in steps:
        saver.save(step, {"model": {"w": torch.full((2**17,), step + value)}}, {}, {"launch": lineage.run})
    return saver.wait() or ""


def names(url: str) -> list[str]:
    return whole_names(open_storage(url))


def found_at(path: str) -> tuple[str, Manifest]:
    return path, read_manifest(*open_checkpoint(path))


def test_run_resumed_from_old_step_keeps_others_checkpoints(tmp_path: Path) -> None:
    url = str(tmp_path)
    save(url, Lineage(A), 5, 10, 15, 20, 25, 30)
    last = save(url, LATER, 10, 15, 20, value=0.5, keep_last=2)
    first = [f"step-{step:06d}" for step in (5, 10, 15, 20, 25, 30)]
    assert names(url) == sorted([*first, "step-000015-bbbbbbbb", "step-000020-bbbbbbbb"])
    assert last.endswith("step-000020-bbbbbbbb")
    assert load(f"{url}/step-000020").shared["model"]["w"][0] == 20.0
    assert load(last).shared["model"]["w"][0] == 20.5
    assert not any(verify(f"{url}/{name}").problems for name in names(url))
    assert find(url, True)[0].path == last, "the newest is the one that was written last"
    assert open_one(url).path == last
    assert {row.run for row in list_checkpoints(url).rows} == {A, B}
    save(url, Lineage(A), 35, keep_last=1)
    assert names(url) == ["step-000015-bbbbbbbb", "step-000020-bbbbbbbb", "step-000035"]
    assert find(url, True)[0].name == "step-000035", "the first run went on"


def test_keep_last_counts_by_time_written_not_by_step(tmp_path: Path) -> None:
    """A run that passed over a damaged checkpoint goes on below its step."""
    url = str(tmp_path)
    save(url, Lineage(A), 25, 30)
    save(url, Lineage(A), 28, keep_last=1)
    assert names(url) == ["step-000028"]


def test_checkpoint_of_another_run_is_not_replaced(tmp_path: Path) -> None:
    url = str(tmp_path)
    save(url, Lineage(A), 5)
    assert save(url, Lineage(B), 5, value=0.5).endswith("step-000005-bbbbbbbb")
    assert load(f"{url}/step-000005").shared["model"]["w"][0] == 5.0
    (tmp_path / "step-000005" / "manifest.json").write_bytes(b"{}")
    assert save(url, Lineage(A), 5).endswith("step-000005"), "one that nobody can read is"


def test_launch_continues_a_lineage_or_branches_off(tmp_path: Path) -> None:
    url = str(tmp_path)
    storage = open_storage(url)
    assert choose_lineage(storage, A, None, []) == Lineage(A)
    assert check_unused(storage) == []
    save(url, Lineage(A), 5, 10, 15)
    head, older = found_at(f"{url}/step-000015"), found_at(f"{url}/step-000005")
    assert choose_lineage(storage, B, head, []) == Lineage(A), "it resumes the run"
    assert choose_lineage(storage, B, older, []) == LATER, "it goes back"
    assert choose_lineage(storage, B, older, [f"{url}/step-000010", head[0]]) == Lineage(A), "the others are damaged"
    assert choose_lineage(storage, B, None, []) == LATER, "it begins anew"
    elsewhere = open_storage(str(tmp_path / "elsewhere"))
    assert choose_lineage(elsewhere, B, head, []) == Lineage(B), "its checkpoints go to another folder"
    assert "step-000005 to step-000015" in check_unused(storage)[0].what


def test_checkpoint_published_during_collection_stays_whole() -> None:
    """In an object store, where a chunk that is used again looks as old as before."""
    url = f"memory://{uuid.uuid4().hex}"
    save(url, Lineage(A), 1, 2)

    def publish(point: str) -> None:
        if point == "garbage: manifest removed":
            save(url, LATER, 1)

    removed = Collector(open_storage(url), Retention(keep_last=1), at=publish, run=A).collect()
    assert removed.checkpoints == ("step-000001",)
    assert names(url) == ["step-000001-bbbbbbbb", "step-000002"]
    assert not any(verify(f"{url}/{name}").problems for name in names(url))
