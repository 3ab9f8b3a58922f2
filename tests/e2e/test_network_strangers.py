"""A stranger who reaches what a run has opened: nothing runs, nothing is read or set, and the run goes on."""

from __future__ import annotations

import base64
import json
import os
import pickle
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from distributed.launch.ports import free_port
from tests.conftest import clean_environ
from tests.e2e.survival import launching_python, processes_with
from tests.warm_python import SCRIPTS

SCRIPT = """
import os, time
import torch
from torch import nn
from torch.utils.data import TensorDataset
from distributed import Trainer


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 1), 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 5 and self.training:
            open(f"{PLACE}/training-{os.environ['RANK']}", "w").close()
            while not os.path.exists(f"{PLACE}/go on"):
                time.sleep(0.02)
        return self.layer(x)


torch.manual_seed(0)
x = torch.randn(80, 4)
Trainer(Net(), loss_fn=nn.MSELoss(), batch_size=4, learning_rate=0.01).fit(TensorDataset(x, x[:, :1]))
"""


class Evil:
    """What torch elastic's rendezvous would unpickle."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, (f"touch '{self.mark}'",)


def begin(folder: Path, *arguments: str, **environ: str) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(SCRIPT.replace("{PLACE}", str(folder.parent)))
    command = [*launching_python(), "-m", "distributed.cli", "train", "--script", "train.py", "device=cpu"]
    command += ["hang_timeout_s=300", *arguments]  # the ranks wait for the strangers to have tried
    environ = clean_environ(XDG_CACHE_HOME=str(folder.parent / "cache"), **environ)
    return subprocess.Popen(
        command, cwd=folder, env=environ, stdout=(folder / "shown").open("wb"), stderr=subprocess.STDOUT
    )


def wait_until(look: Callable[[], Any], run: subprocess.Popen[bytes], folder: Path) -> None:
    deadline = time.monotonic() + 90
    while not look():
        assert run.poll() is None, (folder / "shown").read_text()
        assert time.monotonic() < deadline, (folder / "shown").read_text()
        time.sleep(0.05)


def open_ports(*folders: Path) -> list[tuple[str, int]]:
    """Of all processes that work in these folders."""
    everyone = [psutil.Process(pid) for folder in folders for pid in processes_with(str(folder), folder)]
    found = [line.laddr for process in everyone for line in process.net_connections("tcp") if line.status == "LISTEN"]
    return sorted((address.ip, address.port) for address in set(found))


def attack(address: tuple[str, int], mark: Path) -> None:
    """All that a stranger can do with a port: torch's own client, and bytes."""
    written = []

    def use_store() -> None:
        with suppress(dist.DistError):
            store = dist.TCPStore(*address, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=1))
            evil = base64.b64encode(pickle.dumps(Evil(mark))).decode()
            for key in ("distributed/torch.rendezvous.round-1", "session-0/stop/asked", "session-0//stop/asked"):
                store.set(key, evil)
                written.append(key)

    thread = threading.Thread(target=use_store, daemon=True)  # it waits for ever where nobody answers
    thread.start()
    thread.join(1.2)
    assert written == []
    for said in (b"GET / HTTP/1.1\r\n\r\n", pickle.dumps(Evil(mark)), secrets.token_bytes(4096)):
        with socket.create_connection(address, 5) as line:
            line.settimeout(0.2)
            with suppress(OSError):
                line.sendall(said)
                line.recv(4096)


def steps_of(run_dir: Path) -> tuple[int, int]:
    """The last step, and how many worlds there were."""
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return max(event.get("step", 0) for event in events), len(list((run_dir / "attempts").iterdir()))


def test_one_machine_run_listens_on_loopback_and_resists_attack(tmp_path: Path) -> None:
    folder, mark = tmp_path / "a", tmp_path / "mark"
    run = begin(folder, "--num-gpus", "2", "--run-dir", "run")
    try:
        wait_until(lambda: len(list(tmp_path.glob("training-*"))) == 2, run, folder)
        ports = open_ports(folder)
        assert {address for address, _ in ports} <= {"127.0.0.1", "::1"}
        for address in ports:
            attack(address, mark)
        (tmp_path / "go on").touch()
        assert run.wait(90) == 0, (folder / "shown").read_text()
    finally:
        run.kill()
    assert steps_of(folder / "run") == (10, 1)
    assert not mark.exists()


def test_ranks_of_another_launcher_listen_on_loopback_only(tmp_path: Path) -> None:
    """Torch's store has no lock, but is not open to other machines when all ranks are on this one."""
    (tmp_path / "train.py").write_text(SCRIPT.replace("{PLACE}", str(tmp_path)).replace("RANK", "OMPI_COMM_WORLD_RANK"))
    place = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_PORT": str(free_port())}
    runs = []
    try:
        for rank in "01":
            told = clean_environ(OMPI_COMM_WORLD_RANK=rank, OMPI_COMM_WORLD_LOCAL_RANK=rank, **place)
            shown = (tmp_path / f"shown-{rank}").open("wb")
            command = [*SCRIPTS.command, "train.py"]
            runs.append(subprocess.Popen(command, cwd=tmp_path, env=told, stdout=shown, stderr=subprocess.STDOUT))
        (tmp_path / "shown").symlink_to("shown-0")
        wait_until(lambda: len(list(tmp_path.glob("training-*"))) == 2, runs[0], tmp_path)
        ports = open_ports(tmp_path)
        assert ("127.0.0.1", int(place["MASTER_PORT"])) in ports
        assert not {"::", "0.0.0.0"} & {address for address, _ in ports}
        (tmp_path / "go on").touch()
        assert [run.wait(90) for run in runs] == [0, 0], (tmp_path / "shown").read_text()
    finally:
        for run in runs:
            run.kill()


def test_rendezvous_refuses_attackers_and_leaves_no_token(tmp_path: Path) -> None:
    """Before the nodes have met, and while they train; the token is in no file of the run but its own."""
    port, mark, run_dir = free_port(), tmp_path / "mark", tmp_path / "run"
    where = ["--num-nodes", "2", "--gpus-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    first = begin(tmp_path / "a", *where, "--run-dir", str(run_dir))
    second = None
    try:
        wait_until((run_dir / "join-token").exists, first, tmp_path / "a")
        token = (run_dir / "join-token").read_text().strip()
        attack(("127.0.0.1", port), mark)
        second = begin(tmp_path / "b", *where, "--run-dir", str(run_dir))
        wait_until(lambda: len(list(tmp_path.glob("training-*"))) == 2, first, tmp_path / "a")
        assert port in {number for _, number in open_ports(tmp_path / "a")}
        for address in open_ports(tmp_path / "a", tmp_path / "b"):
            attack(address, mark)
        (tmp_path / "go on").touch()
        assert (first.wait(90), second.wait(90)) == (0, 0), (tmp_path / "a" / "shown").read_text()
    finally:
        first.kill()
        if second is not None:
            second.kill()
    assert steps_of(run_dir) == (10, 1)
    assert not mark.exists()
    assert not (run_dir / "join-token").exists()
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in kept if token.encode() in path.read_bytes()] == []
