"""How fast a user's own training is with N ranks, against its run with one: the same script and settings, interleaved.

Each turn is `distributed train` as the user would type it, in a run directory that is gone afterwards, and ends after
so many steps. The rates are those of its events, which leave out evaluations; the first steps, in which things are
compiled, do not count.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from distributed.bench.machine import load_average
from distributed.bench.processes import ended_by_signals, kill_all
from distributed.bench.script.results import ScriptThroughput, ScriptTurn, summarize_turns
from distributed.core.choices import Device
from distributed.core.env import inherited_environ
from distributed.core.errors import ConfigError, LaunchError, Problem, RankFailedError
from distributed.core.plan import Plan
from distributed.core.run_dir import RunDir
from distributed.core.secrets import mask_arguments
from distributed.planner.hardware import probe_hardware

STEPS = 50
_WARM = {"cuda": 20, "cpu": 10}
_LOG_EVERY = 10  # at most: steps for which the ranks wait for their device, to log them
_MANY_EPOCHS = 10**6  # the number of steps ends a turn
_FOLDER = ("each turn has a folder of its own, which is gone afterwards", "")
_OURS = {  # settings that a turn needs for itself: why, and what is there in their place
    "num_gpus": ("one rank is compared with several", "--processes N"),
    "gpus_per_node": ("one rank is compared with several", "--processes N"),
    "num_nodes": ("one machine is measured", ""),
    "max_steps": ("all turns have as many steps", "--steps N"),
    "epochs": ("all turns have as many steps", "--steps N"),
    "log_every_n_steps": ("the benchmark reads what is logged", ""),
    "progress": ("the benchmark has a display of its own", ""),
    "run_dir": _FOLDER,
    "checkpoint_dir": _FOLDER,
    "resume_from_checkpoint": ("each turn begins with the first step", ""),
}
_TAIL_LINES = 15  # of what a run said, in an error

Notify = Callable[[str, int, int], None]


@dataclass(frozen=True)
class ScriptRequest:
    """What the command line asks for."""

    script: str
    processes: int
    settings: tuple[str, ...] = ()  # KEY=VALUE, for both numbers of ranks
    arguments: tuple[str, ...] = ()  # the script's own
    config: str | None = None  # a file of settings
    steps: int = STEPS
    rounds: int = 5
    seconds: float | None = None  # after which no round is begun


def measure_script(request: ScriptRequest, notify: Notify) -> Iterator[ScriptThroughput]:
    """After each round, all that was found until then."""
    _check(request)
    gpus, cores = len(probe_hardware().gpus), probe_hardware().cpu_cores
    device: Device = "cuda" if gpus and "device=cpu" not in request.settings else "cpu"
    warm, load_before, begun = _WARM[device], load_average(), time.monotonic()
    numbers = (1, request.processes)
    turns: dict[int, list[ScriptTurn]] = {number: [] for number in numbers}
    for round_ in range(request.rounds):
        if round_ and request.seconds is not None and time.monotonic() - begun > request.seconds:
            break
        for number in numbers if round_ % 2 == 0 else tuple(reversed(numbers)):
            done = round_ * len(numbers) + len(turns[number])
            text = f"round {round_ + 1} of {request.rounds}: {number} rank{'s' * (number > 1)}"
            notify(text, done, request.rounds * len(numbers))
            turns[number].append(_turn(request, number, warm))
        yield ScriptThroughput(
            os.path.basename(request.script),
            settings=tuple(mask_arguments(request.settings)),
            rows=summarize_turns(turns),
            steps=request.steps,
            warm=warm,
            rounds=round_ + 1,
            device=device,
            devices=gpus if device == "cuda" else cores,
            load_before=load_before,
            load_after=load_average(),
        )


def default_processes(settings: Sequence[str]) -> int:
    """Every GPU where there are several, else two CPU processes."""
    gpus = len(probe_hardware().gpus)
    if gpus == 1 and "device=cpu" not in settings:
        raise ConfigError(
            "--script on a machine with one GPU",
            why="a training with several ranks is compared with that of one",
            do="add device=cpu for CPU processes, or --processes 2 share_gpus=true to try it on the one GPU",
        )
    return gpus if gpus > 1 and "device=cpu" not in settings else 2


def _check(request: ScriptRequest) -> None:
    problems = []
    if not os.path.isfile(request.script):
        problems.append(Problem(f"--script {request.script} is not there", do="check the path"))
    if request.processes < 2:
        what = f"--processes {request.processes} with --script"
        problems.append(
            Problem(what, why="a training with several ranks is compared with one rank", do="--processes 2, or more")
        )
    for name in (word.partition("=")[0] for word in request.settings):
        if name in _OURS:
            why, do = _OURS[name]
            problems.append(Problem(f"{name} is set by the benchmark itself", why=why, do=do or "leave it out"))
    if problems:
        raise ConfigError(problems)


def _turn(request: ScriptRequest, ranks: int, warm: int) -> ScriptTurn:
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        run_dir = os.path.join(folder, "run")
        _train(_command(request, ranks, run_dir, warm), Path(folder, "output"), ranks)
        return read_turn(RunDir(run_dir), warm, warm + request.steps)


def _command(request: ScriptRequest, ranks: int, run_dir: str, warm: int) -> list[str]:
    own = {
        "max_steps": warm + request.steps,
        "epochs": _MANY_EPOCHS,
        "log_every_n_steps": next(n for n in range(_LOG_EVERY, 0, -1) if warm % n == request.steps % n == 0),
        "progress": "false",
        "checkpoint_dir": str(RunDir(run_dir).checkpoints),
        "resume_from_checkpoint": "false",
    }
    command = [sys.executable, "-m", "distributed.cli", "train", "--script", request.script, "--num-gpus", str(ranks)]
    command += ["--run-dir", run_dir, *(("--config", request.config) if request.config is not None else ())]
    command += [*request.settings, *(f"{name}={value}" for name, value in own.items())]
    return [*command, "--", *request.arguments] if request.arguments else command


def _train(command: Sequence[str], output: Path, ranks: int) -> None:
    with output.open("wb") as file, ended_by_signals():
        process = subprocess.Popen(
            command, env=inherited_environ(), stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )
        try:
            code = process.wait()
        finally:
            kill_all(process)
    if code:
        lines = output.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
        raise RankFailedError(
            f"the script failed with {ranks} rank{'s' * (ranks > 1)}, exit code {code}",
            why=lines[-1] if lines else "it said nothing",
            traceback="\n".join(lines[-_TAIL_LINES:]),
            exit_code=code,
        )


def read_turn(run: RunDir, first: int, last: int) -> ScriptTurn:
    """The rate between two steps: that of each event, by the steps that it is of."""
    steps = _logged(run)
    ends = [step for step in steps if first < step["step"] <= last]
    if not ends or ends[-1]["step"] != last or not any(step["step"] == first for step in steps):
        raise LaunchError(
            f"the run logged no step {first} and {last}",
            why="the script trains with no Trainer of this library, or ended before",
            do="see that it calls fit of a Trainer; or take fewer --steps",
        )
    before, weight, seconds = float(first), 0.0, 0.0
    for step in ends:
        count, before = step["step"] - before, step["step"]
        weight, seconds = weight + count, seconds + count / step["samples_per_second"]
    return ScriptTurn(weight / seconds, Plan.read(run.path).batch.global_batch, ends[-1]["loss"])


def _logged(run: RunDir) -> list[dict[str, float]]:
    if not run.events.exists():
        return []
    events = map(json.loads, run.events.read_text(encoding="utf-8").splitlines())
    return [event for event in events if event["event"] == "StepEnded"]
