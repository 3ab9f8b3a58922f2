"""InfiniBand, RoCE and EFA ports: from /sys/class/infiniband, else from what ibstat or ibstatus print."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from distributed.planner.network.machine import RdmaPort
from distributed.planner.network.system_file import text_of

Capture = Callable[[Sequence[str]], str]  # the output of a command; "": it is not there, or failed


def read_rdma(sys_root: Path, capture: Capture) -> tuple[RdmaPort, ...]:
    """All ports. Containers may hide /sys and have the tools, or the reverse; ibstat also knows models."""
    found = _from_sys(sys_root / "class" / "infiniband")
    told = parse_ibstat(capture(["ibstat"])) if found or not sys_root.joinpath("class", "infiniband").is_dir() else ()
    if not found:
        return told or parse_ibstatus(capture(["ibstatus"]))
    by_port = {(port.device, port.port): port for port in told}
    return tuple(_completed(port, by_port.get((port.device, port.port))) for port in found)


def _completed(port: RdmaPort, told: RdmaPort | None) -> RdmaPort:
    if told is None:
        return port
    return replace(port, model=port.model or told.model, firmware=port.firmware or told.firmware)


def _from_sys(folder: Path) -> tuple[RdmaPort, ...]:
    if not folder.is_dir():
        return ()
    ports = sorted(folder.glob("*/ports/*"), key=lambda path: (path.parts[-3], int(path.name)))
    return tuple(_port(path.parents[1], path) for path in ports)


def _port(device: Path, port: Path) -> RdmaPort:
    driver = (device / "device" / "driver").resolve().name if (device / "device" / "driver").exists() else ""
    state = text_of(port / "state").partition(":")[2].strip()  # "4: ACTIVE"
    return RdmaPort(
        device.name,
        int(port.name),
        layer="EFA" if driver == "efa" else text_of(port / "link_layer") or "InfiniBand",
        is_active=state == "ACTIVE",
        rate_gbit=_rate(text_of(port / "rate")),
        state=state.capitalize(),
        model=text_of(device / "hca_type"),
        firmware=text_of(device / "fw_ver"),
    )


def parse_ibstat(text: str) -> tuple[RdmaPort, ...]:
    """What `ibstat` prints: a block for each device, and in it one for each port.

    >>> parse_ibstat('''CA 'mlx5_0'
    ...     CA type: MT4123
    ...     Firmware version: 20.31.1014
    ...     Port 1:
    ...         State: Active
    ...         Physical state: LinkUp
    ...         Rate: 200
    ...         Link layer: InfiniBand''')[0].rate_gbit
    200.0
    """
    found: list[RdmaPort] = []
    for block in re.split(r"(?m)^CA '", text)[1:]:
        device = block.partition("'")[0]
        head, *ports = re.split(r"(?m)^\s*Port (\d+):\s*$", block)
        for number, body in zip(ports[::2], ports[1::2], strict=True):
            state = _field(body, "State")
            found.append(
                RdmaPort(
                    device,
                    int(number),
                    layer=_field(body, "Link layer") or "InfiniBand",
                    is_active=state == "Active",
                    rate_gbit=_rate(_field(body, "Rate")),
                    state=state,
                    model=_field(head, "CA type"),
                    firmware=_field(head, "Firmware version"),
                )
            )
    return tuple(found)


def parse_ibstatus(text: str) -> tuple[RdmaPort, ...]:
    """What `ibstatus` prints: a block for each port."""
    found: list[RdmaPort] = []
    for device, number, body in re.findall(
        r"(?ms)^Infiniband device '([^']+)' port (\d+) status:\n(.*?)(?=^Infiniband|\Z)", text
    ):
        state = _field(body, "state").partition(":")[2].strip()
        found.append(
            RdmaPort(
                device,
                int(number),
                layer=_field(body, "link_layer") or "InfiniBand",
                is_active=state == "ACTIVE",
                rate_gbit=_rate(_field(body, "rate")),
                state=state.capitalize(),
            )
        )
    return tuple(found)


def _field(text: str, name: str) -> str:
    found = re.search(rf"(?m)^\s*{re.escape(name)}:\s*(.*?)\s*$", text)
    return found.group(1) if found else ""


def _rate(text: str) -> float:
    """
    >>> _rate("100 Gb/sec (4X EDR)"), _rate("2.5 Gb/sec (1X SDR)"), _rate("")
    (100.0, 2.5, 0.0)
    """
    found = re.match(r"\d+(\.\d+)?", text)
    return float(found.group()) if found else 0.0
