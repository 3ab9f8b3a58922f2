"""RDMA between two nodes, by perftest's own ib_write_bw: one node serves, the other writes to its memory."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from distributed.core.errors import LaunchError
from distributed.launch.ports import free_port
from distributed.planner.network.machine import RdmaPort

TOOL = "ib_write_bw"


def measurable(ports: tuple[RdmaPort, ...]) -> str:
    """The port to measure, as device/port: the fastest that ib_write_bw can use. EFA is none of them."""
    if shutil.which(TOOL) is None:
        return ""
    fitting = [port for port in ports if port.layer in ("InfiniBand", "Ethernet")]
    best = max(fitting, key=lambda port: port.rate_gbit, default=None)
    return f"{best.device}/{best.port}" if best is not None else ""


def _command(rdma: str, port: int, seconds: float) -> list[str]:
    device, _, number = rdma.partition("/")
    how = ["-F", "--report_gbits", "-D", str(max(1, round(seconds)))]
    return [TOOL, "-d", device, "-i", number, "-p", str(port), *how]


@contextmanager
def serving(rdma: str, seconds: float) -> Iterator[int]:
    """The port at which ib_write_bw waits for its other side, on the node that is written to."""
    port = free_port()
    server = subprocess.Popen(_command(rdma, port, seconds), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield port
    finally:
        server.terminate()
        server.wait()


def write_to(rdma: str, address: str, port: int, seconds: float) -> float:
    """Gbit/s that the other node's ib_write_bw got."""
    command, limit_s = [*_command(rdma, port, seconds), address], 30 + 2 * seconds
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{TOOL} found no rate", why=f"it did not end within {limit_s:g} s") from None
    rate = parse_rate(done.stdout)
    if rate is None:
        lines = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
        raise LaunchError(f"{TOOL} found no rate", why=lines[-1])
    return rate


def parse_rate(text: str) -> float | None:
    """The average of what ib_write_bw prints, in Gbit/s; None: it has come to none.

    >>> parse_rate(''' #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
    ...  65536      1875000        0.00               196.59             0.374967''')
    196.59
    """
    row = re.search(r"BW average\[Gb/sec\].*\n\s*\d+\s+\d+\s+[\d.]+\s+([\d.]+)", text)
    return float(row.group(1)) if row else None
