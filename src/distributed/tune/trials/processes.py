"""TrialProcesses: trials of this machine, forked from a process that has imported what all of them need."""

from __future__ import annotations

import itertools
import os
import sys
from typing import Any

from distributed.core.env import TICKET, TRIAL, inherited_environ, visible_devices
from distributed.launch.node.command import rank_argv
from distributed.launch.node.preloading import ALWAYS, preloads
from distributed.launch.node.processes import RankProcess
from distributed.launch.node.warm_parent import WarmParent
from distributed.launch.request import ProcessSpec
from distributed.tune.trials.placement import Placement
from distributed.tune.trials.records import Trial

_OWN = ("distributed.tune.trials.trial",)
_TORCH = ("torch", "numpy")
_OPTIMIZER = "torch._dynamo"  # what the first optimizer of a process imports, for as long as torch itself takes
_LOOK_S = 0.02  # between two polls of processes that no warm parent reports


class TrialProcesses:
    """Starts trials. Where it cannot fork, each is a new interpreter."""

    def __init__(self, placement: Placement, folder: str, ticket: str, log_path: str, modules: tuple[str, ...]) -> None:
        """The `ticket` identifies the function in the `folder`."""
        self._placement, self._folder, self._ticket, self._log_path = placement, folder, ticket, log_path
        self._environ = _environ(placement)
        self._modules = modules
        self._warm: WarmParent | None = None
        if WarmParent.is_supported():
            self._warm = self._make()

    def _make(self) -> WarmParent:
        return WarmParent(sys.executable, self._environ, self._modules, log_path=self._log_path)

    @property
    def can_be_waited_for(self) -> bool:
        return self._warm is not None and self._warm.is_alive

    def fileno(self) -> int:
        """Readable when a trial has started or ended."""
        assert self._warm is not None
        return self._warm.fileno()

    def look_every_s(self, longest: float) -> float:
        return longest if self.can_be_waited_for else _LOOK_S

    def start(self, trial: Trial, note_path: str, slot: int) -> RankProcess:
        argv = rank_argv(sys.executable, ("-m", "distributed.tune.trials.trial", self._folder))
        log = _new_log(trial.directory)
        environ = self._environ | {TRIAL: note_path, TICKET: self._ticket} | self._devices(slot)
        spec = ProcessSpec(trial.index, argv, {}, log)
        if self._warm is None:
            return RankProcess(spec, environ)
        if not self._warm.is_alive:
            self._warm = self._make()
        return self._warm.start(spec, environ)

    def close(self) -> None:
        if self._warm is not None:
            self._warm.close()

    def _devices(self, slot: int) -> dict[str, str]:
        if self._placement.device == "cpu":
            return {"CUDA_VISIBLE_DEVICES": ""}
        visible = [name for name in (visible_devices() or "").split(",") if name]  # none: all are, by their numbers
        numbers = self._placement.gpus(slot)
        names = visible if len(visible) > max(numbers) else [str(number) for number in range(max(numbers) + 1)]
        return {"CUDA_VISIBLE_DEVICES": ",".join(names[number] for number in numbers)}


def _new_log(folder: str) -> str:
    """log.txt, then log-2.txt …: also what a search that was killed left stays."""
    names = ("log.txt" if number == 1 else f"log-{number}.txt" for number in itertools.count(1))
    return next(path for path in (os.path.join(folder, name) for name in names) if not os.path.exists(path))


def modules_for(train_fn: Any) -> tuple[str, ...]:
    """What the trials will import: torch and ours where the function may use them, and what its script imports."""
    script = getattr(train_fn, "script", None)
    source = script or getattr(getattr(train_fn, "__code__", None), "co_filename", None)
    try:
        with open(source or "", "rb") as file:
            text = file.read()
        uses_torch = b"torch" in text
        uses_trainer = b"Trainer" in text and (uses_torch or b"tensorflow" not in text.lower())
        optimizes = b"optim" in text
    except OSError:  # written in a notebook
        uses_torch, uses_trainer = "torch" in sys.modules, "distributed.trainers.trainer" in sys.modules
        optimizes = _OPTIMIZER in sys.modules
    plain = (*_TORCH, _OPTIMIZER) if optimizes else _TORCH
    wanted = ALWAYS if uses_trainer else plain if uses_torch else ()
    found = preloads(source)
    if script is not None and not found.modules:  # a function's variables are set in this process already
        return _OWN
    return (*_OWN, *wanted, *(name for name in found.modules if name not in ALWAYS))


def _environ(placement: Placement) -> dict[str, str]:
    inherited = inherited_environ()
    if "OMP_NUM_THREADS" not in inherited:
        inherited["OMP_NUM_THREADS"] = str(placement.threads)
    return inherited | {"PYTHONUNBUFFERED": "1"}
