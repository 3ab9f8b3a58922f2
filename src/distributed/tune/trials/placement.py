"""Where trials go on one machine: how many at a time, and which devices and how many threads each has."""

from __future__ import annotations

from dataclasses import dataclass

from distributed.core.choices import Device
from distributed.core.errors import Problem
from distributed.core.plan import Decision
from distributed.planner.hardware import Hardware
from distributed.tune.runner import TuneRequest


@dataclass(frozen=True)
class Placement:
    slots: int  # trials at a time
    device: Device
    threads: int  # of a trial
    gpus_per_trial: int
    trials_per_gpu: int

    def gpus(self, slot: int) -> list[int]:
        """The GPUs of a slot; trials that share one are in slots that follow each other."""
        first = slot // self.trials_per_gpu * self.gpus_per_trial
        return list(range(first, first + self.gpus_per_trial))


def place(request: TuneRequest, hardware: Hardware) -> Placement:
    slots = max(1, devices_of(request, hardware) // request.gpus_per_trial * request.trials_per_gpu)
    return Placement(
        slots,
        "cuda" if hardware.gpus else "cpu",
        max(1, hardware.cpu_cores // slots),
        request.gpus_per_trial,
        request.trials_per_gpu,
    )


def devices_of(request: TuneRequest, hardware: Hardware) -> int:
    """Devices that the trials share: all, if no number was given. Without a GPU, each is a CPU process."""
    if request.num_gpus is not None:
        return request.num_gpus
    return len(hardware.gpus) or max(hardware.cpu_cores, request.gpus_per_trial)


def decisions(request: TuneRequest, hardware: Hardware) -> list[Decision]:
    """What is chosen for trials that have a place, as for the ranks of a Trainer (planner/resources.py)."""
    found = []
    slots, cores = place(request, hardware).slots, hardware.cpu_cores
    if not hardware.gpus and request.num_gpus is not None:
        why = "this machine has no CUDA device, so 'GPU' means process"
        found.append(Decision(f"{request.num_gpus} CPU process{'es' * (request.num_gpus > 1)}", why, "num_gpus"))
    processes = slots * request.gpus_per_trial
    if processes > cores:
        settings = "num_gpus, trials_per_gpu" if request.gpus_per_trial == 1 else "num_gpus, gpus_per_trial"
        found.append(Decision("more processes than cores", f"{processes} processes share {cores} cores", settings))
    return found


def obstacles(request: TuneRequest, hardware: Hardware) -> list[Problem]:
    """Why trials do not fit on this machine."""
    problems: list[Problem] = []
    gpus, devices = len(hardware.gpus), devices_of(request, hardware)
    if gpus and devices > gpus:
        problems.append(
            Problem(
                f"num_gpus={devices}, but this machine has {gpus} GPU{'s' * (gpus > 1)}",
                why="each trial has devices of its own",
                do=f"set num_gpus={gpus}, with trials_per_gpu={-(-devices // gpus)} for as many trials at a time; "
                "or engine='ray' with the address of a cluster that has more",
            )
        )
    if request.gpus_per_trial > devices:
        problems.append(
            Problem(
                f"gpus_per_trial={request.gpus_per_trial}, but num_gpus={devices}",
                why=f"one trial needs {request.gpus_per_trial} devices",
                do=f"set gpus_per_trial={devices} or less, or more num_gpus",
            )
        )
    return problems
