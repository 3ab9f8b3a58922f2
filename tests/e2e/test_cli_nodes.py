"""Two nodes on this machine meet through the rendezvous, and end together."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

from distributed.launch.ports import free_port
from tests.conftest import clean_environ
from tests.e2e.survival import launching_python

ALL_REDUCE = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([10.0 ** dist.get_rank()])
dist.all_reduce(total)
print("node", os.environ["GROUP_RANK"], "rank", dist.get_rank(), "sum", total.item())
dist.destroy_process_group()
"""

FAILS_ON_ONE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 1:
    raise ValueError("the data is bad")
dist.all_reduce(torch.ones(1))
"""

FAILS_AFTERWARDS = """
import torch
from distributed import Trainer
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randn(16, 1))
trainer = Trainer(torch.nn.Linear(4, 1), batch_size=4, device="cpu")
trainer.fit(data)
if trainer.is_main:
    raise ValueError("no place for the plot")
"""


def node(folder: Path, port: int, *more: str) -> subprocess.Popen[str]:
    arguments = [
        "--script",
        "../train.py",
        "--num-nodes",
        "2",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(port),
    ]
    folder.mkdir(exist_ok=True)
    return subprocess.Popen(
        [*launching_python(), "-m", "distributed.cli", "train", *arguments, *more],
        cwd=folder,
        env=clean_environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(*nodes: subprocess.Popen[str]) -> list[str]:
    try:
        return [running.communicate(timeout=90)[0] for running in nodes]
    finally:
        for running in nodes:
            running.kill()


def test_nodes_agree_on_node_ranks_and_one_run_directory(tmp_path):
    (tmp_path / "train.py").write_text(ALL_REDUCE)
    port = free_port()
    nodes = [node(tmp_path / name, port, "--gpus-per-node", "1") for name in "ab"]
    shown = "".join(finish(*nodes))
    assert [running.returncode for running in nodes] == [0, 0], shown
    assert "[r0] node 0 rank 0 sum 11.0" in shown
    assert "[r1] node 1 rank 1 sum 11.0" in shown
    logs = sorted(log.relative_to(tmp_path).as_posix() for log in tmp_path.glob("*/runs/*/attempts/0/rank-*.log"))
    assert [log.rpartition("/")[2] for log in logs] == ["rank-0.log", "rank-1.log"]
    assert len({log.rpartition("/")[0] for log in logs}) == 1


def test_given_node_ranks_are_kept_and_failure_ends_both_nodes(tmp_path):
    (tmp_path / "train.py").write_text(FAILS_ON_ONE)
    port = free_port()
    second = node(tmp_path / "second", port, "--gpus-per-node", "1", "--node-rank", "1", "--run-dir", "mine")
    first = node(tmp_path / "first", port, "--gpus-per-node", "1", "--node-rank", "0", "--run-dir", "mine")
    on_first, on_second = finish(first, second)
    assert first.returncode == 1, on_first
    assert second.returncode == 1, on_second
    assert (tmp_path / "first" / "mine" / "attempts" / "0" / "rank-0.log").exists()
    assert (tmp_path / "second" / "mine" / "attempts" / "0" / "rank-1.log").exists()
    assert on_second.count("Traceback") == 1
    assert "Traceback" not in on_first
    assert "node 1" in on_first
    assert "the data is bad" in on_first
    assert "rank 0" not in on_first.partition("RankFailedError")[2]


def test_failure_after_training_ends_both_nodes_without_restart(tmp_path):
    (tmp_path / "train.py").write_text(FAILS_AFTERWARDS)
    port = free_port()
    nodes = [
        node(tmp_path / name, port, "--gpus-per-node", "1", "--node-rank", rank, "--run-dir", str(tmp_path / "run"))
        for name, rank in (("a", "0"), ("b", "1"))
    ]
    first, second = finish(*nodes)
    assert all(running.returncode for running in nodes), first + second
    assert "no place for the plot" in first
    assert "node 0" in second
    assert "no place for the plot" in second
    assert "AssertionError" not in first + second
    assert [path.name for path in (tmp_path / "run/attempts").iterdir()] == ["0"]


def test_stopping_one_node_stops_both(tmp_path):
    (tmp_path / "train.py").write_text("import time\nprint('running', flush=True)\ntime.sleep(600)\n")
    port = free_port()
    nodes = [node(tmp_path / name, port, "--gpus-per-node", "1") for name in "ab"]
    for running in nodes:
        assert running.stdout is not None
        assert any("running" in line for line in running.stdout)
    nodes[0].send_signal(signal.SIGINT)
    shown = finish(*nodes)
    assert [running.returncode for running in nodes] == [130, 130], shown


def test_nodes_with_different_rank_counts_are_refused(tmp_path):
    (tmp_path / "train.py").write_text("print('never')")
    port = free_port()
    nodes = [node(tmp_path / name, port, "--gpus-per-node", count) for name, count in (("a", "1"), ("b", "2"))]
    for shown in finish(*nodes):
        assert "different numbers of ranks" in shown
        assert "never" not in shown
    assert [running.returncode for running in nodes] == [3, 3]


def test_node_with_run_directory_of_another_run_is_refused(tmp_path):
    (tmp_path / "train.py").write_text("print('never')")
    log = tmp_path / "b" / "mine" / "attempts" / "0" / "rank-1.log"
    log.parent.mkdir(parents=True)
    log.write_text("of another run")
    port = free_port()
    nodes = [
        node(tmp_path / name, port, "--gpus-per-node", "1", "--node-rank", rank, "--run-dir", "mine")
        for name, rank in (("a", "0"), ("b", "1"))
    ]
    shown = finish(*nodes)
    assert [running.returncode for running in nodes] == [3, 3], shown
    assert all("holds another run" in text for text in shown)
    assert log.read_text() == "of another run"
