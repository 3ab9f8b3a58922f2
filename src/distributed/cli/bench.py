"""distributed bench: how fast, against whom, measured here and now."""

from __future__ import annotations

from typing import Annotated

import typer

from distributed.bench.contenders import MEASURED, find_contenders
from distributed.bench.overhead import measure_overhead
from distributed.bench.scaling import measure_scaling
from distributed.cli.bench_output import JsonFile, PictureFile, progress, show, write
from distributed.core.errors import ConfigError
from distributed.core.registry import nearest_hint
from distributed.planner.hardware import probe_hardware

app = typer.Typer(help="Measure this machine.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _bench() -> None:
    pass


@app.command("overhead")
def overhead(
    processes: Annotated[int, typer.Option(min=1, metavar="N", help="CPU processes of each contender.")] = 2,
    steps: Annotated[int, typer.Option(min=50, metavar="N", help="Timed steps a turn, a multiple of 50.")] = 200,
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="Turns of each contender; more: less noise.")] = 15,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="NAME", help="Only this contender; may be repeated.")
    ] = None,
    engine: Annotated[str, typer.Option(metavar="NAME", help=f"Whose bare loop: {', '.join(MEASURED)}.")] = MEASURED[0],
    json_file: JsonFile = None,
    picture: PictureFile = None,
) -> None:
    """What a trainer costs: CPU time a step over a hand-written loop, on a model so small that nothing hides it.

    The bare loop, our Trainer (progress, events.jsonl and TensorBoard on) and those of Lightning Fabric, Accelerate
    and Lightning that are installed do the same work on real processes, in turns. Each turn is compared with a bare
    loop on the same ranks just before or after; `bare-again` is the bare loop against itself, which is the noise.
    What counts is the CPU time of Python's threads, which hardly depends on what else runs; gloo's threads and the
    wall clock do, and are shown beside it.

    \b
    Examples:
      distributed bench overhead
      distributed bench overhead --only ours --rounds 40 --json overhead.json
      distributed bench overhead --engine deepspeed
    """
    from distributed.bench.tables import overhead_table

    with progress() as notify:
        found = measure_overhead(
            find_contenders(only, engine), processes=processes, steps=steps, rounds=rounds, notify=notify
        )
    show(overhead_table(found), found.to_dict(), json_file, picture)


@app.command("throughput")
def throughput(
    workload: Annotated[
        list[str] | None,
        typer.Option("--workload", metavar="NAME", help="Only this one; may be repeated. On a CPU: mlp, convnet."),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="NAME", help="Only this contender; may be repeated.")
    ] = None,
    precision: Annotated[
        str | None, typer.Option(metavar="NAME", help="fp32, bf16 or fp8; by default bf16 on a GPU, else fp32.")
    ] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Of each contender; by default 1 on a GPU, 2 on a CPU.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Timed steps a turn; by default by workload.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="Turns of each contender; more: less noise.")] = 5,
    seconds: Annotated[
        float | None,
        typer.Option(min=1, metavar="S", help="Time for a workload; by default 65 on a GPU, none on a CPU."),
    ] = None,
    free_speed: Annotated[bool, typer.Option(help="Also ours with its options for more speed, on a GPU.")] = True,
    tiny: Annotated[bool, typer.Option("--tiny", help="Models of the same kinds that train in a moment.")] = False,
    json_file: JsonFile = None,
    picture: PictureFile = None,
) -> None:
    """How many samples a second: whole trainings of the same model, ours beside loops by hand and the peers.

    On a CPU each contender has two processes on gloo and trains an MLP and a small convolutional network; on a GPU it
    has one, and trains MLP, GPT-2 124M, GPT 1.3B, ResNet-50, BERT-large and DLRM. Contenders take turns in rounds. All
    get the same DataLoader; the best loop by hand and the CUDA graph have their batches on the device already, which
    is the most that can be had. Files are written anew after each turn.

    \b
    Examples:
      distributed bench throughput
      distributed bench throughput --workload mlp --only ours --only lightning --json throughput.json
      distributed bench throughput --picture throughput.svg
    """
    from distributed.bench.throughput import Wish, choose_workloads, measure_throughput
    from distributed.bench.throughput_field import ORDER, find_field
    from distributed.bench.throughput_table import throughput_table

    device = _device(processes)
    wish = Wish(
        workloads=choose_workloads(workload, device, ORDER, tiny),
        device=device,
        precision=_precision(precision, device),
        processes=processes or (1 if device == "cuda" else 2),
        rounds=rounds,
        steps=steps,
        seconds=seconds or (65.0 if device == "cuda" else None),
        tiny=tiny,
    )
    with progress(logs=True) as notify:
        for found in measure_throughput(wish, find_field(only, device, free_speed=free_speed), notify):
            write(found.to_dict(), json_file, picture)
    show(throughput_table(found), found.to_dict(), json_file, picture)


@app.command("collectives")
def collectives(
    processes: Annotated[
        int | None, typer.Option(min=2, metavar="N", help="By default every GPU where there are several, else 2.")
    ] = None,
    largest: Annotated[float, typer.Option(min=0.001, metavar="MIB", help="The largest message.")] = 64.0,
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="Turns of each size; their median counts.")] = 5,
    json_file: JsonFile = None,
    picture: PictureFile = None,
) -> None:
    """What sending costs: all-reduce, all-gather, reduce-scatter and broadcast from 1 KiB to 64 MiB.

    Latency is the time of a call; bus bandwidth is what each link carries meanwhile, whatever the operation and the
    number of processes, so that it can be compared with what the link is sold for. nccl where there are GPUs for all
    processes, gloo otherwise.

    \b
    Examples:
      distributed bench collectives
      distributed bench collectives --processes 4 --largest 16 --json collectives.json
    """
    from distributed.bench.collectives import measure_collectives
    from distributed.bench.tables import collectives_table

    with progress() as notify:
        found = measure_collectives(processes, largest_mib=largest, rounds=rounds, notify=notify)
    show(collectives_table(found), found.to_dict(), json_file, picture)


@app.command("scaling")
def scaling(
    max_processes: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Up to so many; by default every GPU, or every core.")
    ] = None,
    strong: Annotated[bool, typer.Option("--strong", help="Split one global batch instead of adding to it.")] = False,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Steps an epoch; four epochs are trained.")] = 15,
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Runs of each size; the fastest counts.")] = 2,
    json_file: JsonFile = None,
    picture: PictureFile = None,
) -> None:
    """What another device brings: samples a second with 1..N processes, through Trainer.fit.

    Weak scaling gives every device the same batch, so the work grows with the devices; --strong splits one global
    batch among them. Efficiency is the speed-up by device: 100 % means that nothing is lost to communication.

    \b
    Examples:
      distributed bench scaling
      distributed bench scaling --max-processes 4 --strong
    """
    from distributed.bench.tables import scaling_table

    with progress() as notify:
        found = measure_scaling(max_processes, steps=steps, repeats=repeats, strong=strong, notify=notify)
    show(scaling_table(found), found.to_dict(), json_file, picture)


@app.command("checkpoint")
def checkpoint(
    mebibytes: Annotated[int, typer.Option("--mib", min=32, metavar="N", help="State to save.")] = 512,
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="Turns of each way of saving.")] = 5,
    device: Annotated[str, typer.Option(metavar="NAME", help="Where the state is: cpu or cuda.")] = "cpu",
    bitwise: Annotated[bool, typer.Option(help="Also measure reproducible='bitwise' against the normal mode.")] = True,
    json_file: JsonFile = None,
    picture: PictureFile = None,
) -> None:
    """What a checkpoint costs: how long training stands still for it, against a plain copy of the same bytes.

    Beside ours, torch.save and torch.distributed.checkpoint save the same state in the same run. A second save of
    ours, of which a twentieth has changed, shows how much is written again.

    \b
    Examples:
      distributed bench checkpoint
      distributed bench checkpoint --mib 10240 --device cuda --no-bitwise
    """
    from distributed.bench.bitwise import measure_bitwise
    from distributed.bench.checkpoint import measure_checkpoint
    from distributed.bench.tables import checkpoint_table

    with progress() as notify:
        found = measure_checkpoint(mebibytes=mebibytes, rounds=rounds, device=device, notify=notify)
        cost = measure_bitwise(processes=2, virtual_ranks=8, rounds=2, notify=notify) if bitwise else None
    record = found.to_dict() | ({"bitwise": cost.to_dict()} if cost is not None else {})
    show(checkpoint_table(found, cost), record, json_file, picture)


@app.command("recovery")
def recovery(
    kills: Annotated[int, typer.Option(min=1, metavar="N", help="Kills of each side.")] = 20,
    ranks: Annotated[int, typer.Option(min=2, metavar="N", help="CPU processes of each side.")] = 2,
    starts: Annotated[int, typer.Option(min=1, metavar="N", help="Starts of each side, with 4 processes.")] = 5,
    stalls: Annotated[int, typer.Option(min=1, metavar="N", help="Ranks that get stuck.")] = 3,
    steps: Annotated[int, typer.Option(min=10, metavar="N", help="Steps over which the watching is measured.")] = 800,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the moments at which ranks are killed.")] = 0,
    json_file: JsonFile = None,
    picture: PictureFile = None,
) -> None:
    """What a killed rank costs: seconds from SIGKILL until all ranks train again, against torchrun.

    `distributed train` with our Trainer and torchrun with a hand-written DDP loop train the same model, save equally
    often, and are killed by turns. Also: how long a start takes, what the processes that watch use, and how soon a
    rank that is stuck is named. All of it takes about six minutes on two cores.

    \b
    Examples:
      distributed bench recovery
      distributed bench recovery --kills 5 --starts 2 --json recovery.json
    """
    from distributed.bench.recovery import measure_recovery
    from distributed.bench.recovery_table import recovery_table

    with progress() as notify:
        found = measure_recovery(
            kills=kills, ranks=ranks, starts=starts, stalls=stalls, steps=steps, seed=seed, notify=notify
        )
    show(recovery_table(found), found.to_dict(), json_file, picture)


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

    `distributed train` starts every engine that is installed. Beside them, in the same run and by turns, the same
    training is started by hand: a DDP loop under torchrun, Ray's own TorchTrainer, TensorFlow's own strategy.

    \b
    Examples:
      distributed bench start
      distributed bench start --only pytorch-ddp --only ray --repeats 5 --json start.json
    """
    from distributed.bench.start import measure_starts
    from distributed.bench.tables import start_table

    with progress() as notify:
        found = measure_starts(only, processes=processes, repeats=repeats, notify=notify)
    show(start_table(found), found.to_dict(), json_file, picture)


@app.command("strategies")
def strategies(
    size: Annotated[str, typer.Option(metavar="NAME", help="tiny, 124m or 1.3b: the GPT that is trained.")] = "tiny",
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Timed steps a turn.")] = 10,
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="Turns; more: less noise.")] = 6,
    json_file: JsonFile = None,
    picture: PictureFile = None,
) -> None:
    """What a way of training costs on one device: time a step and peak memory, against a bare compiled loop.

    The bare loop and ours take turns; then activation checkpointing in its kinds and CPU offload, one by one. On a CPU
    nothing is compiled, and only the command itself is worth trying.

    \b
    Examples:
      distributed bench strategies
      distributed bench strategies --size 1.3b --json strategies.json     (one GPU with 80 GiB)
    """
    from distributed.bench.gpt import SIZES
    from distributed.bench.strategies import measure_strategies
    from distributed.bench.tables import strategies_table

    if size not in SIZES:
        raise ConfigError(f"there is no size {size!r}", do=f"choose one of: {', '.join(SIZES)}")
    with progress() as notify:
        found = measure_strategies(size, steps=steps, rounds=rounds, notify=notify)
    show(strategies_table(found), found.to_dict(), json_file, picture)


@app.command("tune")
def tune(
    trials: Annotated[int, typer.Option(min=1, metavar="N", help="Trials of a search.")] = 16,
    parallel: Annotated[int, typer.Option(min=1, metavar="N", help="Trials at a time, each on one core.")] = 2,
    seconds: Annotated[float, typer.Option(min=0.05, metavar="S", help="Of CPU time that a trial takes, about.")] = 3.0,
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Searches of each side; their median counts.")] = 2,
    json_file: JsonFile = None,
    picture: PictureFile = None,
) -> None:
    """What a search costs beside its trials: wall time over the sum of the trials' times by trials at a time.

    Our tuner on this machine, our tuner on Ray, and plain Ray Tune run the same trials in turns.

    \b
    Examples:
      distributed bench tune
      distributed bench tune --trials 32 --seconds 1 --json tune.json
    """
    from distributed.bench.tables import tuning_table
    from distributed.bench.tuning import measure_tuning

    with progress() as notify:
        found = measure_tuning(trials=trials, parallel=parallel, seconds=seconds, repeats=repeats, notify=notify)
    show(tuning_table(found), found.to_dict(), json_file, picture)


def _device(processes: int | None) -> str:
    """A GPU for each process, or CPUs for all."""
    gpus = len(probe_hardware().gpus)
    return "cuda" if gpus and (processes or 1) <= gpus else "cpu"


def _precision(asked: str | None, device: str) -> str:
    if asked not in (None, "fp32", "bf16", "fp8"):
        raise ConfigError(f"--precision {asked}", do=nearest_hint(str(asked), ("fp32", "bf16", "fp8")))
    if asked == "fp8" and device == "cpu":
        raise ConfigError("--precision fp8 on a CPU", why="products in 8 bits need a GPU", do="--precision bf16")
    return asked or ("bf16" if device == "cuda" else "fp32")
