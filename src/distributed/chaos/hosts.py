"""Hosts on one machine: network namespaces with addresses and names of their own, whose links can be cut and healed.

Linux, root and iproute2 are needed; `available` says what is missing.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

_NETNS = Path("/etc/netns")  # where `ip netns exec` finds a namespace's own /etc/hosts
_OURS = re.compile(r"dh(\d+)x\d+[bnv]\d*")  # the process that made it is part of every name
_AS_HOST = 'echo "$0" > /proc/sys/kernel/hostname; exec "$@"'


@dataclass(frozen=True)
class Host:
    """One of the hosts."""

    name: str
    address: str
    namespace: str

    def command(self, argv: Sequence[str]) -> list[str]:
        """The command that runs `argv` on this host, as the same process."""
        return [_ip(), "netns", "exec", self.namespace, "unshare", "-u", "sh", "-c", _AS_HOST, self.name, *argv]


class Hosts:
    """That many hosts on one network, named h0, h1 and so on; this machine is on it too.

    Leaving the context ends what runs on them and removes them::

        with Hosts(2) as hosts:
            server = subprocess.Popen(hosts[0].command(["python", "-m", "http.server"]))
            hosts.cut(1)
    """

    def __init__(self, count: int, numbers: random.Random | None = None) -> None:
        self._count = count
        self._numbers = numbers or random.SystemRandom()
        self._tag = ""
        self._hosts: list[Host] = []

    @staticmethod
    def available() -> str | None:
        """Why there can be no hosts here; None when there can."""
        if not sys.platform.startswith("linux"):
            return "network namespaces are Linux's"
        if os.geteuid() != 0:
            return "network namespaces need root"
        if not _ip() or not shutil.which("unshare"):
            return "ip and unshare are needed: apt-get install iproute2 util-linux"
        # In a namespace of its own, so that nothing is left of it.
        probe = _run("unshare", "-n", _ip(), "link", "add", "dhprobe", "type", "bridge", check=False)
        return None if probe.returncode == 0 else f"no bridge can be made here: {probe.stderr.strip()}"

    def __len__(self) -> int:
        return len(self._hosts)

    def __getitem__(self, number: int) -> Host:
        return self._hosts[number]

    def __enter__(self) -> Hosts:
        network = self._unused_network()
        taken = {_tag(name) for name in _all_names()}
        # Names of links have at most 15 characters.
        self._tag = next(tag for tag in (f"dh{os.getpid()}x{number}" for number in range(100)) if tag not in taken)
        try:
            bridge = f"{self._tag}b"
            _run(_ip(), "link", "add", bridge, "type", "bridge")
            _run(_ip(), "addr", "add", f"{network}.254/24", "dev", bridge)
            _run(_ip(), "link", "set", bridge, "up")
            for number in range(self._count):
                host = Host(f"h{number}", f"{network}.{number + 1}", f"{self._tag}n{number}")
                self._hosts.append(host)
                self._make(host, self._link(number), bridge)
            names = "".join(f"{host.address} {host.name}\n" for host in self._hosts)
            for host in self._hosts:
                (_NETNS / host.namespace).mkdir(parents=True)
                (_NETNS / host.namespace / "hosts").write_text(f"127.0.0.1 localhost\n{names}", encoding="utf-8")
        except BaseException:
            _remove(self._tag)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _remove(self._tag)

    def cut(self, number: int) -> None:
        """Take the host off the network without a message: its connections fall silent."""
        _run(_ip(), "link", "set", self._link(number), "down")

    def heal(self, number: int) -> None:
        _run(_ip(), "link", "set", self._link(number), "up")

    def _link(self, number: int) -> str:
        return f"{self._tag}v{number}"

    def _make(self, host: Host, link: str, bridge: str) -> None:
        inside = [_ip(), "-n", host.namespace]
        _run(_ip(), "netns", "add", host.namespace)
        _run(_ip(), "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
        _run(_ip(), "link", "set", link, "master", bridge, "up")
        _run(*inside, "addr", "add", f"{host.address}/24", "dev", "eth0")
        _run(*inside, "link", "set", "eth0", "up")
        _run(*inside, "link", "set", "lo", "up")

    def _unused_network(self) -> str:
        """The first three numbers of a network that this machine has no address in and no route to."""
        known = _run(_ip(), "-4", "-o", "addr").stdout + _run(_ip(), "-4", "route").stdout
        while True:
            network = f"10.{self._numbers.randint(0, 255)}.{self._numbers.randint(0, 255)}"
            if f" {network}." not in f" {known}":
                return network


def remove_leftovers() -> list[str]:
    """Remove the hosts of processes that were killed before they could; the names of what was removed."""
    names = {name for name in _all_names() if not Path("/proc", name[2:].partition("x")[0]).exists()}
    for tag in {_tag(name) for name in names}:
        _remove(tag)
    return sorted(names)


def _all_names() -> list[str]:
    """Links, namespaces and folders that this file made, in any process."""
    links = [entry.name for entry in Path("/sys/class/net").iterdir()]
    namespaces = [line.split()[0] for line in _run(_ip(), "netns", "list").stdout.splitlines() if line.strip()]
    folders = [entry.name for entry in _NETNS.iterdir()] if _NETNS.is_dir() else []
    return [name for name in [*links, *namespaces, *folders] if _OURS.fullmatch(name)]


def _tag(name: str) -> str:
    """
    >>> _tag("dh4194304x0v12"), _tag("dh7x12b")
    ('dh4194304x0', 'dh7x12')
    """
    return name.rstrip("0123456789")[:-1]


def _remove(tag: str) -> None:
    """Remove all that has this tag; ends the processes in its namespaces."""
    names = {name for name in _all_names() if _tag(name) == tag}
    for name in sorted(names):
        if name.startswith(f"{tag}n"):
            for process in _run(_ip(), "netns", "pids", name, check=False).stdout.split():
                with suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)
            _run(_ip(), "netns", "del", name, check=False)
            shutil.rmtree(_NETNS / name, ignore_errors=True)
        else:
            _run(_ip(), "link", "del", name, check=False)
    with suppress(OSError):  # not empty, or never made: it is the system's
        _NETNS.rmdir()


def _ip() -> str:
    return shutil.which("ip") or shutil.which("ip", path="/usr/sbin:/sbin") or ""


def _run(*argv: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(argv, capture_output=True, text=True)
    if check and done.returncode != 0:
        raise OSError(f"{' '.join(argv)}: {done.stderr.strip()}")
    return done
