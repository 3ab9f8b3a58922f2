"""Whether a network_profile does what it should: a few all-reduces between the nodes, before the first step."""

from __future__ import annotations

import time

import torch

from distributed.core.env import inherited_environ
from distributed.core.plan import Decision
from distributed.planner.network.interfaces import read_interfaces
from distributed.runtime.session import Session

_SMALL, _FIRST, _LARGEST = 2**10, 2**16, 2**24  # bytes of a message
_LARGE_S = 0.1  # that a call of the large one may take
_CALLS = 5
_NAME = "measuring the network"


def measure_network(session: Session) -> Decision:
    """The same on every rank: what rank 0 measured, beside the nominal speed of the slowest interface."""
    small_s, first_s = _seconds(session, _SMALL), _seconds(session, _FIRST)
    wanted = str(max(_FIRST, min(_LARGEST, int(_FIRST * _LARGE_S / first_s) // 4 * 4)))
    size = int(session.share_text(f"{_NAME}: size", wanted if session.is_main else None))
    large_s = _seconds(session, size)
    speeds = [int(text) for text in session.gather_texts(_NAME, str(_speed_here()))]
    share = 2 * (session.world_size - 1) / session.world_size  # of a message, over each link
    gbit_s = size * share * 8e-9 / large_s
    nominal = min(speeds) / 1000
    what = f"the network carries {gbit_s:.2f} Gbit/s in an all-reduce of {size / 2**20:.2g} MiB"
    why = f"measured between {session.env.num_nodes} nodes; one of 1 KiB takes {small_s * 1e6:.0f} µs"
    if nominal:
        why += f"; that is {gbit_s / nominal:.0%} of the {nominal:g} Gbit/s of the slowest interface"
        if gbit_s < nominal / 2:
            why += ", and `distributed bench network` on the nodes shows whether it is the link"
    text = session.share_text(f"{_NAME}: result", f"{what}\n{why}" if session.is_main else None)
    what, _, why = text.partition("\n")
    return Decision(what, why, "network_profile")


def _seconds(session: Session, size: int) -> float:
    """A call, after one that makes the connections."""
    message = torch.zeros(size // 4, device=session.device)
    session.sum(_NAME, message)
    session.barrier(_NAME)
    float(message[0])  # a GPU has done its part
    begun = time.perf_counter()
    for _ in range(_CALLS):
        session.sum(_NAME, message)
    float(message[0])
    return (time.perf_counter() - begun) / _CALLS


def _speed_here() -> int:
    """Mbit/s of the interface that gloo was told; 0: not known."""
    name = inherited_environ().get("GLOO_SOCKET_IFNAME", "")
    return next((one.speed_mbit for one in read_interfaces() if one.name == name), 0)
