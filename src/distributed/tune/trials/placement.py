"""Where trials go on one machine: how many at a time, and which devices and how many threads each has."""

from __future__ import annotations

from dataclasses import dataclass

from distributed.core.choices import Device
from distributed.core.errors import Problem
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
    there, _ = _devices(hardware)
    devices = request.num_gpus or there
    slots = max(1, devices // request.gpus_per_trial * request.trials_per_gpu)
    return Placement(
        slots,
        "cuda" if hardware.gpus else "cpu",
        max(1, hardware.cpu_cores // slots),
        request.gpus_per_trial,
        request.trials_per_gpu,
    )


def obstacles(request: TuneRequest, hardware: Hardware) -> list[Problem]:
    """Why trials do not fit on this machine."""
    problems: list[Problem] = []
    there, what = _devices(hardware)
    devices = request.num_gpus or there
    if devices > there:
        problems.append(
            Problem(
                f"num_gpus={devices}, but this machine has {there} {what}",
                why="without a GPU, a device is a CPU core"
                if not hardware.gpus
                else "each trial has devices of its own",
                do=f"set num_gpus={there}, or engine='ray' with the address of a cluster that has more",
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
    at_a_time = devices // request.gpus_per_trial * request.trials_per_gpu
    if request.trials_per_gpu > 1 and at_a_time > hardware.cpu_cores and devices <= there:
        most = max(1, hardware.cpu_cores // devices)
        problems.append(
            Problem(
                f"trials_per_gpu={request.trials_per_gpu} × num_gpus={devices} are {at_a_time} trials at a time, "
                f"and this machine has {hardware.cpu_cores} CPU cores",
                why="each trial needs a CPU core of its own",
                do=f"set trials_per_gpu={most}"
                + ("" if devices * most <= hardware.cpu_cores else " and less num_gpus"),
            )
        )
    return problems


def _devices(hardware: Hardware) -> tuple[int, str]:
    return (len(hardware.gpus), "GPUs") if hardware.gpus else (hardware.cpu_cores, "CPU cores and no GPU")
