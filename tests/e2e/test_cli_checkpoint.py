"""`distributed checkpoint …` as a user runs it, on checkpoints that the real saver wrote."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from distributed.checkpoint.exchange.importing import import_weights
from distributed.checkpoint.restore.reading import load
from distributed.checkpoint.save.saver import Saver
from distributed.checkpoint.save.staging import TensorStaging
from distributed.checkpoint.storage.chunks import chunk_name
from distributed.core.env import WorkerEnv
from distributed.runtime.session import Session
from distributed.testing import run_ranks
from tests.conftest import clean_environ
from tests.conftest import cli as any_cli

COMMAND = [sys.executable, "-m", "distributed.cli", "checkpoint"]


def cli(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = any_cli(folder, "checkpoint", *arguments)
    assert "Traceback" not in done.stderr, done.stderr
    return done


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder with a run directory of three checkpoints: the second changes one tensor, the third nothing."""
    saver = Saver(
        str(tmp_path / "runs/a/checkpoints"),
        Session(WorkerEnv(), torch.device("cpu"), None),
        TensorStaging(),
        asynchronous=False,
    )
    embed = torch.randn(100, 8, dtype=torch.bfloat16)
    model = {"embed.weight": embed, "body.weight": torch.randn(600, 600), "head.weight": embed}
    for step in (10, 20, 30):
        if step == 20:
            model["body.weight"] = model["body.weight"] + 0.5
        optimizer = {
            "state": {0: {"step": torch.tensor(float(step))}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 1)}],
        }
        shared = {
            "model": model,
            "optimizer": optimizer,
            "progress": {"epoch": 1, "step": step, "samples_in_epoch": 64},
        }
        saver.save(step, shared, {"rng": {"torch": torch.get_rng_state()}}, {"settings": {"seed": 42}}, metric=1 / step)
    return tmp_path


def damage(folder: Path, step: int, tensor: str) -> str:
    """Flip a bit of a tensor; returns its chunk's name."""
    root = folder / "runs/a/checkpoints"
    chunk = load(f"{root}/step-{step:06d}").manifest.shared.tensors[tensor].pieces[0].refs[0].chunk
    content = bytearray((root / chunk_name(chunk)).read_bytes())
    content[5] ^= 4
    (root / chunk_name(chunk)).write_bytes(content)
    return chunk


def test_ls_shows_bytes_added_by_each_checkpoint(run: Path) -> None:
    for place in ("runs/a", "runs/a/checkpoints", f"file://{run}/runs/a/checkpoints"):
        done = cli(run, "ls", place)
        assert done.returncode == 0, done.stderr
        assert [line.split()[0] for line in done.stdout.splitlines()[1:4]] == ["10", "20", "30"]
    found = json.loads(cli(run, "ls", "runs/a", "--json").stdout)["checkpoints"]
    assert all(row["sound"] for row in found)
    assert found[1]["new_bytes"] >= 600 * 600 * 4 > 10_000 > found[2]["new_bytes"]
    (run / "runs/a/checkpoints/step-000020/manifest.json").write_text("{}")
    found = json.loads(cli(run, "ls", "runs/a", "--json").stdout)["checkpoints"]
    assert [row["sound"] for row in found] == [True, False, True]


def test_inspect_shows_components_tensors_and_settings(run: Path) -> None:
    found = json.loads(cli(run, "inspect", "runs/a", "--json", "--tensors").stdout)
    assert (found["step"], found["world_size"], found["progress"]["samples_in_epoch"]) == (30, 1, 64)
    assert set(found["components"]) == {"model", "optimizer", "progress", "rank-0/rng"}
    assert found["components"]["model"]["bytes"] == 600 * 600 * 4 + 100 * 8 * 2
    assert found["meta"] == {"settings": {"seed": 42}, "sequence": 3}
    assert found["tensors"]["model/embed.weight"]["dtype"] == "bfloat16"
    assert found["tensors"]["model/body.weight"]["shape"] == [600, 600]
    assert found["tensors"]["model/head.weight"]["tied_to"] == "model/embed.weight"
    text = cli(run, "inspect", "runs/a/checkpoints/step-000010", "--tensors").stdout
    for word in ("bfloat16", "600 × 600", "replicate", "samples_in_epoch: 64", "seed: 42", torch.__version__):
        assert word in text


def test_verify_names_damaged_chunk_and_tensors_and_exits_5(run: Path) -> None:
    assert cli(run, "verify", "runs/a").returncode == 0
    chunk = damage(run, 10, "model/body.weight")
    done = cli(run, "verify", "runs/a")
    assert done.returncode == 5
    assert chunk[:12] in done.stderr
    assert "model/body.weight" in done.stderr
    assert "step-000010" in done.stderr
    assert done.stdout.count("sound") == 2
    assert cli(run, "verify", "runs/a/checkpoints/step-000020").returncode == 0
    assert cli(run, "verify", "runs/a/checkpoints/step-000010").returncode == 5


def test_diff_shows_changed_values_and_shared_bytes(run: Path) -> None:
    root = "runs/a/checkpoints"
    found = json.loads(cli(run, "diff", f"{root}/step-000010", f"{root}/step-000020", "--json").stdout)
    changed = {change["name"]: change for change in found["changed"]}
    assert changed["model/body.weight"]["differing"] == 360_000
    assert changed["model/body.weight"]["largest"] == pytest.approx(0.5, abs=1e-6)
    assert "model/embed.weight" not in changed
    assert ["progress/step", 10, 20] in found["scalars"]
    assert 0 < found["shared_bytes"] < found["bytes_a"]
    text = cli(run, "diff", f"{root}/step-000010", f"{root}/step-000020").stdout
    assert "model/body.weight" in text
    assert "nothing differs" in cli(run, "diff", f"{root}/step-000030", "runs/a").stdout


def test_exported_weights_are_imported_bitwise_equal(run: Path) -> None:
    wanted = load(str(run / "runs/a/checkpoints/step-000030")).shared["model"]
    done = cli(run, "export", "runs/a", "--to", "out/", "--max-shard-size", "1MB")
    assert done.returncode == 0, done.stderr
    assert "head.weight is embed.weight" in done.stdout
    assert (run / "out/model.safetensors.index.json").exists()
    assert cli(run, "export", "runs/a", "--to", "out/").returncode == 2
    assert cli(run, "export", "runs/a", "--to", "w.pt", "--format", "pt").returncode == 0
    assert cli(run, "export", "runs/a", "--to", "one.safetensors", "--with-optimizer").returncode == 0
    for number, source in enumerate(("out", "w.pt", "one.safetensors")):
        done = cli(run, "import", source, "--to", "in", "--step", str(number))
        assert done.returncode == 0, done.stderr
        found = load(str(run / f"in/step-{number:06d}")).shared
        assert list(found) == ["model"]
        assert {n: (t.dtype, t.view(torch.uint8).numpy().tobytes()) for n, t in found["model"].items()} == {
            n: (t.dtype, t.view(torch.uint8).numpy().tobytes()) for n, t in wanted.items()
        }
        assert found["model"]["head.weight"] is found["model"]["embed.weight"]


def test_checkpoint_of_a_step_is_exported(run: Path) -> None:
    done = cli(run, "export", "runs/a", "--step", "10", "--to", "ten.safetensors")
    assert done.returncode == 0, done.stderr
    wanted = load(str(run / "runs/a/checkpoints/step-000010")).shared["model"]["body.weight"]
    assert torch.equal(safetensors.torch.load_file(run / "ten.safetensors")["body.weight"], wanted)


def test_folder_without_checkpoints_is_not_suggested(run: Path) -> None:
    (run / "runs/bb/trials").mkdir(parents=True)
    assert "runs/bb" not in cli(run, "ls", "runs/b").stderr
    assert "runs/a" in cli(run, "ls", "runs/b").stderr


@pytest.mark.parametrize(
    ("arguments", "code", "hints"),
    [
        (["ls", "runs/b"], 5, ["runs/b", "runs/a"]),
        (["ls", "."], 5, ["runs"]),
        (["inspect", "runs/a/checkpoints/step-000011"], 5, ["step-000010"]),
        (["inspect", "runs/a/checkpoints/step-10"], 5, ["step-000010"]),
        (["verify", "runs/a/checkpoint"], 5, ["runs/a/checkpoints"]),
        (["diff", "runs/a", "plain.txt"], 5, ["plain.txt", "file"]),
        (["export", "runs/a", "--to", "x.safetensors", "--max-shard-size", "many"], 2, ["many", "5GB"]),
        (["export", "runs/a", "--to", "x.pt", "--format", "pt", "--max-shard-size", "5GB"], 2, ["no effect"]),
        (["export", "runs/a", "--to", "x.pt"], 2, [".safetensors"]),
        (["export", "runs/a", "--to", "s3://bucket/x.safetensors"], 2, ["s3://bucket"]),
        (["export", "runs/a", "--best", "--to", "x.safetensors"], 5, ["keep_best"]),
        (["export", "runs/a", "--step", "11", "--to", "x.safetensors"], 5, ["10, 20, 30"]),
        (["export", "runs/a", "--best", "--step", "10", "--to", "x.safetensors"], 2, ["both --best and --step"]),
        (["import", "plain.txt", "--to", "in"], 5, ["plain.txt"]),
        (["import", "plane.txt", "--to", "in"], 5, ["plain.txt"]),
        (["import", "plain.txt", "--to", "in", "--trust"], 2, ["--trust"]),
        (["import", "bomb.pt", "--to", "in"], 5, ["bomb.pt", "code", "state_dict"]),
    ],
)
def test_bad_arguments_are_refused_and_nothing_is_written(
    run: Path, arguments: list[str], code: int, hints: list[str]
) -> None:
    (run / "plain.txt").write_text("hello")
    torch.save({"w": torch.ones(1), "f": os.getcwd}, run / "bomb.pt")
    before = sorted(path for path in run.rglob("*"))
    done = cli(run, *arguments)
    assert done.returncode == code, done.stderr
    for hint in hints:
        assert hint in done.stderr
    assert sorted(path for path in run.rglob("*")) == before, "nothing was written"


def test_every_command_refuses_damaged_or_newer_checkpoint(run: Path) -> None:
    manifest = run / "runs/a/checkpoints/step-000030/manifest.json"
    document = json.loads(manifest.read_text())
    for text, hint in ((json.dumps(document | {"format": 99}), "upgrade"), ("{", "damaged")):
        manifest.write_text(text)
        for words in (["inspect", "runs/a"], ["verify", "runs/a"], ["export", "runs/a", "--to", "m.safetensors"]):
            done = cli(run, *words)
            assert done.returncode == 5
            assert hint in done.stderr, words


def test_verify_shows_progress_bar_on_terminal_only(run: Path) -> None:
    """Through a real pseudo-terminal; elsewhere stderr stays empty."""
    assert cli(run, "verify", "runs/a").stderr == ""
    leader, follower = pty.openpty()
    command = subprocess.Popen(
        [*COMMAND, "verify", "runs/a"],
        cwd=run,
        env=clean_environ(TERM="xterm"),
        stdout=subprocess.DEVNULL,
        stderr=follower,
    )
    os.close(follower)
    seen = b""
    while True:
        try:
            part = os.read(leader, 4096)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        seen += part
    os.close(leader)
    assert command.wait(60) == 0
    assert b"verifying" in seen


_PEAK = """
import resource, sys
from distributed.checkpoint.exchange.catalog import open_one
from distributed.checkpoint.exchange.export import export_checkpoint
export_checkpoint(open_one(sys.argv[1]), sys.argv[2], sys.argv[3])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def test_export_memory_is_bounded(tmp_path: Path) -> None:
    session = Session(WorkerEnv(), torch.device("cpu"), None)
    for name, count in (("small", 1), ("large", 10 * 2**20)):
        state = {f"w{i}": torch.randn(count) for i in range(4)}  # of the large one 160 MiB
        Saver(str(tmp_path / name), session, TensorStaging(), asynchronous=False).save(1, {"model": state}, {})

    def peak(name: str, format: str) -> int:
        command = [sys.executable, "-c", _PEAK, str(tmp_path / name), str(tmp_path / f"{name}.{format}"), format]
        return int(subprocess.run(command, capture_output=True, text=True, check=True, env=clean_environ()).stdout)

    size = 160 * 2**20
    assert peak("large", "safetensors") - peak("small", "safetensors") < size / 4
    assert peak("large", "pt") - peak("small", "pt") < 1.5 * size
    found = safetensors.torch.load_file(tmp_path / "large.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_sharded_dcp_checkpoint_is_imported_whole(tmp_path: Path) -> None:
    def write(folder: str) -> None:
        import torch
        import torch.distributed.checkpoint as dcp
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (2,))
        torch.manual_seed(0)
        whole = {"rows": torch.randn(5, 3), "columns": torch.randn(4, 7).bfloat16()}
        sharded = {name: distribute_tensor(t, mesh, [Shard(i)]) for i, (name, t) in enumerate(whole.items())}
        dcp.save({"model": sharded | {"same": torch.ones(3)}}, checkpoint_id=folder)

    run_ranks(write, 2, str(tmp_path / "dcp"))
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) == 2
    torch.manual_seed(0)
    wanted = {"rows": torch.randn(5, 3), "columns": torch.randn(4, 7).bfloat16(), "same": torch.ones(3)}
    found = load(import_weights(str(tmp_path / "dcp"), str(tmp_path / "in")).path).shared["model"]
    assert found.keys() == wanted.keys()
    assert all(found[name].dtype == t.dtype and torch.equal(found[name], t) for name, t in wanted.items())


def test_help_imports_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom distributed.cli.main import main\n"
        "sys.argv = ['distributed', 'checkpoint', 'export', '--help']\n"
        "try: main()\nexcept SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], env=clean_environ(), check=True, capture_output=True)
