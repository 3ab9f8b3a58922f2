"""Runs that horovodrun starts: over gloo and MPI, on several hosts, and elastic ones whose hosts come and go.

Hosts are names of this machine, one rank on each: horovodrun shuts out a whole host when one of its workers dies. Where
network namespaces can be made, they are hosts with addresses of their own, which it reaches by an `ssh` of ours.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from distributed.chaos.hosts import Hosts
from distributed.data.checks.ledger import check_ledgers
from tests.conftest import clean_environ
from tests.e2e.survival import processes_with, wait_until
from tests.warm_python import WarmPython

pytestmark = pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="no Horovod: make horovod")

PATIENCE_S = 180
SAMPLES, EPOCHS, GLOBAL_BATCH = 96, 12, 12
STEPS = SAMPLES // GLOBAL_BATCH * EPOCHS
CLI = ["-m", "distributed.cli", "train", "--script", "train.py", "--backend", "horovod"]
NAMES = "localhost:1\n127.0.0.1:1\n"
MPI = ["--allow-run-as-root", "--oversubscribe"]
WARM = WarmPython(
    "torch", "torch._dynamo", "horovod.torch", "horovod.torch.elastic", "distributed.cli.main",
    "distributed.trainers.trainer", "distributed.engines.horovod.trainer",
)  # fmt: skip

# Steps are slow in a world that shall end, the more so the fewer are left, so that it ends before the run does.
SCRIPT = """
import os, signal, sys, time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distributed import HorovodTrainer, Trainer
from distributed.core.env import worker_env

PLACE, FAULT = Path(os.environ["PLACE"]), os.environ.get("FAULT", "")
HOSTS = [b"localhost:1", b"127.0.0.1:1"]
if os.environ.get("SCRIPT_INITS"):
    import horovod.torch as hvd

    hvd.init()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
        if os.environ.get("OWN_BUFFER"):  # which only rank 0's counts of
            self.register_buffer("passes", torch.tensor(0))
        else:
            self.passes = 0

    def forward(self, x):
        self.passes += int(self.training)
        world = worker_env()
        if FAULT:
            time.sleep((0.1 if self.passes < 40 else 0.5) if world.restarts < int(os.environ["WORLDS"]) else 0.0)
        if FAULT == f"kill {world.rank}" and self.passes == 10 and not world.restarts:
            os.kill(os.getpid(), signal.SIGKILL)
        if FAULT == "come and go" and world.is_main and self.passes == 10:
            (PLACE / "hosts").write_bytes(b"\\n".join(HOSTS + [b"127.1:1"]))
        if FAULT == "come and go" and world.is_main and world.world_size == 3:
            (PLACE / "hosts").write_bytes(b"\\n".join(HOSTS))
        return self.layers(x)


torch.manual_seed(0)
x = torch.randn(96, 8, dtype=torch.float64)
data = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=int(os.environ.get("BATCH", 6)), shuffle=True)


def train(trainer, **settings):
    torch.manual_seed(1)
    model = Model().to(torch.float64)
    settings = dict(
        optimizer="sgd", learning_rate=0.1, progress=False, epochs=12, sample_ledger=True, lr_scaling="none", **settings
    )
    trainer = trainer(model, **settings)
    trainer.fit(data)
    return model.state_dict()


first = HorovodTrainer if os.environ.get("SCRIPT_INITS") else Trainer
more = {"communication_backend": "mpi"} if os.environ.get("OVER_MPI") else {}
if first is Trainer:
    more["backend"] = "horovod"
weights = train(first, run_dir=str(PLACE / "run"), **more)
torch.save(weights, PLACE / "weights.pt.part" if worker_env().is_main else os.devnull)
if worker_env().is_main:
    os.replace(PLACE / "weights.pt.part", PLACE / "weights.pt")
if os.environ.get("THEN_DDP"):
    other = train(Trainer, backend="pytorch-ddp", run_dir=str(PLACE / "ddp"))
    print("differs from DDP by", max((weights[n] - other[n]).abs().max().item() for n in weights), flush=True)
world = worker_env()
print("ended as", world.rank, "of", world.world_size, world.launcher, "attempt", world.attempt, flush=True)
"""


@dataclass(frozen=True)
class Ended:
    """How a run ended."""

    place: Path
    code: int
    shown: str

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        assert self.code == 0, self.shown
        return torch.load(self.place / "weights.pt", weights_only=True)

    def assert_same_as(self, other: Ended) -> None:
        """The same weights but for the order of sums, and every sample once in every epoch."""
        mine, expected = self.weights, other.weights
        for name, value in expected.items():
            torch.testing.assert_close(mine[name], value, rtol=0, atol=1e-9)
        report = check_ledgers(self.place / "run" / "ledger", SAMPLES)
        assert str(report) == f"exactly once: {SAMPLES * EPOCHS} samples in {STEPS} steps"


def run(place: Path, command: list[str], **environ: str) -> Ended:
    """What is left of it in the end is killed: horovodrun's workers are in process groups of their own."""
    (place / "train.py").write_text(SCRIPT)
    trace = uuid.uuid4().hex
    told = clean_environ(PLACE=str(place), TRACE=trace, OMP_NUM_THREADS="1", **environ)
    told["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{told['PATH']}"
    with (place / "output.txt").open("w+") as output:
        process = subprocess.Popen(
            command, cwd=place, env=told, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            code = -1000
        finally:
            for pid in processes_with(trace) if process.poll() is None else ():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
    shown = (place / "output.txt").read_text()
    assert code != -1000, f"did not end:\n{shown}"
    wait_until(lambda: not processes_with(trace), "all processes have ended")
    return Ended(place, code, shown)


# Seconds until a lost host comes back. horovodrun ends its other ranks within 5, and counts one that ends later against
# the new one in its place.
AT_ONCE, AFTER_ITS_RANKS = (1, 3), (8, 12)


def elastic(
    place: Path, hosts: str, network: str, program: list[str], comes_back: tuple[int, int] = AT_ONCE
) -> list[str]:
    """The command of an elastic run; `hosts` are those that are found at first."""
    (place / "hosts").write_text(hosts)
    discover = place / "discover.sh"
    discover.write_text(f"#!/bin/sh\ncat {place}/hosts\n")
    discover.chmod(0o755)
    ranks = str(sum(int(line.partition(":")[2]) for line in hosts.split()))
    sizes = ["-np", ranks, "--min-np", "1", "--max-np", "3", "--host-discovery-script", str(discover)]
    local = ["--network-interface", network, "--blacklist-cooldown-range", *map(str, comes_back)]
    return ["horovodrun", *sizes, *local, *WARM.command, *program]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    hosts = ["-H", "localhost:1,127.0.0.1:1", "--network-interface", "lo"]
    command = ["horovodrun", "-np", "2", "--gloo", *hosts, *WARM.command, "train.py"]
    return run(tmp_path_factory.mktemp("undisturbed"), command, SCRIPT_INITS="1", THEN_DDP="1")


def test_script_with_hvd_init_matches_ddp_in_the_same_world(undisturbed: Ended) -> None:
    assert undisturbed.code == 0, undisturbed.shown
    for rank in (0, 1):
        assert f"ended as {rank} of 2 horovodrun attempt 0" in undisturbed.shown
    differences = [line.split()[-1] for line in undisturbed.shown.splitlines() if "differs from DDP by" in line]
    assert len(differences) == 2
    assert max(map(float, differences)) < 1e-9
    undisturbed.assert_same_as(undisturbed)


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun: install openmpi-bin")
@pytest.mark.parametrize("launcher", [["horovodrun", "--mpi"], ["mpirun", *MPI]], ids=["horovodrun --mpi", "mpirun"])
def test_run_over_mpi_ends_with_same_bytes(launcher: list[str], tmp_path: Path, undisturbed: Ended) -> None:
    import horovod.torch as hvd

    if not hvd.mpi_built():
        pytest.skip("Horovod was built without MPI: make horovod MPI=1")
    ended = run(tmp_path, [*launcher, "-np", "2", *WARM.command, "train.py"], OVER_MPI="1")
    ended.assert_same_as(undisturbed)


def test_killed_elastic_worker_is_replaced_with_same_bytes(tmp_path: Path, undisturbed: Ended) -> None:
    """With the command line as the program that horovodrun starts."""
    command = elastic(tmp_path, NAMES, "lo", CLI)
    ended = run(tmp_path, command, FAULT="kill 0", WORLDS="2")
    ended.assert_same_as(undisturbed)
    assert "rank 0 of 2, started by horovodrun" in ended.shown
    for rank in (0, 1):  # after the world of the one that was left, which has its new peer
        assert f"ended as {rank} of 2 horovodrun attempt 2" in ended.shown


def test_elastic_hosts_joining_and_leaving_keep_the_same_bytes(tmp_path: Path, undisturbed: Ended) -> None:
    command = elastic(tmp_path, NAMES, "lo", ["train.py"])
    ended = run(tmp_path, command, FAULT="come and go", WORLDS="2", SCRIPT_INITS="1", OWN_BUFFER="1")
    ended.assert_same_as(undisturbed)
    assert (tmp_path / "run" / "attempts" / "1" / "heartbeat-2").exists()
    assert "horovodrun has taken this host out of the run" in ended.shown
    for rank in (0, 1):
        assert f"ended as {rank} of 2 horovodrun attempt 2" in ended.shown


@pytest.mark.skipif(Hosts.available() is not None, reason=str(Hosts.available()))
def test_lost_host_rejoins_with_same_bytes(tmp_path: Path, undisturbed: Ended) -> None:
    with Hosts(2) as hosts:
        (tmp_path / "bin").mkdir()
        write_ssh(tmp_path / "bin" / "ssh", hosts)
        command = elastic(tmp_path, "h0:1\nh1:2\n", "eth0", ["train.py"], AFTER_ITS_RANKS)
        path = f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}"
        ended = run(tmp_path, hosts[0].command(command), FAULT="kill 2", WORLDS="2", BATCH="4", PATH=path)
    ended.assert_same_as(undisturbed)
    for rank in (0, 1, 2):
        assert f"ended as {rank} of 3 horovodrun attempt 2" in ended.shown


def write_ssh(path: Path, hosts: Hosts) -> None:
    """What horovodrun calls `ssh`: the same arguments, and the command runs on that host."""
    cases = "".join(f'{host.name}) set -- {shlex.join(host.command(["sh", "-c"]))} "$*" ;;\n' for host in hosts)
    options = 'while [ "$1" = -o ]; do shift 2; done\n'
    path.write_text(f'#!/bin/sh\n{options}host=$1; shift\n{options}case $host in\n{cases}esac\nexec "$@"\n')
    path.chmod(0o755)
