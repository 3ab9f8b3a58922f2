"""distributed doctor: what this machine and environment can do, what is missing, and what is broken."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib import metadata
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

import distributed
from distributed.cli.doctor_network import Finding, show_network
from distributed.core.choices import FindingState
from distributed.core.engines.engine import ENGINES, matrix
from distributed.core.env import inherited_environ
from distributed.core.registry import DISTRIBUTION, is_installed
from distributed.launch.ports import free_port
from distributed.planner.hardware import Hardware, probe_hardware
from distributed.planner.network.probe import probe_network
from distributed.planner.network.proposals import SMALL_SHM_BYTES

_OLDEST_TORCH = (2, 11)
_ALIKE = {"tensorflow": ("tensorflow-cpu",)}  # distributions that bring the same module

# In a process of its own: a broken torch may abort rather than raise.
_ASK_TORCH = """
import json, torch, torch.distributed as dist
print(json.dumps({
    "version": torch.__version__, "cuda_build": torch.version.cuda, "cuda": torch.cuda.is_available(),
    "nccl": dist.is_nccl_available(), "gloo": dist.is_gloo_available(), "mpi": dist.is_mpi_available(),
    "nccl_version": ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "",
}))
"""


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
    network: Annotated[
        bool, typer.Option("--network", help="What connects this machine to others, and variables for it, instead.")
    ] = False,
) -> None:
    """Report devices, versions, backends, what is missing for each extra, and clashes.

    The exit code is 1 if something is broken, and else 0.

    \b
    Example:
      distributed doctor
      distributed doctor --json
      distributed doctor --network
    """
    if network:
        show_network(probe_network(probe_hardware()), inherited_environ(), as_json=as_json, console=_console())
        return
    findings = [*_software(), *_machine(probe_hardware()), *_network(), *_extras(), *_engines()]
    broken = [finding for finding in findings if finding.state == "broken"]
    if as_json:
        found = {"findings": [asdict(finding) for finding in findings], "engines": dict(matrix())}
        print(json.dumps({"ok": not broken} | found, indent=2))
    else:
        _print(findings, len(broken))
    raise typer.Exit(1 if broken else 0)


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False)


def _print(findings: list[Finding], broken: int) -> None:
    console = _console()
    table = Table(box=None, show_header=False, pad_edge=False)
    styles = {"ok": "green", "missing": "yellow", "broken": "bold red"}
    for finding in findings:
        advice = f"{finding.value}\ndo: {finding.do}" if finding.do else finding.value
        table.add_row(
            finding.state, finding.name, advice, style=None if finding.state == "ok" else styles[finding.state]
        )
    console.print(table)
    console.print(_matrix())
    console.print(f"{broken} broken" if broken else "ready to train", style=styles["broken" if broken else "ok"])


def _software() -> Iterator[Finding]:
    yield Finding("python", f"{platform.python_version()} ({sys.executable})")
    yield Finding("platform", platform.platform())
    yield Finding(DISTRIBUTION, f"{distributed.__version__} ({os.path.dirname(distributed.__file__)})")
    clash = distributed.dask_clash()
    yield Finding("import name", clash or "distributed is ours alone", "broken" if clash else "ok")
    yield from _torch()


def _torch() -> Iterator[Finding]:
    facts, error = _ask_torch()
    if not facts:
        reinstall = f'pip install --force-reinstall "torch>={_OLDEST_TORCH[0]}.{_OLDEST_TORCH[1]}"'
        yield Finding("torch", f"cannot be imported: {error}", "broken", reinstall)
        return
    version = tuple(int(part) for part in re.findall(r"\d+", facts["version"])[:2])
    needed = ".".join(map(str, _OLDEST_TORCH))
    too_old = version < _OLDEST_TORCH
    yield Finding(
        "torch",
        f"{facts['version']}, built for {'CUDA ' + facts['cuda_build'] if facts['cuda_build'] else 'the CPU'}"
        + (f"; older than {needed}" if too_old else ""),
        "broken" if too_old else "ok",
        f'pip install "torch>={needed}"' if too_old else "",
    )
    yield Finding("CUDA", "works" if facts["cuda"] else "not available: ranks are CPU processes")
    yield Finding("backend gloo", "available" if facts["gloo"] else "not in this build of torch", _state(facts["gloo"]))
    nccl = f"available ({facts['nccl_version']})" if facts["nccl"] else "not in this build of torch; CUDA ranks need it"
    yield Finding("backend nccl", nccl, _state(facts["nccl"]))
    mpi = "available" if facts["mpi"] else "not in this build of torch, as in all wheels; gloo works under mpirun"
    yield Finding("backend mpi", mpi, _state(facts["mpi"]))


def _ask_torch() -> tuple[dict[str, Any], str]:
    asked = subprocess.run([sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, check=False)
    if asked.returncode != 0:
        return {}, (asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"])[-1]
    facts: dict[str, Any] = json.loads(asked.stdout.strip().splitlines()[-1])
    return facts, ""


def _state(available: bool) -> FindingState:
    return "ok" if available else "missing"


def _machine(hardware: Hardware) -> Iterator[Finding]:
    yield Finding("CPU cores", str(hardware.cpu_cores))
    yield Finding("memory", f"{hardware.memory_bytes / 2**30:.1f} GiB")
    if not hardware.gpus:
        yield Finding("GPUs", "none that nvidia-smi shows")
    for index, gpu in enumerate(hardware.gpus):
        capability = f", compute capability {gpu.compute_capability}" if gpu.compute_capability else ""
        yield Finding(f"GPU {index}", f"{gpu.name}, {gpu.memory_bytes / 2**30:.0f} GiB{capability}")
    if hardware.gpus:
        more = f"more than {len(hardware.gpus)} rank{'s' * (len(hardware.gpus) > 1)} can be tried with --share-gpus"
        yield Finding("sharing GPUs", f"{more}: several on each, not for speed")
    if os.path.isdir("/dev/shm"):
        size = shutil.disk_usage("/dev/shm").total
        small = size < SMALL_SHM_BYTES
        yield Finding(
            "/dev/shm",
            f"{size / 2**30:.2f} GiB" + ("; data loader workers may not fit" if small else ""),
            "missing" if small else "ok",
            "give the container more: docker run --shm-size=2g …" if small else "",
        )
    writable = os.access(".", os.W_OK)
    yield Finding(
        "runs directory",
        f"{os.path.abspath('runs')} {'can' if writable else 'cannot'} be written",
        "ok" if writable else "missing",
        "" if writable else "set run_dir to a directory that can be written",
    )


def _network() -> Iterator[Finding]:
    try:
        port = free_port()
        with socket.create_server(("127.0.0.1", port)) as server, socket.create_connection(("127.0.0.1", port), 5):
            server.accept()[0].close()
        yield Finding("loopback", f"works; port {port} is free")
    except OSError as error:
        yield Finding(
            "loopback",
            f"ranks on this machine cannot connect to each other: {error}",
            "broken",
            "check the firewall on 127.0.0.1",
        )
    name = socket.gethostname()
    try:
        yield Finding("host name", f"{name} is {socket.gethostbyname(name)}")
    except OSError as error:
        yield Finding("host name", f"{name} has no address: {error}", "missing", f"add {name} to /etc/hosts")


def _extras() -> Iterator[Finding]:
    """Each extra of the package: what it needs and has not got."""
    try:
        package = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        yield Finding("extras", f"{DISTRIBUTION} is not installed as a package", "missing", "pip install -e .")
        return
    for extra in package.metadata.get_all("Provides-Extra") or []:
        needs = [name for line in package.requires or [] if (name := _needed_by(line, extra))]
        missing = [name for name in needs if not _installed(name)]
        yield Finding(
            f"extra {extra}",
            f"needs {', '.join(missing)}" if missing else "installed",
            "missing" if missing else "ok",
            f'pip install "{DISTRIBUTION}[{extra}]"' if missing else "",
        )


def _engines() -> Iterator[Finding]:
    needed = {name: engine for name, engine in ENGINES.entries.items() if engine.needs}
    with ThreadPoolExecutor() as pool:  # each takes seconds to import
        errors = pool.map(lambda engine: _cannot_load(engine.needs), needed.values())
    for (name, engine), error in zip(needed.items(), errors, strict=True):
        yield Finding(f"engine {name}", error or engine.does, _state(not error), engine.brought_by if error else "")


def _cannot_load(module: str) -> str:
    """Why not: a library that was built for another torch is found, and breaks when it is imported."""
    if not is_installed(module):
        return "not installed"
    environ = inherited_environ() | {"DS_ACCELERATOR": "cpu"}
    asked = subprocess.run([sys.executable, "-c", f"import {module}"], env=environ, capture_output=True, text=True)
    if asked.returncode == 0:
        return ""
    return f"does not load: {(asked.stderr.strip().splitlines() or [f'exit code {asked.returncode}'])[-1]}"


def _matrix() -> Table:
    """What each engine can do."""
    table = Table(box=None, pad_edge=False, header_style="bold", title="What the engines can do", title_justify="left")
    table.add_column("")
    for name in ENGINES.entries:
        table.add_column(name)
    for title, words in matrix():
        table.add_row(title, *(words[name] or "–" for name in ENGINES.entries))
    return table


def _needed_by(requirement: str, extra: str) -> str:
    """The distribution that a line of the metadata requires for an extra.

    >>> _needed_by('mlflow>=3; extra == "mlflow"', "mlflow"), _needed_by("torch>=2.11", "mlflow")
    ('mlflow', '')
    """
    what, _, marker = requirement.partition(";")
    found = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", marker)
    name = re.match(r"[A-Za-z0-9._-]+", what.strip())
    return name.group() if name and found and found.group(1) == extra else ""


def _installed(name: str) -> bool:
    """Whether a distribution, or another that brings the same module, is here."""
    for distribution in (name, *_ALIKE.get(name, ())):
        with contextlib.suppress(metadata.PackageNotFoundError):
            metadata.version(distribution)
            return True
    return False
