"""What horovodrun gives a rank: its place, the address of its driver, and whether the run is elastic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from distributed.core.env import ATTEMPT, NOMINAL, RESTARTS, WorkerEnv, announce, inherited_environ, take_out

_PLACE = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")  # in the order of a driver's answer
_ELASTIC = "HOROVOD_ELASTIC"
FUSION_THRESHOLD, CYCLE_TIME = "HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME"


def read_env(environ: Mapping[str, str]) -> WorkerEnv:
    """This rank's place. Rank 0 publishes the rendezvous through horovodrun's driver (`world.py`)."""
    return WorkerEnv(
        rank=int(environ["HOROVOD_RANK"]),
        local_rank=int(environ["HOROVOD_LOCAL_RANK"]),
        world_size=int(environ["HOROVOD_SIZE"]),
        local_world_size=int(environ["HOROVOD_LOCAL_SIZE"]),
        node_rank=int(environ["HOROVOD_CROSS_RANK"]),
        num_nodes=int(environ["HOROVOD_CROSS_SIZE"]),
        launcher="horovodrun",
        attempt=int(environ.get(ATTEMPT, "0")),
        restarts=int(environ.get(RESTARTS, "0")),
        nominal_ranks=int(environ.get(NOMINAL, "0")),
    )


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
    env = inherited_environ() if environ is None else environ
    slot = f"{env.get('HOROVOD_HOSTNAME', 'localhost')}:{env.get('HOROVOD_LOCAL_RANK', '0')}"
    return DriverAddress(env["HOROVOD_GLOO_RENDEZVOUS_ADDR"], int(env["HOROVOD_GLOO_RENDEZVOUS_PORT"]), slot)


def take_out_elastic() -> bool:
    """Whether horovodrun gives this process another place when the world changes.

    Taken out: Horovod itself would request that place each time that it is initialised, and a place that is requested
    for twice is one in the world after the next.
    """
    return take_out(_ELASTIC) not in ("", "0")


def knobs_in_environ() -> dict[str, str]:
    """Variables for Horovod that settings must not contradict: horovodrun has options for them."""
    environ = inherited_environ()
    return {name: environ[name] for name in (FUSION_THRESHOLD, CYCLE_TIME) if name in environ}


def fusion_threshold_mb(environ: Mapping[str, str] | None = None) -> float | None:
    """Up to what size gradients go together, by horovodrun's --fusion-threshold-mb.

    >>> fusion_threshold_mb({"HOROVOD_FUSION_THRESHOLD": "1048576"})
    1.0
    """
    text = (inherited_environ() if environ is None else environ).get(FUSION_THRESHOLD, "")
    return int(text) / 2**20 if text.isdecimal() else None


def rendezvous_timeout_s() -> float:
    """For how long the ranks of a later world wait for each other: horovodrun's --gloo-timeout-seconds."""
    return float(inherited_environ().get("HOROVOD_GLOO_TIMEOUT_SECONDS") or 60)


def take_place(answer: str, attempt: int) -> bool:
    """Write the place that the driver gives this process where Horovod and `worker_env` look; False: it has none.

    >>> parse_place("1,2,0,1,1,2")["HOROVOD_RANK"]
    '1'
    """
    place = parse_place(answer)
    if int(place["HOROVOD_RANK"]) < 0:
        return False
    announce(place | {ATTEMPT: str(attempt), RESTARTS: str(attempt)})
    return True


def parse_place(answer: str) -> dict[str, str]:
    values = [str(int(word)) for word in answer.split(",")]
    return {f"HOROVOD_{name}": value for name, value in zip(_PLACE, values, strict=True)}


def remember_world(env: WorkerEnv) -> None:
    """What rank 0 published of the run, for the worlds after this one."""
    announce({ATTEMPT: str(env.attempt), RESTARTS: str(env.restarts), NOMINAL: str(env.nominal_ranks)})
