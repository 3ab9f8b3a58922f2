"""distributed tune: run a script with many settings, in parallel, and find the best ones."""

from __future__ import annotations

import os
from typing import Annotated, Any, cast

import typer
from rich.console import Console

from distributed.cli.settings import gather
from distributed.core.errors import ConfigError, Problem
from distributed.launch.preflight import check_script
from distributed.tune.journal import read_journal
from distributed.tune.results.pictures import write_picture
from distributed.tune.results.results import Board, best_config, short, write_results
from distributed.tune.results.screen import results_table
from distributed.tune.runner import Mode
from distributed.tune.script import ScriptTrial, setting_problems
from distributed.tune.space_reading import read_space
from distributed.tune.tuner import RUNNERS, DistributedTuner

_OF_THE_SEARCH = ("num_gpus", "run_dir", "checkpoint_dir", "resume_from_checkpoint", "address")

Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE | show RUN_DIR", help="Settings of every trial; or a search to show again."),
]
NumSamples = Annotated[int, typer.Option(metavar="N", help="Trials; for a grid, repetitions of each of its points.")]
Metric = Annotated[
    str | None, typer.Option(metavar="NAME", help="The metric to optimize: val_loss, val_accuracy, min:mae …")
]
MetricMode = Annotated[str | None, typer.Option(metavar="min|max", help="Which is best; by default from its name.")]
Scheduler = Annotated[
    str, typer.Option(metavar="KIND", help="none; asha or median stop bad trials; pbt changes them as they train.")
]
MaxSteps = Annotated[int | None, typer.Option(metavar="N", help="End a trial after N reports; an epoch is one.")]
NumGpus = Annotated[
    int | None,
    typer.Option(metavar="N", help="Devices that the trials share; by default all. Without CUDA: cores."),
]
RunDirectory = Annotated[
    str | None, typer.Option(metavar="DIR", help="Run directory of the search; runs/tune/<time> unless given.")
]


def tune(
    context: typer.Context,
    settings: Settings = None,
    script: Annotated[str | None, typer.Option(metavar="FILE", help="The script that each trial runs.")] = None,
    space: Annotated[str | None, typer.Option(metavar="FILE", help="A YAML file: what each parameter may be.")] = None,
    num_samples: NumSamples = 10,
    metric: Metric = None,
    mode: MetricMode = None,
    search: Annotated[str, typer.Option(metavar="KIND", help="random, grid or bayes.")] = "random",
    scheduler: Scheduler = "none",
    max_steps: MaxSteps = None,
    grace_steps: Annotated[int, typer.Option(metavar="N", help="Reports before a trial may be stopped.")] = 1,
    reduction_factor: Annotated[float, typer.Option(metavar="F", help="For asha: of F trials, one continues.")] = 4,
    perturb_every: Annotated[int, typer.Option(metavar="N", help="For pbt: reports between two changes.")] = 4,
    num_gpus: NumGpus = None,
    trials_per_gpu: Annotated[int, typer.Option(metavar="N", help="Trials on each device.")] = 1,
    gpus_per_trial: Annotated[int, typer.Option(metavar="N", help="Ranks of each trial, a device each.")] = 1,
    max_failures: Annotated[int, typer.Option(metavar="N", help="Retries of a failed trial.")] = 0,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the sampled parameters.")] = 0,
    engine: Annotated[str, typer.Option(metavar="NAME", help=f"auto, {' or '.join(RUNNERS.entries)}.")] = "auto",
    address: Annotated[str | None, typer.Option(metavar="ADDR", help="Of a Ray cluster: auto or host:port.")] = None,
    config: Annotated[str | None, typer.Option(metavar="FILE", help="A YAML file of settings for every trial.")] = None,
    run_dir: RunDirectory = None,
    resume: Annotated[bool, typer.Option("--resume", help="Finish the search in --run-dir.")] = False,
) -> None:
    """Run a script with many settings, in parallel, and find the best ones.

    The space names each parameter and what it may be, in YAML:

    \b
      learning_rate: {loguniform: [1e-4, 1e-1]}
      batch_size: {choice: [32, 64, 128]}
      hidden: {int: [16, 256]}

    Those that are settings of `distributed train` win over the script's own; the script reads the others from
    `distributed.tune.params()`. A script that uses the Trainer reports each epoch by itself; any other calls
    `distributed.tune.report({"loss": ...})`.

    \b
    Examples:
      distributed tune --script train.py --space space.yaml --num-samples 20 --metric val_accuracy
      distributed tune --script train.py --space space.yaml --metric val_loss --scheduler asha --num-gpus 4
      distributed tune --script train.py --space space.yaml --metric val_loss epochs=5 -- --data-dir /data
      distributed tune --script train.py --space space.yaml --metric val_loss --run-dir runs/a --resume
      distributed tune show runs/a
      distributed train --script train.py --config runs/a/best.yaml
    """
    words = settings or []
    if words[:1] == ["show"]:
        _show(words[1:], script)
        return
    how: dict[str, Any] = {
        "mode": mode,
        "search": search,
        "scheduler": scheduler,
        "max_steps": max_steps,
        "grace_steps": grace_steps,
        "reduction_factor": reduction_factor,
        "perturb_every": perturb_every,
        "trials_per_gpu": trials_per_gpu,
        "gpus_per_trial": gpus_per_trial,
        "max_failures": max_failures,
        "seed": seed,
        "engine": engine,
        "address": address,
        "run_dir": run_dir,
        "resume": resume,
    }
    tuner = _prepare(
        script,
        tuple(context.obj or ()),
        space_path=space,
        config_path=config,
        words=words,
        num_gpus=num_gpus,
        metric=metric,
        how=how,
    )
    try:
        tuner.tune(num_samples)
    except KeyboardInterrupt:
        again = f"--run-dir {os.path.relpath(tuner.run_dir)} --resume"
        typer.echo(f"stopped; the same command with {again} resumes the search", err=True)
        raise
    finally:
        _print(tuner.board, tuner.run_dir, script or "")


def _prepare(
    script: str | None,
    arguments: tuple[str, ...],
    *,
    space_path: str | None,
    config_path: str | None,
    words: list[str],
    num_gpus: int | None,
    metric: str | None,
    how: dict[str, Any],
) -> DistributedTuner:
    """Everything that can be checked without starting anything, and all that is wrong in one error."""
    problems: list[Problem] = []
    if script is None:
        problems.append(
            Problem(
                "--script is missing",
                do="distributed tune --script train.py …; to show a search: distributed tune show RUN_DIR",
            )
        )
    else:
        problems += check_script(script)
    if space_path is None:
        problems.append(
            Problem(
                "--space is missing",
                do="distributed tune --space space.yaml …; `distributed tune --help` shows an example",
            )
        )
        space, wrong = read_space({"nothing": {"choice": [1]}})
    else:
        space, wrong = read_space(space_path)
    problems += [*wrong, *setting_problems(space)]
    given: dict[str, list[Any]] = {}
    try:
        config = gather(config_path, words, {})
        values = config.model_dump(mode="json")
        given = {name: [values[name], config.source(name)] for name in config.given_values()}
        problems += [_not_here(name) for name in given if name in _OF_THE_SEARCH]
    except ConfigError as error:
        named = [word.partition("=")[0] for word in words]
        problems += [*error.problems, *(_not_here(name) for name in named if name in _OF_THE_SEARCH)]
    trial = ScriptTrial(os.path.abspath(script or ""), arguments, given, how["gpus_per_trial"])
    try:
        tuner = DistributedTuner(
            trial, space if space.domains else {"nothing": {"choice": [1]}}, num_gpus, metric=metric, **how
        )
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    return tuner


def _not_here(name: str) -> Problem:
    option = f"--{name.replace('_', '-')}" if name in ("num_gpus", "run_dir", "address") else ""
    do = f"set it for the whole search: distributed tune {option} VALUE …" if option else f"leave {name} out"
    return Problem(f"{name} cannot be set for a trial", why=f"the search sets {name} for each trial", do=do)


def _show(words: list[str], script: str | None) -> None:
    if len(words) != 1 or script is not None:
        raise ConfigError(
            "`distributed tune show` needs exactly one run directory", do="distributed tune show runs/tune/…"
        )
    past = read_journal(words[0])
    heading = past.heading
    board = Board(
        heading.metric,
        cast("Mode", heading.mode) if heading.metric else None,
        past.trials,
        by_last=heading.scheduler == "pbt",
    )
    board.settle_metric()
    write_results(board, words[0], heading.settings)
    _print(board, words[0], heading.script)


def _print(board: Board, run_dir: str, script: str) -> None:
    """The table, and what to do with the best."""
    if not board.trials:
        return
    console = Console(soft_wrap=True, highlight=False)
    console.print(results_table(board))
    best = board.best if board.metric else None
    if best is None:
        return
    value = board.value(best)
    assert value is not None
    console.print(f"\nbest: trial {best.id}, {board.metric} {short(value)}")
    console.print(best_config(board, best).rstrip(), markup=False)
    picture = write_picture(board, run_dir)
    console.print(f"\n{os.path.join(run_dir, 'results.csv')}, {picture}")
    if script:
        name = os.path.relpath(script)
        console.print(f"distributed train --script {name} --config {os.path.join(run_dir, 'best.yaml')}", markup=False)
