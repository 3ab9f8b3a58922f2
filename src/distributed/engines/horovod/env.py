"""What horovodrun tells a rank beside its place: where its driver is, and whether the world may change under way."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from distributed.core.env import ATTEMPT, NOMINAL, RESTARTS, WorkerEnv

_PLACE = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")  # in the order of a driver's answer
_ELASTIC = "HOROVOD_ELASTIC"
FUSION_THRESHOLD, CYCLE_TIME = "HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME"


@dataclass(frozen=True)
class DriverAddress:
    """Where horovodrun answers, and by which name it knows this process."""

    host: str
    port: int
    slot: str  # host and local rank

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def horovod_driver(environ: Mapping[str, str] | None = None) -> DriverAddress:
    """Of a process that horovodrun started.

    >>> print(horovod_driver({"HOROVOD_GLOO_RENDEZVOUS_ADDR": "n1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "4242"}))
    n1:4242
    """
    env = os.environ if environ is None else environ
    slot = f"{env.get('HOROVOD_HOSTNAME', 'localhost')}:{env.get('HOROVOD_LOCAL_RANK', '0')}"
    return DriverAddress(env["HOROVOD_GLOO_RENDEZVOUS_ADDR"], int(env["HOROVOD_GLOO_RENDEZVOUS_PORT"]), slot)


def take_out_elastic() -> bool:
    """Whether horovodrun gives this process another place when the world changes.

    Taken out: Horovod itself would ask for that place each time that it is initialised anew, and a place that is asked
    for twice is one in the world after the next.
    """
    return os.environ.pop(_ELASTIC, "") not in ("", "0")


def knobs_in_environ() -> dict[str, str]:
    """What Horovod finds in the environment that it cannot be told twice: horovodrun has options for it."""
    return {name: os.environ[name] for name in (FUSION_THRESHOLD, CYCLE_TIME) if name in os.environ}


def fusion_threshold_mb(environ: Mapping[str, str] | None = None) -> float | None:
    """Up to what size gradients go together, by horovodrun's --fusion-threshold-mb.

    >>> fusion_threshold_mb({"HOROVOD_FUSION_THRESHOLD": "1048576"})
    1.0
    """
    text = (os.environ if environ is None else environ).get(FUSION_THRESHOLD, "")
    return int(text) / 2**20 if text.isdecimal() else None


def meeting_patience_s() -> float:
    """For how long the ranks of a later world wait for each other: horovodrun's --gloo-timeout-seconds."""
    return float(os.environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS") or 60)


def take_place(answer: str, attempt: int) -> bool:
    """Write the place that the driver gives this process where Horovod and `worker_env` look; False: it has none.

    >>> parse_place("1,2,0,1,1,2")["HOROVOD_RANK"]
    '1'
    """
    place = parse_place(answer)
    if int(place["HOROVOD_RANK"]) < 0:
        return False
    os.environ.update(place | {ATTEMPT: str(attempt), RESTARTS: str(attempt)})
    return True


def parse_place(answer: str) -> dict[str, str]:
    values = [str(int(word)) for word in answer.split(",")]
    return {f"HOROVOD_{name}": value for name, value in zip(_PLACE, values, strict=True)}


def remember_world(env: WorkerEnv) -> None:
    """What rank 0 told of the run, for the worlds that come after this one."""
    os.environ.update({ATTEMPT: str(env.attempt), RESTARTS: str(env.restarts), NOMINAL: str(env.nominal_ranks)})
