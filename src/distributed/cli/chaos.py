"""distributed chaos: run a training under faults, and compare it with the same training undisturbed."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console

from distributed.chaos import disk
from distributed.chaos.faults import KINDS
from distributed.chaos.hosts import Hosts
from distributed.chaos.report import table
from distributed.chaos.runs import Order
from distributed.chaos.schedule import parse_span
from distributed.chaos.trial import ChaosRequest, ChaosScreen, run_trial
from distributed.cli import options as opt
from distributed.cli.settings import gather, read_file, read_words
from distributed.core.choices import ChaosKind
from distributed.core.config import DistributedConfig
from distributed.core.errors import ConfigError, PlanError, Problem
from distributed.core.registry import nearest_hint
from distributed.core.values import parse_frequency
from distributed.launch.preflight import check_script

_STEPS, _MTBF, _GPUS = 500, "15s", 2
_KEEP = 4  # checkpoints of a run
_OURS = {  # settings that are not the user's here, and the option to use
    "run_dir": "--run-dir",
    "num_nodes": "--nodes",
    "gpus_per_node": "--num-gpus",
    "master_addr": "",
    "node_rank": "",
    "checkpoint_dir": "",
    "resume_from_checkpoint": "",
}

Faults = Annotated[
    str, typer.Option(metavar="KINDS", help="Which, with commas between them: " + ", ".join(KINDS) + ".")
]
Mtbf = Annotated[
    str | None, typer.Option(metavar="TIME", help=f"Mean time between faults: 15s, 2m; {_MTBF} unless given.")
]
Kills = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Exactly N faults, spread over the steps, and no --mtbf.")
]
Steps = Annotated[int | None, typer.Option(min=1, metavar="N", help=f"Steps of either run; {_STEPS} unless given.")]
NumGpus = Annotated[int | None, typer.Option(min=1, metavar="N", help=f"Devices in all; {_GPUS} unless given.")]
Nodes = Annotated[
    int, typer.Option(min=1, metavar="N", help="Hosts to make of this machine, as network namespaces; needs root.")
]
Tolerance = Annotated[
    float | None, typer.Option(min=0.0, metavar="X", help="Difference in weights that still passes; 0 unless set.")
]
RunDirectory = Annotated[
    str | None, typer.Option(metavar="DIR", help="Where both runs go; runs/chaos-<time> unless given.")
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Also write all figures, with every fault.")
]


def chaos(
    context: typer.Context,
    script: Annotated[str, typer.Option(metavar="FILE", help="The training script, as for `distributed train`.")],
    settings: opt.Settings = None,
    faults: Faults = "kill",
    mtbf: Mtbf = None,
    kills: Kills = None,
    steps: Steps = None,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Of the faults: the same seed, the same faults.")] = 0,
    num_gpus: NumGpus = None,
    nodes: Nodes = 1,
    tolerance: Tolerance = None,
    config: opt.ConfigFile = None,
    run_dir: RunDirectory = None,
    json_file: JsonFile = None,
) -> None:
    """Run a training twice, once undisturbed and once under faults, and compare the results.

    Both are real runs of `distributed train` with sample_ledger=true and a checkpoint every few steps; your KEY=VALUE
    settings win. What follows -- goes to the script, which must use one of this library's trainers. A fault comes only
    when the run has taken a step beyond the one before, so that each one is seen to be recovered from.

    \b
    Faults:
      kill       SIGKILL to a rank, to two at once, or to the process that they are forked from
      hang       SIGSTOP to a rank: it must be named, and the run must continue
      slow       a rank that runs a quarter of the time for 3 s: it must not be taken for one that hangs
      corrupt    bytes of the newest checkpoint flipped, then all ranks killed: an older one must serve
      diskfull   no room for checkpoints until a save fails (root)
      partition  a host cut off for 2 or 15 s (root, --nodes 2 or more)

    The exit code is 0 only if the disturbed run finished, lost and repeated no sample, and has the very same weights.
    Close ones are enough with --tolerance, or where a fault made the run continue with another number of ranks
    outside of reproducible=bitwise.

    \b
    Examples:
      distributed chaos --script train.py
      distributed chaos --script train.py --faults kill,hang,corrupt --mtbf 5s --steps 2000 --num-gpus 4
      distributed chaos --script train.py --kills 20 batch_size=8 -- --data-dir /data
      distributed chaos --script train.py --faults partition --nodes 2 reproducible=bitwise
    """
    arguments = tuple(context.obj or ())
    request = _prepare(
        script,
        arguments,
        config_path=config,
        words=settings or [],
        faults=faults,
        mtbf=mtbf,
        kills=kills,
        steps=steps,
        seed=seed,
        num_gpus=num_gpus,
        nodes=nodes,
        tolerance=tolerance,
        run_dir=run_dir,
    )
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"both runs and their logs: {request.base}", markup=False)
    with _until_stopped(), _screen(console) as screen:
        report = run_trial(request, screen)
    console.print(table(report))
    if json_file is not None:
        json_file.write_text(json.dumps(report.to_dict(), indent=1) + "\n", encoding="utf-8")
        console.print(f"written: {json_file}", markup=False)
    if report.failures:
        raise typer.Exit(1)


def _prepare(
    script: str,
    arguments: tuple[str, ...],
    *,
    config_path: str | None,
    words: list[str],
    faults: str,
    mtbf: str | None,
    kills: int | None,
    steps: int | None,
    seed: int,
    num_gpus: int | None,
    nodes: int,
    tolerance: float | None,
    run_dir: str | None,
) -> ChaosRequest:
    """Everything that can be checked without starting anything, and all that is wrong in one error."""
    problems = check_script(script)
    options = {"num_gpus": str(num_gpus) if num_gpus else None, "max_steps": str(steps) if steps else None}
    given = DistributedConfig()
    try:
        given = gather(config_path, words, options)
    except ConfigError as error:
        problems += error.problems
    kinds, wrong = parse_faults(faults)
    layers = [read_words(words, {}), *([read_file(config_path)] if config_path is not None else [])]
    problems += [*wrong, *_check_settings({name: value for layer in layers for name, value in layer.values.items()})]
    mtbf_s = parse_span(mtbf or _MTBF)
    if mtbf_s is None:
        problems.append(Problem(f"--mtbf {mtbf}: not a length of time", do="write 15s, 2m or 500ms"))
    if mtbf is not None and kills is not None:
        problems.append(Problem("--mtbf would have no effect beside --kills", do="keep one of them"))
    gpus = given.num_gpus or _GPUS
    if gpus % nodes:
        problems.append(
            Problem(
                f"--num-gpus {gpus} cannot be split over --nodes {nodes}", do=f"set {gpus // nodes * nodes or nodes}"
            )
        )
    base = Path(run_dir or f"runs/chaos-{datetime.now():%Y%m%d-%H%M%S}").absolute()
    if base.exists() and (not base.is_dir() or any(base.iterdir())):
        problems.append(
            Problem(f"--run-dir {base} is not empty", why="two new runs are written there", do="name another --run-dir")
        )
    obstacles = _check_machine(kinds, nodes)
    if problems:
        raise ConfigError([*problems, *obstacles])
    if obstacles:
        raise PlanError(obstacles)
    assert mtbf_s is not None
    total = given.max_steps or _STEPS
    every = max(2, min(25, total // 20))
    ours = {"max_steps": str(total), "sample_ledger": "true", "keep_last": str(_KEEP)}
    ours["checkpoint_frequency"] = f"{every} steps"
    if nodes > 1:
        ours["min_nodes"] = "1"
    if given.checkpoint_frequency is not None:
        count, unit = parse_frequency(given.checkpoint_frequency)
        every = int(count) if unit == "steps" else total
    own = {word.partition("=")[0]: word.partition("=")[2] for word in words}
    own = {name: value for name, value in own.items() if name not in ("num_gpus", "max_steps")}
    settings = {name: value for name, value in ours.items() if name == "max_steps" or not given.given(name)}
    return ChaosRequest(
        order=Order(script, arguments, config_path, {**settings, **own}, gpus, nodes),
        base=base,
        kinds=kinds,
        save_every=every,
        seed=seed,
        mtbf_s=mtbf_s,
        count=kills,
        hang_timeout_s=given.hang_timeout_s,
        is_bitwise=given.reproducible == "bitwise",
        tolerance=tolerance,
    )


def parse_faults(text: str) -> tuple[tuple[ChaosKind, ...], list[Problem]]:
    """
    >>> parse_faults("kill, hang")
    (('kill', 'hang'), [])
    >>> print(parse_faults("kil")[1][0])
    there is no fault 'kil'
      do:  did you mean kill?
    """
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    problems = [
        Problem(f"there is no fault {name!r}", do=nearest_hint(name, KINDS)) for name in names if name not in KINDS
    ]
    if not names:
        problems.append(Problem("--faults names no fault", do=f"choose some of: {', '.join(KINDS)}"))
    known: dict[str, ChaosKind] = {kind: kind for kind in KINDS}
    return tuple(known[name] for name in names if name in known), problems


def _check_settings(given: dict[str, Any]) -> list[Problem]:
    found = []
    for name, option in _OURS.items():
        if name in given:
            do = f"use the option {option}" if option else f"leave {name} out"
            found.append(
                Problem(f"{name} cannot be set here", why=f"chaos sets {name} for each of its two runs", do=do)
            )
    if given.get("sample_ledger") is False:
        found.append(
            Problem(
                "sample_ledger=false", why="the ledger shows which samples were lost or repeated", do="leave it out"
            )
        )
    return found


def _check_machine(kinds: tuple[str, ...], nodes: int) -> list[Problem]:
    """What the faults need that this machine does not have."""
    found = []
    if "partition" in kinds and nodes < 2:
        found.append(Problem("partition needs several hosts", why="--nodes is 1", do="set --nodes 2"))
    reason = Hosts.available() if nodes > 1 else None
    if reason is not None:
        found.append(
            Problem(
                f"--nodes {nodes} is not possible on this machine",
                why=reason,
                do="run as root on Linux, or leave it out",
            )
        )
    reason = disk.available() if "diskfull" in kinds else None
    if reason is not None:
        found.append(
            Problem("diskfull is not possible on this machine", why=reason, do="run as root on Linux, or leave it out")
        )
    return found


@contextmanager
def _screen(console: Console) -> Iterator[ChaosScreen]:
    """A line for each event; on a terminal, one more that says how things are."""
    if not console.is_terminal:
        yield ChaosScreen(line=lambda text: console.print(text, markup=False))
        return
    with console.status("starting") as status:
        yield ChaosScreen(line=lambda text: console.print(text, markup=False), now=lambda text: status.update(text))


@contextmanager
def _until_stopped() -> Iterator[None]:
    """SIGTERM is a Ctrl-C: what was started is ended, and what was made is removed."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
