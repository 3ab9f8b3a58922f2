"""probe_network: the NetworkMachine of this machine. No device is opened and nothing is sent."""

from __future__ import annotations

import glob
import os
import platform
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from distributed.planner.hardware import Hardware, capture_output
from distributed.planner.network.interfaces import interface_towards, read_interfaces
from distributed.planner.network.limits import read_limits
from distributed.planner.network.machine import NetworkMachine
from distributed.planner.network.profiles import PATTERNS
from distributed.planner.network.rdma import read_rdma
from distributed.planner.network.topology import parse_topology, read_gpu_direct


def probe_network(
    hardware: Hardware, towards: str = "", capture: Callable[[Sequence[str]], str] = capture_output
) -> NetworkMachine:
    """What is here. `towards`: the host to which the interface of the route is looked up; "": of the default route."""
    interfaces = read_interfaces()
    has_tool = bool(hardware.gpus) and shutil.which("nvidia-smi") is not None
    capabilities = [gpu.compute_capability for gpu in hardware.gpus if gpu.compute_capability]
    return NetworkMachine(
        interfaces,
        rdma=read_rdma(Path("/sys"), capture),
        opens_rdma=os.path.isdir("/dev/infiniband"),
        gpus=len(hardware.gpus),
        compute_capability=min(capabilities, default=0.0),
        topology=parse_topology(capture(["nvidia-smi", "topo", "-m"]) if has_tool else ""),
        gpu_direct=read_gpu_direct(platform.release()) if hardware.gpus else "",
        limits=read_limits(),
        route=interface_towards(towards, 9, interfaces),
        files=tuple(path for pattern in PATTERNS for path in sorted(glob.glob(pattern))),
    )
