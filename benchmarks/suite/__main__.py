"""python -m benchmarks.suite: our trainers beside others, in the root of a checkout."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from benchmarks.suite import importable
from benchmarks.suite.bitwise import measure_bitwise
from benchmarks.suite.overhead.benchmark import measure_overhead
from benchmarks.suite.overhead.contenders import MEASURED, find_contenders
from benchmarks.suite.pictures import draw
from benchmarks.suite.start.benchmark import measure_starts
from benchmarks.suite.strategies import measure_strategies
from benchmarks.suite.tables import bitwise_table, overhead_table, start_table, strategies_table, tuning_table
from benchmarks.suite.throughput import CONTENDERS
from benchmarks.suite.tuning.benchmark import measure_tuning
from distributed.bench.output import JsonFile, PictureFile, progress, show
from distributed.bench.throughput.command import throughput_command
from distributed.bench.workloads.gpt import SIZES
from distributed.cli.main import show_error
from distributed.core.errors import ConfigError, DistributedError

app = typer.Typer(
    help="Measure our trainers beside others.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
_THROUGHPUT = """How many samples a second: whole trainings of the same model, ours beside hand-written loops and peers.

As `distributed bench throughput`, with those of Lightning, Fabric, Accelerate and Ray Train that are installed.

\b
Examples:
  python -m benchmarks.suite throughput
  python -m benchmarks.suite throughput --workload mlp --only ours --only lightning --json throughput.json
"""


@app.command("overhead")
def overhead(
    processes: Annotated[int, typer.Option(min=1, metavar="N", help="CPU processes of each contender.")] = 2,
    steps: Annotated[int, typer.Option(min=50, metavar="N", help="Timed steps a turn, a multiple of 50.")] = 200,
    rounds: Annotated[
        int, typer.Option(min=1, metavar="N", help="Interleaved runs of each contender; more: less noise.")
    ] = 15,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="NAME", help="Only this contender; may be repeated.")
    ] = None,
    engine: Annotated[str, typer.Option(metavar="NAME", help=f"Whose bare loop: {', '.join(MEASURED)}.")] = MEASURED[0],
    features: Annotated[
        bool, typer.Option("--features", help="What steps, callbacks and loops of one's own add, beside ours.")
    ] = False,
    json_file: JsonFile = None,
    picture: PictureFile = None,
) -> None:
    """What a trainer costs: CPU time a step over a hand-written loop, on a model so small that nothing hides it.

    The bare loop, our Trainer (progress, events.jsonl and TensorBoard on) and those of Lightning Fabric, Accelerate
    and Lightning that are installed do the same work on real processes, interleaved. Each turn is compared with a bare
    loop on the same ranks just before or after; `bare-again` is the bare loop against itself, which is the noise.
    What counts is the CPU time of Python's threads, which hardly depends on what else runs; gloo's threads and the
    wall clock do, and are shown beside it.

    \b
    Examples:
      python -m benchmarks.suite overhead
      python -m benchmarks.suite overhead --only ours --rounds 40 --json overhead.json
      python -m benchmarks.suite overhead --engine deepspeed
      python -m benchmarks.suite overhead --features
    """
    with progress() as notify:
        found = measure_overhead(
            find_contenders(only, engine, features=features),
            processes=processes,
            steps=steps,
            rounds=rounds,
            notify=notify,
        )
    show(overhead_table(found), found.to_dict(), json_file, picture, draw)


@app.command("start")
def start(
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="NAME", help="Only this engine; may be repeated.")
    ] = None,
    processes: Annotated[int, typer.Option(min=1, metavar="N", help="CPU processes of each run.")] = 2,
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Starts of each; their median counts.")] = 3,
    json_file: JsonFile = None,
    picture: PictureFile = None,
) -> None:
    """How long it takes until training begins: seconds from the command to the end of the first step, by engine.

    `distributed train` starts every engine that is installed. Beside them, in the same run and interleaved, the same
    training is started by hand: a DDP loop under torchrun, Ray's own TorchTrainer, TensorFlow's own strategy.

    \b
    Examples:
      python -m benchmarks.suite start
      python -m benchmarks.suite start --only pytorch-ddp --only ray --repeats 5 --json start.json
    """
    with progress() as notify:
        found = measure_starts(only, processes=processes, repeats=repeats, notify=notify)
    show(start_table(found), found.to_dict(), json_file, picture, draw)


@app.command("strategies")
def strategies(
    size: Annotated[str, typer.Option(metavar="NAME", help="tiny, 124m or 1.3b: the GPT that is trained.")] = "tiny",
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Timed steps a turn.")] = 10,
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="Turns; more: less noise.")] = 6,
    json_file: JsonFile = None,
    picture: PictureFile = None,
) -> None:
    """What a way of training costs on one device: time a step and peak memory, against a bare compiled loop.

    The bare loop and ours are interleaved; then activation checkpointing in its kinds and CPU offload, one by one. On a
    CPU nothing is compiled, and only the command itself is worth trying.

    \b
    Examples:
      python -m benchmarks.suite strategies
      python -m benchmarks.suite strategies --size 1.3b --json strategies.json     (one GPU with 80 GiB)
    """
    if size not in SIZES:
        raise ConfigError(f"there is no size {size!r}", do=f"choose one of: {', '.join(SIZES)}")
    with progress() as notify:
        found = measure_strategies(size, steps=steps, rounds=rounds, notify=notify)
    show(strategies_table(found), found.to_dict(), json_file, picture, draw)


@app.command("tuning")
def tuning(
    trials: Annotated[int, typer.Option(min=1, metavar="N", help="Trials of a search.")] = 16,
    parallel: Annotated[int, typer.Option(min=1, metavar="N", help="Trials at a time, each on one core.")] = 2,
    seconds: Annotated[float, typer.Option(min=0.05, metavar="S", help="Of CPU time that a trial takes, about.")] = 3.0,
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Searches of each side; their median counts.")] = 2,
    json_file: JsonFile = None,
    picture: PictureFile = None,
) -> None:
    """What a search costs beside its trials: wall time over the sum of the trials' times by trials at a time.

    Our tuner on this machine, our tuner on Ray, and plain Ray Tune run the same trials, interleaved.

    \b
    Examples:
      python -m benchmarks.suite tuning
      python -m benchmarks.suite tuning --trials 32 --seconds 1 --json tune.json
    """
    with progress() as notify:
        found = measure_tuning(trials=trials, parallel=parallel, seconds=seconds, repeats=repeats, notify=notify)
    show(tuning_table(found), found.to_dict(), json_file, picture, draw)


@app.command("bitwise")
def bitwise(
    processes: Annotated[int, typer.Option(min=1, metavar="N", help="CPU processes.")] = 2,
    virtual_ranks: Annotated[int, typer.Option(min=1, metavar="N", help="A power of two.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="Runs of each mode.")] = 2,
    json_file: JsonFile = None,
    picture: PictureFile = None,
) -> None:
    """What reproducible="bitwise" costs: samples a second against the normal mode, interleaved.

    \b
    Examples:
      python -m benchmarks.suite bitwise --json bitwise.json
    """
    with progress() as notify:
        found = measure_bitwise(processes=processes, virtual_ranks=virtual_ranks, rounds=rounds, notify=notify)
    show(bitwise_table(found), found.to_dict(), json_file, picture, draw)


app.command("throughput", help=_THROUGHPUT)(throughput_command(CONTENDERS, draw))


def main() -> None:
    """Run the command line; what it starts finds the suite wherever it works."""
    os.environ |= importable()
    try:
        app(prog_name="python -m benchmarks.suite")
    except DistributedError as error:
        show_error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
