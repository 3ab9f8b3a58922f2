"""What the command line says without starting anything: bad input, dry runs, settings, and the state of the machine."""

from __future__ import annotations

import importlib.util
import json
import platform
import socket
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import distributed
from distributed.core.config import DistributedConfig
from distributed.core.documents.run_config import RunConfig
from distributed.core.mesh import MeshSpec
from distributed.core.plan import BatchPlan, Decision, Plan, ShardPlan
from distributed.launch.preflight import check_run_dir
from tests.conftest import clean_environ, cli, fresh_cli

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("arguments", "hints"),
    [
        (["--script", "trian.py"], ["trian.py", "train.py"]),
        (["--script", "train.py", "--num-gpus", "3", "--num-nodes", "2", "--gpus-per-node", "2"], ["num_gpus=3", "4"]),
        (["--script", "train.py", "epoch=3"], ["'epoch'", "epochs"]),
        (["--script", "train.py", "--backend", "pytorch-dpp"], ["pytorch-dpp", "did you mean pytorch-ddp"]),
        (["--script", "train.py", "--num-gpus", "many"], ["num_gpus", "many"]),
        (["--script", "train.py", "--num-gpus", "99999", "--device", "cuda"], ["99999"]),
        (["--script", "train.py", "--num-nodes", "2"], ["master_addr"]),
        (["--script", "train.py", "--lr", "1"], ["learning_rate=1", "-- --lr 1"]),
        (["--script", "train.py", "--epochs", "3"], ["epochs=3"]),
        (["--script", "train.py", "--nonsense"], ["--nonsense", "-- --nonsense"]),
        (["--script", "train.py", "--num_gpu", "2"], ["did you mean --num-gpus", "-- --num_gpu 2"]),
        (["--script", "train.py", "--data", "/d"], ["for the script: -- --data /d"]),
        (["--script", "train.py", "-b", "64", "-n4"], ["for the script: -- -b 64", "for the script: -- -n4"]),
        (["--script", "train.py", "model.lr=1", "+a=b"], ["for the script: -- model.lr=1", "for the script: -- +a=b"]),
        (["-m", "no.such"], ["there is no module no.such to run", "start from the folder that no is in"]),
        (["-m", "train.py"], ["this is a file", "--script train.py"]),
        (["-m", "train", "--script", "train.py"], ["a rank runs one program"]),
        (["--num-gpus", "2"], ["no program is named", "-m package.module"]),
        (["--script", "."], ["is a directory", "train.py"]),
        (["--script", "train.py", "lr=1"], ["did you mean learning_rate"]),
        (["--script", "train.py", "--backend", "ddp"], ["did you mean pytorch-ddp?"]),
        (["train.py"], ["--script train.py"]),
        (["--script", "train.py", "stray"], ["stray", "-- stray"]),
        (["--script", "train.py", "--num-gpus", "2", "num_gpus=2"], ["num_gpus", "twice"]),
        (["--script", "train.py", "--config", "no.yaml"], ["no.yaml"]),
    ],
)
def test_bad_arguments_are_refused_before_anything_starts(unstarted, arguments, hints):
    done = cli(unstarted, "train", *arguments)
    assert done.returncode == 2
    for hint in hints:
        assert hint in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(entry.name for entry in unstarted.iterdir()) == ["train.py"]


def test_all_problems_are_reported_at_once(unstarted):
    (unstarted / "run.yaml").write_text("epochs: 0\nbatchsize: 3\nseed: 1\nseed: 2\n")
    done = cli(unstarted, "train", "--script", "no.py", "--config", "run.yaml", "--backend", "x", "num_nodes=two")
    assert done.returncode == 2
    for hint in ("no.py", "run.yaml:1", "batchsize", "run.yaml:3 and run.yaml:4", "backend", "num_nodes"):
        assert hint in done.stderr


def test_port_in_use_and_used_run_directory_reported_together(unstarted):
    (unstarted / "run").mkdir()
    (unstarted / "run" / "events.jsonl").touch()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        done = cli(unstarted, "train", "--script", "train.py", "--master-port", port, "--run-dir", "run")
    assert done.returncode == 3
    assert f"port {port} is in use" in done.stderr
    assert "another run" in done.stderr
    assert "was started" not in done.stderr


@pytest.mark.parametrize(
    ("name", "content", "hints"),
    [
        ("model.pt", b"PK\3\4\0\0\0", ["model.pt is not a Python script"]),
        ("broken.py", b"x = 1\ny = (\n", ["broken.py:2", "never closed"]),
        ("latin.py", b"x = '\xe9'\n", ["latin.py:1"]),
    ],
)
def test_script_that_is_not_python_is_refused_with_its_line(unstarted, name, content, hints):
    (unstarted / name).write_bytes(content)
    done = cli(unstarted, "train", "--script", name)
    assert done.returncode == 2
    assert all(hint in done.stderr for hint in hints), done.stderr
    assert sorted(entry.name for entry in unstarted.iterdir()) == sorted([name, "train.py"])


def test_files_of_launch_that_never_began_are_no_other_run(tmp_path):
    logs = tmp_path / "run" / "attempts" / "0"
    logs.mkdir(parents=True)
    (tmp_path / "run" / "config.json").write_text("{}")
    (logs / "rank-0.log").touch()
    (logs / "parent.log").write_text("KeyboardInterrupt")
    assert check_run_dir(str(tmp_path / "run"), resume=False) == []
    assert check_run_dir(str(tmp_path / "run"), resume=False, may_reuse=False) != []
    (logs / "rank-0.log").write_text("a step")
    assert check_run_dir(str(tmp_path / "run"), resume=False) != []
    (logs / "rank-0.log").write_text("")
    (tmp_path / "run" / "plan.json").touch()
    assert check_run_dir(str(tmp_path / "run"), resume=False) != []
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("somebody else's")
    assert check_run_dir(str(tmp_path / "model"), resume=False) != []


def test_resume_path_without_checkpoint_is_refused_before_start(unstarted):
    (unstarted / "old" / "checkpoints" / "step-000004").mkdir(parents=True)
    for path, hint in (
        ("nowhere/step-000004", "does not exist"),
        ("old/checkpoints/step-000005", "there is: step-000004"),
        ("old", "resume_from_checkpoint=old/checkpoints"),
        ("train.py", "the path is a file"),
    ):
        done = cli(unstarted, "train", "--script", "train.py", f"resume_from_checkpoint={path}")
        assert done.returncode == 3
        assert f"no checkpoint at {path}" in done.stderr
        assert hint in done.stderr
    assert sorted(entry.name for entry in unstarted.iterdir()) == ["old", "train.py"]


def test_dry_run_shows_rank_commands_and_writes_nothing(unstarted):
    done = cli(
        unstarted, "train", "--script", "train.py", "--num-gpus", "2", "--dry-run", "epochs=2", "--", "--x", "a b"
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"RANK={rank} " in done.stdout
    assert "entry.py rank train.py --x 'a b'" in done.stdout
    assert "2 CPU processes" in done.stdout or "GPU" in done.stdout
    assert sorted(entry.name for entry in unstarted.iterdir()) == ["train.py"]


def test_dry_run_of_several_nodes_needs_no_other_node(unstarted):
    several = ["--num-nodes", "2", "--gpus-per-node", "2", "--node-rank", "1", "--master-addr", "n0", "--device", "cpu"]
    done = cli(unstarted, "train", "--script", "train.py", "--dry-run", *several)
    assert done.returncode == 0, done.stderr
    assert "RANK=3 " in done.stdout
    assert "n0:29400" in done.stdout


def test_config_show_gives_source_of_each_value(unstarted):
    (unstarted / "run.yaml").write_text("# ours\nepochs: 3\nlearning_rate: 1e-2\nrun_dir: 2024\n")
    shown = cli(unstarted, "config", "show", "--config", "run.yaml", "epochs=5", "mixed_precision=true", "--json")
    settings = json.loads(shown.stdout)
    assert settings["epochs"] == {"value": 5, "source": "command line"}
    assert settings["learning_rate"] == {"value": 0.01, "source": "run.yaml:3"}
    assert settings["run_dir"] == {"value": "2024", "source": "run.yaml:4"}
    assert settings["mixed_precision"] == {"value": True, "source": "command line"}
    assert settings["seed"] == {"value": 0, "source": "default"}
    given = cli(unstarted, "config", "show", "--config", "run.yaml", "--given")
    rows = [line.split() for line in given.stdout.splitlines()[1:]]
    assert [row[:3] for row in rows] == [
        ["epochs", "3", "run.yaml:2"],
        ["learning_rate", "0.01", "run.yaml:3"],
        ["run_dir", "2024", "run.yaml:4"],
    ]


def test_config_show_reads_the_settings_of_a_run(unstarted):
    config = DistributedConfig(_sources={"epochs": "run.yaml:2", "seed": "command line"}, epochs=7, seed=1)
    (unstarted / "past").mkdir()
    RunConfig.of(config, ["train.py"]).write(unstarted / "past")
    shown = cli(unstarted, "config", "show", "--run-dir", "past", "--given", "--json", "seed=2")
    assert json.loads(shown.stdout) == {
        "epochs": {"value": 7, "source": "run.yaml:2"},
        "seed": {"value": 2, "source": "command line"},
    }
    (unstarted / "past" / "config.json").write_text('{"epochs": 7}')
    refused = cli(unstarted, "config", "show", "--run-dir", "past")
    assert refused.returncode == 2
    assert "schema version" in refused.stderr


def test_config_plan_shows_what_a_run_has_planned(unstarted):
    why = Decision("4 processes", "the machine has 4 cores", "num_gpus")
    mesh, shard = MeshSpec(dp_shard=4), ShardPlan("full")
    plan = Plan("past", BatchPlan(8, 4), strategy="fsdp", mesh=mesh, shard=shard, decisions=(why,))
    (unstarted / "past").mkdir()
    (unstarted / "past" / "plan.json").write_text(plan.to_json())
    shown = cli(unstarted, "config", "plan", "past")
    assert shown.returncode == 0, shown.stderr
    lines = [" ".join(line.split()) for line in shown.stdout.splitlines()]
    assert "strategy fsdp, sharding full" in lines
    assert "mesh dp_shard=4 on 1 node, cpu with gloo" in lines
    assert "batch 32 samples a step" in lines
    assert "precision fp32" in lines
    assert "4 processes the machine has 4 cores num_gpus" in lines
    whole = cli(unstarted, "config", "plan", "past", "--json")
    assert Plan.from_json(whole.stdout) == plan


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        (b'{"schema_version": 99}', "has the schema version 99, and this release reads"),
        (b'{"schema_version": 1, "run_dir"', "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
    ],
    ids=["none", "another version", "cut off", "no text"],
)
def test_config_plan_that_cannot_be_read_is_refused(unstarted, content, said):
    (unstarted / "past").mkdir()
    if content is not None:
        (unstarted / "past" / "plan.json").write_bytes(content)
    done = cli(unstarted, "config", "plan", "past")
    assert done.returncode == 2
    assert f"{Path('past', 'plan.json')}" in done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("epochs: [1", "line 1"),
        ("- epochs", "does not hold settings"),
        ("self: 1", "'self'"),
        ("a: !!x 1", "run.yaml:1"),
    ],
)
def test_bad_settings_file_is_refused(unstarted, text, hint):
    (unstarted / "run.yaml").write_text(text)
    done = cli(unstarted, "config", "show", "--config", "run.yaml")
    assert done.returncode == 2
    assert hint in done.stderr
    assert "Traceback" not in done.stderr


def test_empty_settings_file_is_accepted(unstarted):
    (unstarted / "run.yaml").write_text("# nothing\n")
    assert cli(unstarted, "config", "show", "--config", "run.yaml", "--given").returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["train", "--help"],
        ["config", "show"],
        ["train", "--script", "train.py", "--dry-run", "--num-gpus", "2"],
    ],
)
def test_help_config_and_dry_run_import_no_torch(unstarted, arguments):
    program = (
        "import sys\nfrom distributed.cli.main import main\n"
        f"sys.argv = ['distributed', *{arguments!r}]\n"
        "try: main()\nexcept SystemExit as end: assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=unstarted, env=clean_environ(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_importing_the_package_imports_no_torch():
    program = "import sys, distributed, distributed.core.config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], env=clean_environ(), check=True)


def test_version_shows_python_and_torch_without_importing_torch():
    program = (
        "import sys\n"
        "from distributed.cli.main import main\n"
        "sys.argv = ['distributed', '--version']\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], env=clean_environ(), capture_output=True, text=True)
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"distributed-training {declared}",
        f"Python {platform.python_version()}",
        f"torch {metadata.version('torch')}",
    ]
    assert distributed.__version__ == declared


@pytest.mark.parametrize("way", [["-m", "distributed"], ["-m", "distributed.cli"]])
def test_python_m_of_both_modules_runs_the_command(way):
    done = subprocess.run([sys.executable, *way, "--version"], env=clean_environ(), capture_output=True, text=True)
    assert done.stdout.startswith("distributed-training ")


def test_doctor_reports_the_machine(unstarted):
    done = cli(unstarted, "doctor", "--json")
    assert done.returncode == 0, done.stdout
    report = json.loads(done.stdout)
    found = {finding["name"]: finding for finding in report["findings"]}
    assert report["ok"]
    assert found["backend gloo"]["state"] == "ok"
    assert {"torch", "backend nccl", "backend mpi", "CPU cores", "extra tensorboard", "loopback"} <= set(found)
    has_tensorflow = importlib.util.find_spec("tensorflow") is not None  # tensorflow-cpu brings it as well
    assert found["extra tensorflow"]["state"] == ("ok" if has_tensorflow else "missing")
    assert all(finding["do"] for name, finding in found.items() if finding["state"] == "missing" and "extra" in name)


def test_doctor_reports_dask_distributed_and_broken_torch(unstarted):
    fake = unstarted / "site"
    (fake / "distributed-2024.1.0.dist-info").mkdir(parents=True)
    (fake / "distributed-2024.1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: distributed\nVersion: 2024.1.0\n"
    )
    (fake / "torch.py").write_text("raise ImportError('libtorch.so is missing')")
    done = fresh_cli(unstarted, "doctor", "--json", PYTHONPATH=str(fake))
    assert done.returncode == 1
    found = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert found["import name"]["state"] == "broken"
    assert "2024.1.0" in found["import name"]["value"]
    assert found["torch"]["state"] == "broken"
    assert "libtorch.so is missing" in found["torch"]["value"]
