"""`fit` joins the world that Slurm's srun makes: a real controller and two real node daemons on loopback."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.conftest import DATA, clean_environ
from tests.e2e.survival import launching_python
from tests.e2e.test_api_launch import LAUNCHED, same_everywhere
from tests.warm_python import SCRIPTS

TOOLS = ("munged", "slurmctld", "slurmd", "srun")
_PATH = os.environ["PATH"] + ":/usr/sbin:/sbin"
missing = [tool for tool in TOOLS if shutil.which(tool, path=_PATH) is None]
pytestmark = [
    pytest.mark.skipif(bool(missing), reason=f"Slurm is not installed: no {', '.join(missing)}"),
    pytest.mark.skipif(os.geteuid() != 0, reason="the daemons of a Slurm cluster run as root"),
]


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A cluster of two nodes on this machine; yields the environment that its commands need."""
    base = tmp_path_factory.mktemp("slurm")
    for folder in (base, *base.parents):
        if folder.stat().st_uid == os.getuid() and str(folder).startswith("/tmp/"):
            folder.chmod(0o755)  # munge refuses sockets in folders that others may write
    key, munge_socket, conf = base / "munge.key", base / "munge.socket", base / "slurm.conf"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    controller, first, second = free_ports(3)
    host = socket.gethostname()
    nodes = [
        f"NodeName=n{number} NodeAddr=127.0.0.1 NodeHostname={host} Port={port} CPUs=2 RealMemory=1000 State=UNKNOWN"
        for number, port in ((1, first), (2, second))
    ]
    conf.write_text(
        "\n".join(
            [
                "ClusterName=test",
                f"SlurmctldHost={host}(127.0.0.1)",
                "SlurmUser=root",
                f"SlurmctldPort={controller}",
                "AuthType=auth/munge",
                f"AuthInfo=socket={munge_socket},cred_expire=5",
                "CredType=cred/munge",
                f"StateSaveLocation={base}/state",
                f"SlurmdSpoolDir={base}/%n",
                f"SlurmctldPidFile={base}/ctld.pid",
                f"SlurmdPidFile={base}/%n.pid",
                "ProctrackType=proctrack/linuxproc",
                "TaskPlugin=task/none",
                "JobAcctGatherType=jobacct_gather/none",
                "SelectType=select/cons_tres",
                "SlurmdParameters=config_overrides",
                "ReturnToService=2",
                "RequeueExit=143",
                "MpiDefault=none",
                *nodes,
                "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
                "",
            ]
        )
    )
    (base / "state").mkdir()
    environ = clean_environ(SLURM_CONF=str(conf), PATH=f"{Path(sys.executable).parent}:{_PATH}", OMP_NUM_THREADS="1")
    commands = [
        ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={munge_socket}",
         f"--pid-file={base}/munged.pid", f"--log-file={base}/munged.log", f"--seed-file={base}/munged.seed"],
        ["slurmctld", "-D", "-c", "-f", str(conf)],
        ["slurmd", "-D", "-N", "n1", "-f", str(conf)],
        ["slurmd", "-D", "-N", "n2", "-f", str(conf)],
    ]  # fmt: skip
    log = (base / "daemons.log").open("w")
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            daemons.append(subprocess.Popen(command, env=environ, stdout=log, stderr=log))
            if command[0] == "munged":
                wait_until(munge_socket.exists)
        wait_until(lambda: idle_nodes(environ) == 2, base / "daemons.log")
        yield environ
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for environ_of in Path("/proc").glob("[0-9]*/environ"):  # steps tell the controller of their end, for minutes
            with suppress(OSError):
                if f"SLURM_CONF={conf}".encode() in environ_of.read_bytes():
                    os.kill(int(environ_of.parent.name), signal.SIGKILL)
        log.close()


def idle_nodes(environ: dict[str, str]) -> int:
    answer = subprocess.run(["sinfo", "-h", "-N", "-o", "%T"], env=environ, capture_output=True, text=True)
    return answer.stdout.split().count("idle")


def wait_until(holds, base: Path | None = None, *, seconds: float = 60.0) -> None:
    """`base` is what to read when it never comes."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise AssertionError(base.read_text() if base and base.exists() else "it never came")
        time.sleep(0.05)


def test_fit_under_srun_on_two_nodes_joins_one_world(slurm: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DATA + LAUNCHED)
    # both nodes are this machine, which has no host names n1 and n2: the meeting place is said
    command = [
        "srun",
        "-N",
        "2",
        "--ntasks-per-node",
        "1",
        "--export=ALL,MASTER_ADDR=127.0.0.1",
        *SCRIPTS.command,
        "train.py",
    ]
    result = subprocess.run(command, cwd=tmp_path, env=slurm, capture_output=True, text=True, timeout=180)
    assert result.returncode == 0, result.stdout + result.stderr
    same_everywhere(result.stdout, 2)
    assert len(list((tmp_path / "runs").iterdir())) == 1


REQUEUED = (
    DATA
    + """
import time
from distributed import Trainer


class Slow(MyModel):
    def forward(self, x):
        time.sleep(0.05)
        return super().forward(x)


Trainer(Slow(), epochs=10, resume_from_checkpoint=True, log_every_n_steps=1).fit(train_loader)
"""
)


def steps_of(events: Path) -> int:
    return events.read_text().count("StepEnded") if events.exists() else 0


def resumed(job: str, slurm: dict[str, str]) -> bool:
    """Whether the job waits no longer for the time that Slurm lets pass before it starts one again."""
    subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], env=slurm, capture_output=True)
    state = subprocess.run(["squeue", "-h", "-j", job, "-o", "%T"], env=slurm, capture_output=True, text=True)
    return state.stdout.strip() == "RUNNING"


def test_preempted_slurm_job_is_requeued_and_resumes(slurm: dict[str, str], tmp_path: Path) -> None:
    """By either signal: it saves, ends with the code that Slurm starts it again for, and goes on where it was."""
    (tmp_path / "train.py").write_text(REQUEUED)
    (tmp_path / "job.sh").write_text(
        f"#!/bin/sh\ncd {tmp_path}\necho started >> starts.txt\n"
        f"exec {shlex.join(launching_python())} -m distributed.cli train --script train.py --num-gpus 2 --run-dir run"
        " resume_from_checkpoint=true\n"
    )
    submitted = subprocess.run(
        ["sbatch", "--parsable", "--requeue", "-n1", "-c2", "-o", "job-%j.txt", "job.sh"],
        env=slurm, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert submitted.returncode == 0, submitted.stderr
    job, events = submitted.stdout.strip(), tmp_path / "run" / "events.jsonl"
    output = tmp_path / f"job-{job}.txt"

    def starts() -> int:
        return (tmp_path / "starts.txt").read_text().count("started")

    for count, signal_name in enumerate(("TERM", "USR1"), 1):
        wait_until(lambda count=count: steps_of(events) > 5 * count and starts() == count, output)
        before = steps_of(events)
        wait_until(lambda before=before: steps_of(events) > before, output)  # of the job that has just been started
        subprocess.run(["scancel", f"--signal={signal_name}", "--batch", job], env=slurm, check=True)
        wait_until(lambda count=count: events.read_text().count('"status":"interrupted"') == count, output)
        wait_until(lambda: resumed(job, slurm), output)
    wait_until(lambda: '"status":"done"' in events.read_text(), output, seconds=150)
    assert starts() == 3
    steps = [json.loads(line)["step"] for line in events.read_text().splitlines() if "StepEnded" in line]
    assert steps == sorted(set(steps))
