"""TCP ports of this machine: whether a port is in use, and a free port."""

from __future__ import annotations

import errno
import random
import socket

# Below the kernel's range for outgoing connections, so no other process is assigned one of these.
LOWEST_PORT, PORTS = 20000, 12768


def port_in_use(port: int) -> bool:
    """Whether something listens on the port, on any address of this machine."""
    families = [(socket.AF_INET, "0.0.0.0")] + [(socket.AF_INET6, "::")] * socket.has_ipv6
    return any(_taken(family, address, port) for family, address in families)


def _taken(family: socket.AddressFamily, address: str, port: int) -> bool:
    try:
        probe = socket.socket(family, socket.SOCK_STREAM)
    except OSError:  # the kernel has no such family
        return False
    with probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # an ended run's port in TIME_WAIT is free
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            return error.errno != errno.EADDRNOTAVAIL  # the address family exists, but has no address
    return False


def free_port(numbers: random.Random | None = None) -> int:
    """A port that nothing listens on now."""
    numbers = numbers or random.SystemRandom()
    for _ in range(1000):
        port = LOWEST_PORT + numbers.randrange(PORTS)
        if not port_in_use(port):
            return port
    raise OSError(f"no free port between {LOWEST_PORT} and {LOWEST_PORT + PORTS - 1}")
