"""How GPUs and network cards are joined, as `nvidia-smi topo -m` prints it, and GPUDirect's modules."""

from __future__ import annotations

import re
from pathlib import Path

from distributed.planner.network.machine import GpuTopology
from distributed.planner.network.system_file import text_of

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_PATH = re.compile(r"X|NV\d+|PIX|PXB|PXN|PHB|NODE|SYS")
_DMABUF_SINCE = (5, 12)  # of Linux


def parse_topology(text: str) -> GpuTopology:
    """What `nvidia-smi topo -m` prints. Network cards are NIC0, NIC1 … with a legend, or stand there by their names.

    >>> found = parse_topology('''        GPU0    GPU1    NIC0    CPU Affinity
    ... GPU0     X      NV4     PHB     0-63
    ... GPU1    NV4      X      SYS     64-127
    ... NIC0    PHB     SYS      X
    ...
    ... NIC Legend:
    ...
    ...   NIC0: mlx5_0''')
    >>> found.between_gpus(), found.cards, found.nearest_card("GPU1")
    (('NV4',), ('mlx5_0',), 'SYS')
    """
    lines = _COLOURS.sub("", text).splitlines()
    head = next((number for number, line in enumerate(lines) if re.match(r"\s*GPU0\b", line)), None)
    if head is None:
        return GpuTopology()
    columns = re.match(r"\s*((?:[A-Za-z]+\w*\d+\s+|[A-Za-z]+\w*\d+$)*)", lines[head])
    names = columns.group(1).split() if columns else []
    called = dict(re.findall(r"(?m)^\s*(NIC\d+):\s*(\S+)", "\n".join(lines)))
    paths: dict[tuple[str, str], str] = {}
    for line in lines[head + 1 :]:
        row, *cells = line.split() or [""]
        if row in names and row.startswith("GPU"):
            for column, path in zip(names, cells, strict=False):
                if column != row and _PATH.fullmatch(path):
                    paths[row, called.get(column, column)] = path
    gpus = tuple(name for name in names if name.startswith("GPU"))
    return GpuTopology(paths, gpus, tuple(called.get(name, name) for name in names if not name.startswith("GPU")))


def find_gpu_direct(modules: str, driver: str, release: str) -> str:
    """What lets network cards read GPU memory: by /proc/modules, /proc/driver/nvidia/version and the kernel's release.

    >>> find_gpu_direct("nvidia_peermem 16384 0 - Live", "", "5.4.0")
    'nvidia_peermem'
    >>> find_gpu_direct("", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54", "6.1.0-13-amd64")
    'dmabuf'
    """
    loaded = {line.split()[0] for line in modules.splitlines() if line.strip()}
    for module in ("nvidia_peermem", "nv_peer_mem"):
        if module in loaded:
            return module
    version = tuple(int(part) for part in re.findall(r"\d+", release)[:2])
    return "dmabuf" if "Open Kernel Module" in driver and version >= _DMABUF_SINCE else ""


def read_gpu_direct(release: str, proc: Path = Path("/proc")) -> str:
    return find_gpu_direct(text_of(proc / "modules"), text_of(proc / "driver" / "nvidia" / "version"), release)
