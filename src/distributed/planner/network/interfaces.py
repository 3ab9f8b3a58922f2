"""Network interfaces, as /sys/class/net and the system's calls tell them."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from distributed.planner.network.machine import InterfaceKind, NetworkInterface
from distributed.planner.network.system_file import text_of

_OF_DOCKER = re.compile(r"docker\d+|docker_gwbridge|br-[0-9a-f]{12}")
_LOOPBACK, _INFINIBAND, _ETHERNET = "772", "32", "1"  # ARPHRD_…, in the file `type`


def read_interfaces(
    sys_root: Path = Path("/sys"), addresses: Mapping[str, Sequence[str]] | None = None
) -> tuple[NetworkInterface, ...]:
    """All of this machine, or of this container's own network. `addresses`: by name; by default the system's."""
    given = _addresses() if addresses is None else addresses
    folder = sys_root / "class" / "net"
    if not folder.is_dir():  # another system than Linux
        return _portable(given)
    names = sorted(entry.name for entry in folder.iterdir() if (entry / "type").exists())
    return tuple(_interface(folder / name, tuple(given.get(name, ()))) for name in names)


def interface_towards(host: str, port: int, interfaces: Sequence[NetworkInterface]) -> str:
    """The interface on the way to a host; that of the default route where the host is this machine's loopback.

    Nothing is sent: a datagram socket only looks up the route.
    """
    for target in ((host, port), ("192.0.2.1", 9), ("2001:db8::1", 9)):  # addresses that are nobody's
        source = _source_address(*target) if target[0] else ""
        for interface in interfaces:
            if interface.kind != "loopback" and source in interface.addresses:
                return interface.name
    return ""


def _source_address(host: str, port: int) -> str:
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:  # no route, or no such name: the launch says so
        return ""


def _addresses() -> dict[str, list[str]]:
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [each.address.partition("%")[0] for each in found if each.family in families]
        for name, found in psutil.net_if_addrs().items()
    }


def _interface(folder: Path, addresses: tuple[str, ...]) -> NetworkInterface:
    speed = text_of(folder / "speed")  # fails, or is -1, where the link is down or virtual
    return NetworkInterface(
        folder.name,
        kind=_kind(folder),
        # The loopback's is "unknown"; bit 0 of the flags is IFF_UP.
        is_up=text_of(folder / "operstate") in ("up", "unknown")
        and bool(int(text_of(folder / "flags") or "0x1", 16) & 1),
        addresses=addresses,
        speed_mbit=int(speed) if speed.isdecimal() else 0,
        mtu=int(text_of(folder / "mtu") or 0),
        driver=(folder / "device" / "driver").resolve().name if (folder / "device" / "driver").exists() else "",
    )


def _kind(folder: Path) -> InterfaceKind:
    hardware = text_of(folder / "type")
    if hardware == _LOOPBACK:
        return "loopback"
    if hardware == _INFINIBAND:
        return "infiniband"
    if (folder / "bridge").is_dir():
        return "docker bridge" if _OF_DOCKER.fullmatch(folder.name) else "bridge"
    if (folder / "bonding").is_dir():
        return "bond"
    if (folder / "brport").exists():
        return "bridge port"
    return "ethernet" if hardware == _ETHERNET and not (folder / "tun_flags").exists() else "tunnel"


def _portable(addresses: Mapping[str, Sequence[str]]) -> tuple[NetworkInterface, ...]:
    return tuple(
        NetworkInterface(
            name,
            kind="loopback" if name.startswith("lo") else "ethernet",
            is_up=stats.isup,
            addresses=tuple(addresses.get(name, ())),
            speed_mbit=stats.speed,
            mtu=stats.mtu,
        )
        for name, stats in psutil.net_if_stats().items()
    )
