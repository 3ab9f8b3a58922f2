"""Ranks on hosts of their own on one machine, whose links to each other have the rate that is asked for."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from distributed.chaos.hosts import Host, Hosts

_LINK = "eth0"  # of each host
_WAIT_S = 3600


def shape(host: Host, mbit_s: float) -> None:
    """Limit what the host sends. The kernel's own traffic control, from iproute2."""
    rate = ["rate", f"{mbit_s:g}mbit", "burst", "512kb", "latency", "50ms"]
    subprocess.run(host.command(["tc", "qdisc", "add", "dev", _LINK, "root", "tbf", *rate]), check=True)


def run_on_hosts(script: Path, arguments: Sequence[str], *, hosts: int, ranks_per_host: int, mbit_s: float) -> None:
    """The script once for each rank; raises where one of them fails."""
    with Hosts(hosts) as made:
        for number in range(hosts):
            shape(made[number], mbit_s)
        processes = []
        port = _free_port()
        for rank in range(hosts * ranks_per_host):
            host, place = divmod(rank, ranks_per_host)
            world = {
                "RANK": rank,
                "WORLD_SIZE": hosts * ranks_per_host,
                "LOCAL_RANK": place,
                "LOCAL_WORLD_SIZE": ranks_per_host,
                "GROUP_RANK": host,
                "MASTER_ADDR": made[0].address,
                "MASTER_PORT": port,
                "GLOO_SOCKET_IFNAME": _LINK,
                "OMP_NUM_THREADS": 1,
            }
            environ = os.environ | {name: str(value) for name, value in world.items()}
            command = made[host].command([sys.executable, str(script), "--rank", *arguments])
            processes.append(subprocess.Popen(command, env=environ))
        try:
            codes = [process.wait(_WAIT_S) for process in processes]
        finally:
            for process in processes:
                process.kill()
    if any(codes):
        raise SystemExit(f"ranks ended with {codes}")


def _free_port() -> int:
    """Here, which is very likely one that is free on the hosts too: nothing runs there."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
