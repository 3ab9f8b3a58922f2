"""A script of gloo that has finished ends, each time, also where the machine is busy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import cli

# A thread of gloo has just this callback to run, and then wants the interpreter, when the last reference to the group
# goes: that of the reducer, at the end of the function.
FINISHES = """
import hashlib, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def main():
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(30, 30))
    model(torch.randn(8, 30)).mean().backward()
    work = dist.all_reduce(torch.ones(4_000_000), async_op=True)
    work.get_future().then(lambda _: hashlib.pbkdf2_hmac("sha256", b"", b"", 600_000))
    work.wait()
    del work
    if sys.argv[1] == "destroys":
        dist.destroy_process_group()

main()
print("finished", flush=True)
"""


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_gloo_script_ends_200_times_of_200_on_a_busy_machine(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FINISHES)
    words = ["--script", "train.py", "--num-gpus", "2", "--device", "cpu", "max_restarts=0"]
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        for number in range(200):
            done = cli(tmp_path, "train", *words, "--", "leaves" if number % 2 else "destroys", OMP_NUM_THREADS="1")
            assert (done.returncode, done.stdout.count("finished")) == (0, 2), (number, done.stdout, done.stderr)
    finally:
        for process in busy:
            process.kill()
            process.wait()
