"""Weights leave checkpoints and come back byte for byte, and no file that is taken in can run code."""

from __future__ import annotations

import json
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from distributed.checkpoint.exchange.catalog import list_checkpoints, open_all, open_one
from distributed.checkpoint.exchange.diff import compare, compare_tensors
from distributed.checkpoint.exchange.export import export_checkpoint
from distributed.checkpoint.exchange.importing import import_weights
from distributed.checkpoint.exchange.verify import verify_all
from distributed.checkpoint.format.manifest import Part, Piece, TensorEntry
from distributed.checkpoint.format.tensors import DTYPES
from distributed.checkpoint.restore.reading import load, verify
from distributed.checkpoint.restore.restoring import restore
from distributed.checkpoint.save.saver import Saver
from distributed.checkpoint.save.staging import TensorStaging
from distributed.checkpoint.storage.chunks import chunk_name
from distributed.core.env import WorkerEnv
from distributed.core.errors import CheckpointError, ConfigError
from distributed.runtime.session import Session


def alone() -> Session:
    return Session(WorkerEnv(), torch.device("cpu"), None)


class Tied(nn.Module):
    """Of several types, with tied weights, a large tensor, a scalar buffer and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, 16)
        self.norm = nn.BatchNorm1d(16)
        self.half = nn.Linear(16, 16).bfloat16()
        self.wide = nn.Linear(1100, 1100)  # 4.6 MiB: two chunks
        self.head = nn.Linear(16, 300, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("nothing", torch.empty(0, 3))


def trained(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int = 5, **more: Any) -> str:
    saver = Saver(str(folder), alone(), TensorStaging(), asynchronous=False)
    shared = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "progress": {"step": step}}
    saver.save(step, shared, {"rng": {"torch": torch.get_rng_state()}}, more.pop("meta", {}), **more)
    return str(folder / f"step-{step:06d}")


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def assert_same(found: Any, wanted: Any) -> None:
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert raw(found[name]) == raw(tensor), name


def model_of(path: str) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = load(path).shared["model"]
    return state


def test_safetensors_export_loads_in_library_and_keeps_ties(tmp_path: Path) -> None:
    model, optimizer = trained()
    path = save(tmp_path / "a", model, optimizer)
    steps: list[tuple[int, int]] = []
    done = export_checkpoint(
        open_one(path), str(tmp_path / "out/m.safetensors"), progress=lambda now, total: steps.append((now, total))
    )
    assert done.tied == {"head.weight": "embed.weight"}
    assert steps[-1] == (done.total_bytes, done.total_bytes)
    file = done.files[0]
    without_alias = {name: tensor for name, tensor in model.state_dict().items() if name != "head.weight"}
    assert_same(safetensors.torch.load_file(file), without_alias)
    other, _ = trained(seed=1)
    safetensors.torch.load_model(other, file)
    assert_same(other.state_dict(), model.state_dict())
    back = import_weights(file, str(tmp_path / "b"))
    assert not verify(back.path).problems
    assert_same(model_of(back.path), model.state_dict())
    state = model_of(back.path)
    assert state["head.weight"] is state["embed.weight"]
    assert os.listdir(tmp_path / "out") == ["m.safetensors"], "no temporary file stays"


@pytest.mark.parametrize("with_optimizer", [False, True])
def test_sharded_export_has_standard_index_and_imports_back(tmp_path: Path, with_optimizer: bool) -> None:
    model, optimizer = trained()
    path = save(tmp_path / "a", model, optimizer)
    out = tmp_path / "out"
    done = export_checkpoint(open_one(path), f"{out}/", max_shard_bytes=1_000_000, with_optimizer=with_optimizer)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert done.files[0] == str(out / "model.safetensors.index.json")
    files = sorted(set(index["weight_map"].values()))
    assert len(files) == len(done.files) - 1 > 1
    assert all(file == f"model-{i:05d}-of-{len(files):05d}.safetensors" for i, file in enumerate(files, 1))
    found: dict[str, torch.Tensor] = {}
    for file in files:
        held = safetensors.torch.load_file(out / file)
        assert sum(t.nbytes for t in held.values()) <= 1_000_000 or len(held) == 1
        assert {name for name, where in index["weight_map"].items() if where == file} == set(held)
        found |= held
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values()) == done.total_bytes
    assert any(name.startswith("optimizer/") for name in found) is with_optimizer
    for source in (out, out / "model.safetensors.index.json"):
        back = import_weights(str(source), str(tmp_path / f"b-{source.name}"))
        assert_same(model_of(back.path), model.state_dict())


def test_optimizer_in_safetensors_can_be_rebuilt(tmp_path: Path) -> None:
    model, optimizer = trained()
    path = save(tmp_path / "a", model, optimizer)
    file = export_checkpoint(open_one(path), str(tmp_path / "m.safetensors"), with_optimizer=True).files[0]
    with safetensors.safe_open(file, "pt") as opened:
        skeleton = json.loads(opened.metadata()["optimizer"])
    tensors = safetensors.torch.load_file(file)
    (first, state), *_ = skeleton["state"]["__pairs__"]
    wanted = optimizer.state_dict()["state"][first]["exp_avg"]
    assert raw(tensors[state["exp_avg"]["__tensor__"]]) == raw(wanted)
    assert skeleton["param_groups"][0]["lr"] == 0.1


@pytest.mark.parametrize("with_optimizer", [False, True])
def test_pt_export_is_a_state_dict_and_imports_back(tmp_path: Path, with_optimizer: bool) -> None:
    model, optimizer = trained()
    path = save(tmp_path / "a", model, optimizer)
    done = export_checkpoint(open_one(path), str(tmp_path / "w.pt"), "pt", with_optimizer=with_optimizer)
    loaded = torch.load(done.files[0], weights_only=True)
    other, other_optimizer = trained(seed=1)
    other.load_state_dict(loaded["model"] if with_optimizer else loaded)
    assert_same(other.state_dict(), model.state_dict())
    if with_optimizer:
        other_optimizer.load_state_dict(loaded["optimizer"])
        assert raw(other_optimizer.state_dict()["state"][0]["exp_avg"]) == raw(
            optimizer.state_dict()["state"][0]["exp_avg"]
        )
    back = import_weights(done.files[0], str(tmp_path / "b"))
    assert_same(model_of(back.path), model.state_dict())
    state = model_of(back.path)
    assert state["head.weight"] is state["embed.weight"]


def test_every_dtype_is_exported_and_imported(tmp_path: Path) -> None:
    words = torch.randint(0, 255, (4096,), dtype=torch.uint8)
    state = {name: words.to(torch.bool) if name == "bool" else words.view(dtype) for name, dtype in DTYPES.items()}
    Saver(str(tmp_path / "a"), alone(), TensorStaging(), asynchronous=False).save(1, {"model": state}, {})
    opened = open_one(str(tmp_path / "a"))
    with pytest.raises(CheckpointError, match="complex128"):
        export_checkpoint(opened, str(tmp_path / "m.safetensors"))
    for suffix in ("pt", "safetensors"):
        if suffix == "safetensors":
            del state["complex128"]
            Saver(str(tmp_path / "a"), alone(), TensorStaging(), asynchronous=False).save(2, {"model": state}, {})
            opened = open_one(str(tmp_path / "a"))
        file = export_checkpoint(opened, str(tmp_path / f"m.{suffix}"), suffix).files[0]
        back = import_weights(file, str(tmp_path / suffix))
        assert_same(model_of(back.path), state)


def test_import_of_saved_weights_writes_no_new_chunk(tmp_path: Path) -> None:
    model, optimizer = trained()
    path = save(tmp_path / "a", model, optimizer)
    torch.save(model.state_dict(), tmp_path / "w.pt")
    again = import_weights(str(tmp_path / "w.pt"), str(tmp_path / "a"), step=0)
    assert again.written_bytes == 0
    assert load(again.path).manifest.digests["model"] == load(path).manifest.digests["model"]
    restored = restore(str(tmp_path / "a"), again.path, alone())
    assert restored is not None
    assert list(restored.shared) == ["model"]
    assert restored.own == {}
    with pytest.raises(ConfigError, match="exists"):
        import_weights(str(tmp_path / "w.pt"), str(tmp_path / "a"), step=0)


def test_export_overwrites_only_with_force_and_wholly(tmp_path: Path) -> None:
    opened = open_one(save(tmp_path / "a", *trained()))
    out = tmp_path / "out"
    first = export_checkpoint(opened, f"{out}/", max_shard_bytes=1_000_000)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    for most in (None, 2_000_000):
        with pytest.raises(ConfigError, match="exists"):
            export_checkpoint(opened, f"{out}/", max_shard_bytes=most)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert len(first.files) > 2
    export_checkpoint(opened, f"{out}/", force=True)
    assert os.listdir(out) == ["model.safetensors"]
    export_checkpoint(opened, f"{out}/", max_shard_bytes=1_000_000, force=True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_export_of_damaged_checkpoint_leaves_no_file(tmp_path: Path) -> None:
    path = save(tmp_path / "a", *trained())
    opened = open_one(path)
    victim = tmp_path / "a" / chunk_name(opened.manifest.shared.tensors["model/wide.weight"].pieces[0].refs[1].chunk)
    content = bytearray(victim.read_bytes())
    content[7] ^= 1
    victim.write_bytes(content)
    for format in ("safetensors", "pt"):
        with pytest.raises(CheckpointError, match=victim.name[:12]):
            export_checkpoint(opened, str(tmp_path / f"out/m.{format}"), format)
        assert not any(file.is_file() for file in (tmp_path / "out").rglob("*"))


def test_sharded_tensor_is_exported_whole(tmp_path: Path) -> None:
    """No strategy writes them yet; a reader of this format must know them."""
    whole = torch.arange(24, dtype=torch.int32).reshape(4, 6)
    saver = Saver(str(tmp_path), alone(), TensorStaging(), asynchronous=False)
    saver.save(1, {"model": {"left": whole[:, :2].clone(), "right": whole[:, 2:].clone()}}, {})
    opened = open_one(str(tmp_path))
    boxes = (((0, 4), (0, 2)), ((0, 4), (2, 6)))
    pieces = [
        Piece(e.pieces[0].refs, box) for e, box in zip(opened.manifest.shared.tensors.values(), boxes, strict=True)
    ]
    entry = TensorEntry("int32", (4, 6), tuple(pieces), "0" * 64, "shard")
    sharded = replace(opened.manifest, shared=Part({"model": {"w": {"__tensor__": "w"}}}, {"w": entry}))
    file = export_checkpoint(replace(opened, manifest=sharded), str(tmp_path / "m.safetensors")).files[0]
    assert torch.equal(safetensors.torch.load_file(file)["w"], whole)


def test_import_finds_the_state_dict_or_asks_for_its_key(tmp_path: Path) -> None:
    state = {"model.w": torch.randn(3), "model.b": torch.randn(2)}
    lightning = tmp_path / "l.ckpt"
    torch.save({"epoch": 3, "state_dict": OrderedDict(state), "optimizer_states": [{}]}, lightning)
    back = import_weights(str(lightning), str(tmp_path / "l"), strip_prefix="model.")
    assert_same(model_of(back.path), {"w": state["model.w"], "b": state["model.b"]})
    two = tmp_path / "two.pt"
    torch.save({"generator": state, "critic": {"x": torch.ones(1)}, "note": "x"}, two)
    with pytest.raises(CheckpointError, match="--key"):
        import_weights(str(two), str(tmp_path / "two"))
    with pytest.raises(CheckpointError, match="generator"):
        import_weights(str(two), str(tmp_path / "two"), key="genrator")
    assert_same(model_of(import_weights(str(two), str(tmp_path / "two"), key="critic").path), {"x": torch.ones(1)})
    extra = tmp_path / "extra.pt"
    torch.save({"w": torch.ones(2), "_extra_state": None}, extra)
    assert import_weights(str(extra), str(tmp_path / "extra")).left_out == ("_extra_state",)
    torch.save({"epoch": 3}, tmp_path / "none.pt")
    with pytest.raises(CheckpointError, match="no state dict"):
        import_weights(str(tmp_path / "none.pt"), str(tmp_path / "none"))
    assert not (tmp_path / "none").exists(), "nothing is written for a file that is refused"


@pytest.mark.parametrize("trust", [False, True])
def test_torch_dcp_directory_is_imported(tmp_path: Path, trust: bool) -> None:
    model, optimizer = trained()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
    dcp.save(state, checkpoint_id=tmp_path / "d", no_dist=True)
    back = import_weights(str(tmp_path / "d"), str(tmp_path / "a"), trust=trust)
    assert_same(model_of(back.path), model.state_dict())
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "plain", no_dist=True)
    assert_same(model_of(import_weights(str(tmp_path / "plain"), str(tmp_path / "b")).path), model.state_dict())


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.mark,))


def test_pickle_that_would_run_code_is_refused_and_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "was run"
    torch.save({"w": torch.ones(2), "x": Bomb(mark)}, tmp_path / "zip.pt")
    torch.save({"w": torch.ones(2), "x": Bomb(mark)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Bomb(mark)))
    (tmp_path / "renamed.safetensors").write_bytes(pickle.dumps(Bomb(mark)))
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "meta", no_dist=True)
    (tmp_path / "meta/.metadata").write_bytes(pickle.dumps(Bomb(mark)))
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "data", no_dist=True)
    (data,) = (tmp_path / "data").glob("*.distcp")
    torch.save(Bomb(mark), tmp_path / "bomb")
    body = (tmp_path / "bomb").read_bytes()
    data.write_bytes(body)
    metadata = pickle.loads((tmp_path / "data/.metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.length = len(body)
    (tmp_path / "data/.metadata").write_bytes(pickle.dumps(metadata))
    for name in ("zip.pt", "old.pt", "plain.pt", "renamed.safetensors", "meta", "data"):
        with pytest.raises(CheckpointError):
            import_weights(str(tmp_path / name), str(tmp_path / "out"))
        assert not mark.exists(), name
    assert not (tmp_path / "out").exists()
    for name in ("zip.pt", "old.pt", "plain.pt", "meta", "data"):
        with pytest.raises(CheckpointError, match="code"):
            import_weights(str(tmp_path / name), str(tmp_path / "out"))
    torch.load(tmp_path / "zip.pt", weights_only=False)
    assert mark.exists(), "the bomb works where a pickle is trusted"


def test_forged_dcp_metadata_is_refused(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    torch.save(torch.ones(2), secret)
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "d", no_dist=True)
    path = tmp_path / "d/.metadata"
    sound = path.read_bytes()
    path.chmod(0o644)

    def attempt(change: Any) -> None:
        metadata = pickle.loads(sound)
        change(metadata)
        path.write_bytes(pickle.dumps(metadata))
        with pytest.raises(CheckpointError):
            import_weights(str(tmp_path / "d"), str(tmp_path / "out"))

    def elsewhere(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = "../secret"
            info.offset, info.length = 0, secret.stat().st_size

    def huge(metadata: Any) -> None:
        stored = metadata.state_dict_metadata["w"]
        stored.size = torch.Size([2**50])
        stored.chunks[0].sizes = stored.size

    def twice(metadata: Any) -> None:
        stored = metadata.state_dict_metadata["w"]
        stored.size = torch.Size([4])
        stored.chunks *= 2

    for change in (
        elsewhere,
        huge,
        twice,
        lambda m: m.storage_data.clear(),
        lambda m: m.state_dict_metadata.update(w=3),
    ):
        attempt(change)
    path.write_bytes(sound[: len(sound) // 2])
    with pytest.raises(CheckpointError):
        import_weights(str(tmp_path / "d"), str(tmp_path / "out"))
    path.write_bytes(sound)
    assert import_weights(str(tmp_path / "d"), str(tmp_path / "out")).tensors == 1


def test_corrupt_or_mislabelled_weight_files_are_refused(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    torch.save({"w": torch.zeros(2**20)}, tmp_path / "w.pt")
    with zipfile.ZipFile(tmp_path / "w.pt") as stored, zipfile.ZipFile(tmp_path / "z.pt", "w") as packed:
        for entry in stored.infolist():
            packed.writestr(entry.filename, stored.read(entry), zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match="unpack"):
        import_weights(str(tmp_path / "z.pt"), out)
    whole = (tmp_path / "w.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[:-100])
    safetensors.torch.save_file({"w": torch.ones(4)}, tmp_path / "s.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "s.safetensors").read_bytes()[:-1])
    (tmp_path / "head.safetensors").write_bytes(struct.pack("<Q", 2**60) + b"{}")
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "i.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "../s.safetensors"}}))
    (tmp_path / "j.safetensors.index.json").write_text(json.dumps({"weight_map": {"v": "s.safetensors"}}))
    (tmp_path / "k.safetensors.index.json").write_text("[1")
    bad = (
        "cut.pt",
        "cut.safetensors",
        "head.safetensors",
        "notes.txt",
        *(f"{i}.safetensors.index.json" for i in "ijk"),
    )
    for name in (*bad, "missing.pt"):
        with pytest.raises(CheckpointError):
            import_weights(str(tmp_path / name), out)
    with pytest.raises(CheckpointError, match=r"notes\.txt"):
        import_weights(str(tmp_path / "note.txt"), out)


def test_listing_shows_new_bytes_best_and_broken_checkpoints(tmp_path: Path) -> None:
    model, optimizer = trained()
    save(tmp_path, model, optimizer, 1, metric=0.5)
    with torch.no_grad():
        model.wide.weight[0, 0] += 1  # type: ignore[operator, index, union-attr]
    save(tmp_path, model, optimizer, 2, metric=0.25)
    save(tmp_path, model, optimizer, 3, metric=0.75, meta={"settings": {"keep_best": "val_loss"}})
    rows = {row.step: row for row in list_checkpoints(str(tmp_path)).rows}
    assert rows[1].new_bytes is not None
    assert rows[1].total_bytes is not None
    assert 0 < (rows[2].new_bytes or 0) <= 4 * 2**20 < rows[1].new_bytes <= rows[1].total_bytes
    assert [row.is_sound for row in rows.values()] == [True] * 3
    assert [row.is_best for row in rows.values()] == [False, True, False]
    assert list_checkpoints(str(tmp_path)).unused_bytes == 0
    changed = open_one(f"{tmp_path}/step-000002").manifest.shared.tensors["model/wide.weight"].pieces[0].refs[0].chunk
    (tmp_path / chunk_name(changed)).unlink()
    (tmp_path / "step-000003/manifest.json").write_text("{")
    (tmp_path / "step-000004").mkdir()
    rows = {row.step: row for row in list_checkpoints(str(tmp_path)).rows}
    assert [row.is_sound for row in rows.values()] == [True, False, False, False]
    assert "1 of" in rows[2].status
    assert "incomplete" in rows[4].status


def test_verify_reads_shared_chunks_once_and_names_damage(tmp_path: Path) -> None:
    model, optimizer = trained()
    save(tmp_path, model, optimizer, 1)
    first = open_one(str(tmp_path)).manifest
    before = first.shared.tensors["model/wide.weight"].pieces[0].refs[0].chunk
    with torch.no_grad():
        model.wide.weight[0, 0] += 1  # type: ignore[operator, index, union-attr]
    save(tmp_path, model, optimizer, 2)
    seen: list[tuple[int, int]] = []
    verdicts = verify_all(open_all(str(tmp_path)), progress=lambda done, total: seen.append((done, total)))
    assert [verdict.problems for verdict in verdicts] == [(), ()]
    assert seen[-1][0] == seen[-1][1] == list_checkpoints(str(tmp_path)).stored_bytes
    victim = tmp_path / chunk_name(before)
    victim.write_bytes(victim.read_bytes()[::-1])
    one, two = verify_all(open_all(str(tmp_path)))
    assert before[:12] in one.problems[0]
    assert "model/wide.weight" in one.problems[0]
    assert not two.problems


def test_diff_finds_changed_names_shapes_and_values(tmp_path: Path) -> None:
    saver = Saver(str(tmp_path / "a"), alone(), TensorStaging(), asynchronous=False)
    big = torch.randn(2**20)
    one = {"same": big, "w": torch.zeros(5), "nan": torch.tensor([float("nan"), 1.0]), "gone": torch.ones(1)}
    saver.save(1, {"model": one | {"shape": torch.ones(2), "zero": torch.zeros(2)}, "progress": {"step": 1}}, {})
    other = {"same": big, "w": torch.tensor([0, 0, -3.0, 0, 1]), "nan": torch.tensor([float("nan"), 2.0])}
    more = {"new": torch.ones(1), "shape": torch.ones(3), "zero": -torch.zeros(2)}
    Saver(str(tmp_path / "b"), alone(), TensorStaging(), asynchronous=False).save(
        2, {"model": other | more, "progress": {"step": 2}}, {}
    )
    found = compare(open_one(str(tmp_path / "a")), open_one(str(tmp_path / "b")))
    assert found.only_a == ("model/gone",)
    assert found.only_b == ("model/new",)
    assert found.reshaped == (("model/shape", "float32 [2]", "float32 [3]"),)
    assert {c.name: (c.differing, c.elements, c.largest) for c in found.changed} == {
        "model/w": (2, 5, 3.0),
        "model/nan": (1, 2, 1.0),
        "model/zero": (0, 2, 0.0),
    }
    assert found.scalars == (("progress/step", 1, 2),)
    assert found.equal == 1
    assert found.shared_bytes == big.nbytes
    assert compare(open_one(str(tmp_path / "a")), open_one(str(tmp_path / "a"))).is_empty


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_diff_compares_values_of_every_dtype(dtype: torch.dtype) -> None:
    one = torch.ones(3).to(dtype)
    other = torch.tensor([1.0, 0.0, 1.0]).to(dtype)
    change = compare_tensors("w", one, other)
    assert change is not None
    assert (change.differing, change.largest) == (1, 1.0)


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("runs/a/checkpoints/step-000019", "step-000020"),
        ("runs/a/checkpoints/step-20", "step-000020"),
        ("runs/b", "runs/a"),
        ("runs/a/chekpoints", "runs/a/checkpoints"),
        ("runs/a/w.pt", "import"),
        ("empty", "empty"),
    ],
)
def test_path_without_checkpoint_error_suggests_the_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, hint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    saver = Saver("runs/a/checkpoints", alone(), TensorStaging(), asynchronous=False)
    for step in (1, 20):
        saver.save(step, {"model": {"w": torch.ones(1)}}, {})
    (tmp_path / "runs/a/w.pt").write_text("x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError) as caught:
        open_one(path)
    assert hint in str(caught.value)
    for good in ("runs/a", "runs/a/checkpoints/", "runs/a/checkpoints/step-000020/manifest.json"):
        assert open_one(good).manifest.step == 20


def test_import_export_and_listing_work_on_a_url(tmp_path: Path) -> None:
    model, _ = trained()
    url = f"memory://{tmp_path.name}/checkpoints"
    torch.save(model.state_dict(), tmp_path / "w.pt")
    done = import_weights(str(tmp_path / "w.pt"), url, step=7)
    assert done.path == f"{url}/step-000007"
    assert [(row.step, row.status) for row in list_checkpoints(f"memory://{tmp_path.name}").rows] == [(7, "ok")]
    assert not verify_all(open_all(url))[0].problems
    file = export_checkpoint(open_one(url), str(tmp_path / "m.safetensors")).files[0]
    back = import_weights(file, str(tmp_path / "b"))
    assert compare(open_one(url), open_one(back.path)).is_empty
    with pytest.raises(CheckpointError, match="step-000007"):
        open_one(f"{url}/step-000008")
    with pytest.raises(CheckpointError, match="checkpoints"):
        open_one(f"memory://{tmp_path.name}/chekpoints")
