"""`distributed train` with real processes: it runs, fails with one traceback, stops, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import psutil
import pytest

from distributed.core.documents.run_config import GivenSetting, RunConfig
from distributed.launch.diagnose.diagnosis import diagnose
from tests.conftest import clean_environ
from tests.e2e.survival import launching_python, wait_until

PLAIN_DDP = """
import os, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = DistributedDataParallel(torch.nn.Linear(3, 1))
model(torch.full((2, 3), float(rank))).sum().backward()
total = torch.tensor([float(rank)])
dist.all_reduce(total)
print(f"sum {total.item()} grad {model.module.weight.grad[0, 0].item()} args {sys.argv[1:]}")
print("on stderr", file=sys.stderr)
dist.destroy_process_group()
"""

UNLIKE = """
import os, torch
from torch import nn
from torch.utils.data import TensorDataset
from distributed import Trainer

data = TensorDataset(torch.randn(32, 4), torch.randint(0, 2, (32,)))
Trainer(nn.Linear(4, 2), batch_size=4 + int(os.environ["RANK"])).fit(data)
"""
FAILS_ON_ONE = """
import torch, torch.distributed as dist

def train():
    if dist.get_rank() == 1:
        raise ValueError("the data is bad")
    dist.all_reduce(torch.ones(1))

dist.init_process_group("gloo")
dist.barrier()
train()
"""

# Ranks that run until they are told, each with a child of its own in the place of a data loader's worker.
RUNS_ON = """
import multiprocessing, os, sys, time

def idle():
    time.sleep(600)

if __name__ == "__main__":
    child = multiprocessing.get_context("fork").Process(target=idle, daemon=True)
    child.start()
    with open(f"pids-{os.environ['RANK']}.part", "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    os.rename(file.name, file.name[:-5])
    print("running", flush=True)
    time.sleep(600)
"""


def command(*arguments: str) -> list[str]:
    return [*launching_python(), "-m", "distributed.cli", "train", *arguments]


def train(folder: Path, *arguments: str, timeout: float = 90) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), cwd=folder, env=clean_environ(), capture_output=True, text=True, timeout=timeout
    )


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*arguments),
        cwd=folder,
        env=clean_environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def pids_of_ranks(folder: Path, ranks: int = 2) -> list[int]:
    files = [folder / f"pids-{rank}" for rank in range(ranks)]
    wait_until(lambda: all(file.exists() for file in files), "the ranks are running")
    return [int(pid) for file in files for pid in file.read_text().split()]


def living(pids: Iterable[int]) -> list[int]:
    alive = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                alive.append(pid)
        except psutil.NoSuchProcess:
            pass
    return alive


def test_plain_torch_ddp_script_runs_with_logs_per_rank(tmp_path):
    (tmp_path / "train.py").write_text(PLAIN_DDP)
    done = train(tmp_path, "--script", "train.py", "--num-gpus", "2", "--run-dir", "run", "epochs=3", "--", "--x", "1")
    assert done.returncode == 0, done.stderr
    said = "sum 1.0 grad 1.0 args ['--x', '1']"
    lines = (done.stdout + done.stderr).splitlines()
    for rank in range(2):
        assert f"[r{rank}] {said}" in lines
        assert f"[r{rank}] on stderr" in lines
        log = (tmp_path / "run" / "attempts" / "0" / f"rank-{rank}.log").read_text().splitlines()
        assert said in log
        assert "on stderr" in log
    record = RunConfig.read(tmp_path / "run")
    assert (record.script, record.arguments) == ("train.py", ("--x", "1"))
    assert record.settings["epochs"] == GivenSetting(3, "command line")


MODULE = """
import argparse, json, os, sys
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
parser.add_argument("--rate", type=float)
from .part import X
names = [name for name in os.environ if name.startswith(("ROLE_", "TORCHELASTIC_"))]
said = [__package__, X, vars(parser.parse_args()), sys.stdin.read(), {name: os.environ[name] for name in names}]
print(json.dumps(said))
"""


@pytest.mark.parametrize("warm", ["true", "false"])
def test_module_gets_local_rank_input_and_torchruns_variables(tmp_path, warm):
    package = tmp_path / "package"
    package.mkdir()
    (package / "part.py").write_text("X = 5")
    (package / "run.py").write_text(MODULE)
    words = ["-m", "package.run", "--num-gpus", "2", "--local_rank", "--run-dir", "run", f"warm_start={warm}"]
    done = subprocess.run(
        command(*words, "max_restarts=3", "--", "--rate", "0.5"),
        cwd=tmp_path,
        env=clean_environ(),
        input="one\ntwo",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    said = {line[:4]: json.loads(line[5:]) for line in done.stdout.splitlines()}
    for rank, text in ((0, "one\ntwo"), (1, "")):
        variables = said[f"[r{rank}]"].pop()
        assert said[f"[r{rank}]"] == ["package", 5, {"local_rank": rank, "rate": 0.5}, text]
        assert variables == {
            "ROLE_NAME": "default",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": "2",
            "TORCHELASTIC_ERROR_FILE": str(tmp_path / "run" / "attempts" / "0" / f"error-{rank}.json"),
            "TORCHELASTIC_MAX_RESTARTS": "3",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_RUN_ID": "run",
        }


def test_restarted_plain_script_is_reported_in_its_own_words(tmp_path):
    script = "import os, sys\nsys.exit(int(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'))"
    (tmp_path / "train.py").write_text(script)
    words = ["--script", "train.py", "--num-gpus", "2", "epochs=3", "--tensor-parallel", "2", "max_restarts=2"]
    done = train(tmp_path, *words, "--backend", "fsdp")
    assert done.returncode == 0, done.stderr
    assert "2 attempts, done after" in done.stdout
    assert "the script was started again after" in done.stdout
    assert "goodput" not in done.stdout
    assert "ranks for each layer (if train.py uses a Trainer or distributed.start)" in done.stderr
    _, told, idle = done.stderr.rpartition("train.py used no Trainer and no distributed.start: these settings had no")
    assert told
    assert "epochs=3 (command line)" in idle
    assert "tensor_parallel=2 (command line)" in idle
    assert "backend=fsdp (command line)" in idle
    assert "max_restarts" not in idle


ASKS = """
import os, time
print(f"\\r10% of {os.environ['RANK']}", end="", flush=True)
while not os.path.exists("go"):
    time.sleep(0.01)
print(f"\\r100% of {os.environ['RANK']}", flush=True)
"""


def test_progress_bars_of_ranks_move_on_a_terminal(tmp_path):
    (tmp_path / "train.py").write_text(ASKS)
    leader, follower = pty.openpty()
    environ = clean_environ(COLUMNS="100", TERM="xterm-256color")
    environ.pop("CI", None)
    words = command("--script", "train.py", "--num-gpus", "2")
    process = subprocess.Popen(words, cwd=tmp_path, env=environ, stdin=follower, stdout=follower, stderr=follower)
    os.close(follower)
    shown = ""
    with contextlib.suppress(OSError):  # Linux: the other end is closed
        while new := os.read(leader, 65536):
            shown += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", new.decode())
            if "[r0] 10% of 0" in shown and "[r1] 10% of 1" in shown:
                (tmp_path / "go").touch()
    os.close(leader)
    assert process.wait() == 0, shown
    for rank in (0, 1):
        assert shown.index(f"[r{rank}] 10% of {rank}") < shown.index(f"[r{rank}] 100% of {rank}")
    assert "10%" not in shown.rpartition("[r1] 100% of 1")[2]


def test_only_the_first_failed_ranks_traceback_is_shown(tmp_path):
    (tmp_path / "train.py").write_text(FAILS_ON_ONE)
    done = train(tmp_path, "--script", "train.py", "--num-gpus", "2", "--run-dir", "run")
    assert done.returncode == 1
    shown = done.stdout + done.stderr
    assert shown.count("Traceback (most recent call last)") == 1
    assert "in train" in done.stderr
    assert "rank 1" in done.stderr
    assert "the data is bad" in done.stderr
    log = tmp_path / "run" / "attempts" / "0" / "rank-1.log"
    assert str(log) in done.stderr
    assert "the data is bad" in log.read_text()
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [(event["event"], event["rank"]) for event in events] == [("RankFailed", 1)]
    first = diagnose(tmp_path / "run").first
    assert first is not None
    assert first.line.rank == 1
    assert "the data is bad" in first.message
    assert first.where.startswith(str(tmp_path / "train.py"))


def test_exit_code_is_that_of_the_ranks_error(tmp_path):
    (tmp_path / "train.py").write_text("from distributed.core.errors import DataError\nraise DataError('empty')\n")
    assert train(tmp_path, "--script", "train.py", "--num-gpus", "2").returncode == 2


def test_killed_rank_is_named_and_ends_the_others(tmp_path):
    (tmp_path / "train.py").write_text(RUNS_ON)
    running = start(tmp_path, "--script", "train.py", "--num-gpus", "2", "--run-dir", "run")
    pids = pids_of_ranks(tmp_path)
    os.kill(pids[2], signal.SIGKILL)  # rank 1
    shown, _ = running.communicate(timeout=60)
    assert running.returncode == 1
    assert "rank 1" in shown
    assert "SIGKILL" in shown
    assert "rank-1.log" in shown
    wait_until(lambda: not living(pids), "all processes have ended")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_sigint_and_sigterm_end_all_ranks(tmp_path, number, code):
    (tmp_path / "train.py").write_text(RUNS_ON)
    running = start(tmp_path, "--script", "train.py", "--num-gpus", "2")
    pids = pids_of_ranks(tmp_path)
    running.send_signal(number)
    shown, _ = running.communicate(timeout=60)
    assert running.returncode == code, shown
    assert "Traceback" not in shown
    assert not living(pids)


def test_ctrl_c_reaches_ranks_once_with_time_to_save(tmp_path):
    (tmp_path / "train.py").write_text(
        "import os, signal, time\n"
        "asked = []\n"
        "signal.signal(signal.SIGINT, lambda *_: asked.append(1))\n"
        "open(f\"pids-{os.environ['RANK']}\", 'w').write(str(os.getpid()))\n"
        "while not asked: time.sleep(0.01)\n"
        "time.sleep(1)\n"
        "print('saved after', len(asked))\n"
    )
    running = start(tmp_path, "--script", "train.py", "--num-gpus", "2")
    pids_of_ranks(tmp_path)
    time.sleep(0.2)
    running.send_signal(signal.SIGINT)
    shown, _ = running.communicate(timeout=60)
    assert running.returncode == 130, shown
    assert "[r0] saved after 1" in shown
    assert "[r1] saved after 1" in shown


def test_second_ctrl_c_kills_ranks_that_ignore_the_first(tmp_path):
    ignoring = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n" + RUNS_ON
    (tmp_path / "train.py").write_text(ignoring)
    running = start(tmp_path, "--script", "train.py", "--num-gpus", "2")
    pids = pids_of_ranks(tmp_path)
    running.send_signal(signal.SIGINT)
    assert running.stdout is not None
    for line in running.stdout:
        if "again" in line:
            break
    running.send_signal(signal.SIGINT)
    shown, _ = running.communicate(timeout=25)  # less than the patience with one Ctrl-C
    assert running.returncode == 130, shown
    assert not living(pids)


def test_ranks_end_when_their_launcher_is_killed(tmp_path):
    (tmp_path / "train.py").write_text(RUNS_ON)
    running = start(tmp_path, "--script", "train.py", "--num-gpus", "2")
    pids = pids_of_ranks(tmp_path)
    running.kill()
    running.communicate(timeout=60)
    ranks, children = pids[::2], pids[1::2]
    try:
        wait_until(lambda: not living(ranks), "the ranks have ended")
    finally:
        for pid in living(children):  # this stand-in, unlike a data loader's worker, does not look after its parent
            os.kill(pid, signal.SIGKILL)


def test_settings_reach_the_ranks_with_their_sources(tmp_path):
    (tmp_path / "run.yaml").write_text("batch_size: 8\nlearning_rate: 1e-2\n")
    (tmp_path / "train.py").write_text("from distributed.core.env import overrides_in_env\nprint(overrides_in_env())")
    done = train(tmp_path, "--script", "train.py", "--config", "run.yaml", "epochs=4", "batch_size=16")
    line = next(line for line in done.stdout.splitlines() + done.stderr.splitlines() if line.startswith("[r0] {"))
    assert json.loads(line.removeprefix("[r0] ")) == {
        "batch_size": [16, "command line"],
        "learning_rate": [0.01, "run.yaml:2"],
        "epochs": [4, "command line"],
    }


def test_rank_with_another_setting_is_refused_naming_it(tmp_path):
    (tmp_path / "train.py").write_text(UNLIKE)
    done = train(tmp_path, "--script", "train.py", "--num-gpus", "2", "--run-dir", "run")
    assert done.returncode == 2, done.stderr
    assert "rank 1 plans another batch than rank 0: it has batch_size 5, not 4" in done.stderr


def test_resumed_run_is_the_next_attempt(tmp_path):
    (tmp_path / "train.py").write_text("print('here')")
    arguments = ["--script", "train.py", "--run-dir", "run"]
    assert train(tmp_path, *arguments).returncode == 0
    refused = train(tmp_path, *arguments)
    assert refused.returncode != 0
    assert "another run" in refused.stderr
    assert train(tmp_path, *arguments, "resume_from_checkpoint=true").returncode == 0
    assert (tmp_path / "run" / "attempts" / "1" / "rank-0.log").read_text() == "here\n"


def test_train_under_another_launcher_becomes_a_rank(tmp_path):
    (tmp_path / "train.py").write_text(
        "import os\nfrom distributed.core.env import overrides_in_env, worker_env\n"
        "print(worker_env().rank, worker_env().launcher, overrides_in_env())\n"
    )
    ours = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    arguments = command("--script", "train.py", "epochs=2")
    done = subprocess.run(
        arguments, cwd=tmp_path, env=clean_environ() | ours, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == '1 torchrun {"epochs": [2, "command line"]}\n', done.stderr
    assert not (tmp_path / "runs").exists()


def test_failure_of_earlier_run_is_not_taken_for_this_ones(tmp_path):
    program = (
        "import sys, time\n"
        "from distributed.launch.local import LocalLauncher\n"
        "from distributed.launch.request import LaunchRequest\n"
        "from distributed.core.errors import RankFailedError\n"
        "for script in ('bad.py', 'good.py'):\n"
        "    try: LocalLauncher().run(LaunchRequest((script,), 'run', 1))\n"
        "    except RankFailedError as error: print(script, error.exit_code)\n"
    )
    (tmp_path / "bad.py").write_text("import sys\nsys.exit(9)")
    (tmp_path / "good.py").write_text("import time\ntime.sleep(6)")
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=clean_environ(), capture_output=True, text=True
    )
    assert done.stdout == "bad.py 9\n", done.stderr
