"""What is saved comes back byte for byte, unchanged bytes are not written again, and errors behind the loop surface."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distributed.checkpoint.format.manifest import Part, Piece, Ref, TensorEntry
from distributed.checkpoint.format.tensors import DTYPES, digest_components
from distributed.checkpoint.restore.candidates import find
from distributed.checkpoint.restore.reading import load, load_parts, verify
from distributed.checkpoint.restore.restoring import restore
from distributed.checkpoint.restore.rng import restore_rng, rng_state
from distributed.checkpoint.save.saver import Saver
from distributed.checkpoint.save.staging import TensorStaging
from distributed.checkpoint.storage.chunks import ChunkStore, chunk_name
from distributed.checkpoint.storage.local import LocalStorage
from distributed.core.env import WorkerEnv
from distributed.core.errors import CheckpointError
from distributed.runtime.session import Session


def alone() -> Session:
    return Session(WorkerEnv(), torch.device("cpu"), None)


def same(one: Any, other: Any) -> bool:
    """Equal in structure, type and every byte."""
    if isinstance(one, torch.Tensor):
        if not isinstance(other, torch.Tensor) or one.dtype != other.dtype or one.shape != other.shape:
            return False
        raw = (
            [t.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
            if one.numel()
            else [one, one]
        )
        return torch.equal(raw[0], raw[1])
    if isinstance(one, dict):
        return isinstance(other, dict) and list(one) == list(other) and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and (one == other or (one != one and other != other))


def every_kind() -> dict[str, Any]:
    torch.manual_seed(0)
    tied = torch.randn(7, 3)
    words = torch.randint(0, 255, (4096,), dtype=torch.uint8)
    typed = {name: words.to(torch.bool) if name == "bool" else words.view(dtype) for name, dtype in DTYPES.items()}
    return {
        "model": {
            **typed,
            "scalar": torch.tensor(3.5),
            "empty": torch.empty(0, 4),
            "tied": tied,
            "also_tied": tied,
            "transposed": torch.randn(5, 9).t(),
            "strided": torch.randn(300_000)[::2],
            "large": torch.randn(3_000_000),
            "conjugate": torch.randn(4, dtype=torch.complex64).conj(),
            "parameter": torch.nn.Parameter(torch.ones(2)),
        },
        "optimizer": {
            "state": {0: {"step": torch.tensor(5.0)}, 1: {}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 1)}],
        },
        "a/b": {"c": torch.ones(1)},
        "a": {"b": {"c": torch.zeros(1)}, "b/c": torch.full((1,), 2.0)},
        "marks": {"__tensor__": 1, "__tuple__": [2]},
        "scalars": {"none": None, "yes": True, "nan": float("nan"), "big": 2**80, "text": "ä\0", "less": float("-inf")},
    }


def test_every_kind_of_state_is_restored_bitwise(tmp_path: Path) -> None:
    state, own = every_kind(), {"rng": {"torch": torch.get_rng_state()}}
    saver = Saver(str(tmp_path), alone(), TensorStaging())
    saver.save(500, state, own, {"settings": {"epochs": 3}}, metric=0.25)
    path = saver.wait()
    assert path == str(tmp_path / "step-000500")
    loaded = load(path)
    assert same(loaded.shared, state)
    assert same(loaded.own[0], own)
    assert loaded.shared["model"]["tied"] is loaded.shared["model"]["also_tied"]
    assert loaded.manifest.meta == {"settings": {"epochs": 3}, "sequence": 1}
    assert loaded.manifest.metric == 0.25
    assert not verify(path).problems


def test_digests_of_live_and_stored_state_agree_by_component(tmp_path: Path) -> None:
    state, own = every_kind(), {"rng": {"words": torch.arange(5)}}
    saver = Saver(str(tmp_path), alone(), TensorStaging(), asynchronous=False)
    saver.save(1, state, own)
    stored = load(str(tmp_path / "step-000001")).manifest.digests
    live = digest_components(state) | {"rank-0/rng": digest_components(own)["rng"]}
    assert stored == live
    state["optimizer"]["state"][0]["step"] += 1
    changed = digest_components(state)
    assert [name for name in changed if changed[name] != stored[name]] == ["optimizer"]


def test_save_after_a_small_change_writes_few_bytes(tmp_path: Path) -> None:
    state = {"model": {f"w{i}": torch.randn(2**20) for i in range(20)}, "optimizer": {"m": torch.randn(5 * 2**20)}}
    saver = Saver(str(tmp_path), alone(), TensorStaging(), asynchronous=False)
    saver.save(1, state, {})
    assert saver.last_saved is not None
    total = saver.last_saved.total_bytes
    assert saver.last_saved.written_bytes == total
    state["model"]["w3"].add_(1)  # 4 of 100 MiB
    state["optimizer"]["m"][: 2**18] += 1  # 1 of them
    saver.save(2, state, {})
    assert saver.last_saved.written_bytes <= 0.1 * total
    saver.save(3, state, {})
    assert saver.last_saved.written_bytes == 0
    again = Saver(str(tmp_path), alone(), TensorStaging(), asynchronous=False)  # another process finds the chunks too
    again.save(4, state, {})
    assert again.last_saved is not None
    assert again.last_saved.written_bytes == 0
    assert same(load(str(tmp_path / "step-000003")).shared, state)
    assert not same(load(str(tmp_path / "step-000001")).shared, state)


def test_small_tensors_share_chunks(tmp_path: Path) -> None:
    state = {"model": {f"bias{i}": torch.randn(64) for i in range(1000)}}
    Saver(str(tmp_path), alone(), TensorStaging(), asynchronous=False).save(1, state, {})
    assert len(LocalStorage(tmp_path).list("chunks")) == 1
    assert same(load(str(tmp_path / "step-000001")).shared, state)


def test_state_may_change_as_soon_as_save_returns(tmp_path: Path) -> None:
    gate = threading.Event()
    state = {"model": {"w": torch.zeros(2**21), "b": torch.zeros(3)}}
    saver = Saver(
        str(tmp_path), alone(), TensorStaging(), at=lambda point: gate.wait(60) if point == "chunk written" else None
    )
    saver.save(1, state, {})
    for tensor in state["model"].values():
        tensor.fill_(7)
    assert not find(str(tmp_path), True), "nothing is published while the chunks are being written"
    gate.set()
    saver.save(2, state, {})
    saver.close()
    assert load(str(tmp_path / "step-000001")).shared["model"]["w"].eq(0).all()
    assert load(str(tmp_path / "step-000002")).shared["model"]["w"].eq(7).all()


def test_async_save_error_is_raised_by_next_call_then_recovers(tmp_path: Path) -> None:
    broken = {"now": False}

    def fail(point: str) -> None:
        if broken["now"] and point.startswith("unsynced: chunks"):
            raise OSError(28, "No space left on device")

    saved: list[int] = []
    storage = LocalStorage(tmp_path, at=fail)
    saver = Saver(storage, alone(), TensorStaging(), on_saved=lambda done: saved.append(done.step))
    saver.save(1, {"model": {"w": torch.ones(3)}}, {})
    saver.wait()
    broken["now"] = True
    saver.save(2, {"model": {"w": torch.ones(4)}}, {})
    with pytest.raises(CheckpointError, match="full"):
        saver.save(3, {"model": {"w": torch.ones(5)}}, {})
    assert [found.step for found in find(str(tmp_path), True)] == [1]
    broken["now"] = False
    saver.save(4, {"model": {"w": torch.ones(5)}}, {})
    saver.close()
    assert saved == [1, 4]
    assert not list(tmp_path.rglob("*.tmp")), "a failed write leaves nothing behind"


def test_next_save_does_not_reuse_a_damaged_chunk(tmp_path: Path) -> None:
    state = {"model": {"frozen": torch.randn(2**18), "w": torch.zeros(2**18)}}
    Saver(str(tmp_path), alone(), TensorStaging(), asynchronous=False).save(1, state, {})
    entry = load(str(tmp_path / "step-000001")).manifest.shared.tensors["model/frozen"]
    victim = tmp_path / chunk_name(entry.pieces[0].refs[0].chunk)
    content = bytearray(victim.read_bytes())
    content[100] ^= 1
    victim.write_bytes(content)
    assert "model/frozen" in str(verify(str(tmp_path / "step-000001")))
    Saver(str(tmp_path), alone(), TensorStaging(), asynchronous=False).save(2, state, {})
    assert same(load(str(tmp_path / "step-000002")).shared, state)


def test_unstorable_state_is_refused_by_name(tmp_path: Path) -> None:
    saver = Saver(str(tmp_path), alone(), TensorStaging())
    with pytest.raises(CheckpointError, match="model/embedding"):
        saver.save(1, {"model": {"embedding": torch.eye(3).to_sparse()}}, {})
    with pytest.raises(CheckpointError, match="function"):
        saver.save(1, {"model": {"hook": len}}, {})
    assert not list(tmp_path.iterdir())


def test_resume_finds_the_newest_or_the_named_checkpoint(tmp_path: Path) -> None:
    root = str(tmp_path)
    assert restore(root, True, alone()) is None
    assert restore(root, False, alone()) is None
    with pytest.raises(CheckpointError, match="no checkpoint"):
        restore(root, root, alone())
    saver = Saver(root, alone(), TensorStaging(), asynchronous=False)
    for step in (5, 20, 1_000_000, 100):
        saver.save(step, {"model": {"w": torch.full((2,), step)}}, {"rng": {"step": step}})
    assert [found.step for found in find(root, True)] == [1_000_000, 100, 20, 5]
    expected = {"model": {"w": torch.zeros(3), "new": torch.zeros(1)}}
    for resume, step in ((True, 1_000_000), (f"{root}/step-000020", 20), (root, 1_000_000)):
        restored = restore(root, resume, alone(), expected=expected)
        assert restored is not None
        assert restored.step == step
        assert restored.shared["model"]["w"].tolist() == [step, step]
        assert restored.own == {"rng": {"step": step}}
        assert restored.report.missing == ("model/new",)
        assert "model/w" in restored.report.mismatched[0]
        assert "model/new" in str(restored.report)


def test_sharded_tensor_is_assembled_on_load(tmp_path: Path) -> None:
    whole = torch.arange(24, dtype=torch.int32).reshape(4, 6)
    boxes = [((0, 4), (0, 2)), ((0, 1), (2, 6)), ((1, 4), (2, 6))]
    saver = Saver(str(tmp_path), alone(), TensorStaging(), asynchronous=False)
    saver.save(1, {"model": {str(i): whole[slice(*a), slice(*b)].clone() for i, (a, b) in enumerate(boxes)}}, {})
    loaded = load(str(tmp_path / "step-000001"))
    refs: list[tuple[Ref, ...]] = [entry.pieces[0].refs for entry in loaded.manifest.shared.tensors.values()]
    pieces = tuple(Piece(ref, box) for ref, box in zip(refs, boxes, strict=True))
    part = Part({"w": {"__tensor__": "w"}}, {"w": TensorEntry("int32", (4, 6), pieces, "0" * 64, "shard")})
    assert torch.equal(load_parts(loaded.manifest, [part], ChunkStore(LocalStorage(tmp_path)))[0]["w"], whole)


def test_random_generators_resume_their_sequence() -> None:
    def draw() -> list[float]:
        return [random.gauss(), random.random(), np.random.randn(), np.random.random(), torch.rand(()).item()]

    draw()  # a second number of each normal pair is kept for the next call
    held = rng_state(torch.device("cpu"))
    wanted = draw()
    assert draw() != wanted
    restore_rng(held, torch.device("cpu"))
    assert draw() == wanted
