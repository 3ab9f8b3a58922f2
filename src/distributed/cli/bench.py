"""distributed bench: how fast this machine trains, sends, saves and recovers, measured here and now."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, get_args

import typer

from distributed.bench.output import JsonFile, PictureFile, progress, show
from distributed.bench.pictures import draw
from distributed.bench.throughput.command import throughput_command
from distributed.bench.throughput.contenders import WITHOUT_PEERS
from distributed.cli.options import JoinToken
from distributed.core.choices import Device
from distributed.core.errors import ConfigError

app = typer.Typer(help="Measure this machine.", no_args_is_help=True, rich_markup_mode=None)

SUITE = "python -m benchmarks.suite"  # in a checkout of the repository
MOVED = {"overhead": "overhead", "start": "start", "strategies": "strategies", "tune": "tuning"}
_THROUGHPUT = """How many samples a second: whole trainings of the same model, ours beside hand-written loops.

On a CPU each contender has two processes on gloo and trains an MLP and a small convolutional network; on a GPU it
has one, and trains MLP, GPT-2 124M, GPT 1.3B, ResNet-50, BERT-large and DLRM. Contenders are interleaved in rounds.
All get the same DataLoader; the best hand-written loop and the CUDA graph have their batches on the device already,
which is the most that can be had. Files are written again after each turn.

With --script, your own training takes their place: with N ranks (--processes; by default every GPU, or 2 on a CPU)
against its run with one, the same settings for both.

\b
Examples:
  distributed bench throughput
  distributed bench throughput --workload mlp --only ours --only bare --json throughput.json
  distributed bench throughput --picture throughput.svg
  distributed bench throughput --script train.py --processes 2 mixed_precision=bf16 -- --data-dir /data
"""


@app.callback()
def _bench() -> None:
    pass


@app.command("collectives")
def collectives(
    processes: Annotated[
        int | None, typer.Option(min=2, metavar="N", help="By default every GPU where there are several, else 2.")
    ] = None,
    largest: Annotated[
        float | None, typer.Option(min=0.001, metavar="MIB", help="The largest message; 64 by default.")
    ] = None,
    begin: Annotated[str, typer.Option("--begin", "-b", metavar="SIZE", help="The smallest: 8, 4K, 1M.")] = "1K",
    end: Annotated[str, typer.Option("--end", "-e", metavar="SIZE", help="The largest, in place of --largest.")] = "",
    factor: Annotated[int, typer.Option("--factor", "-f", min=2, metavar="N", help="From a size to the next.")] = 4,
    iterations: Annotated[
        int | None, typer.Option("--iterations", "-n", min=1, metavar="N", help="Calls a turn; by default by size.")
    ] = None,
    operation: Annotated[
        list[str] | None, typer.Option("--operation", metavar="NAME", help="Or all; may be repeated.")
    ] = None,
    algorithm: Annotated[
        list[str] | None, typer.Option("--algorithm", metavar="NAME", help="Of all-reduce, or all; may be repeated.")
    ] = None,
    backend: Annotated[str | None, typer.Option(metavar="NAME", help="gloo or nccl; by default by device.")] = None,
    pairs: Annotated[bool, typer.Option("--pairs", help="Messages between any two ranks, as a matrix.")] = False,
    rounds: Annotated[
        int, typer.Option(min=1, metavar="N", help="Repetitions of each size, interleaved; the median counts.")
    ] = 5,
    json_file: JsonFile = None,
    picture: PictureFile = None,
) -> None:
    """What sending costs: all-reduce, all-gather, reduce-scatter and broadcast from 1 KiB to 64 MiB.

    Columns and options are those of nccl-tests. Bus bandwidth is the rate on each link, which can be compared between
    operations, between numbers of processes, and with the link's nominal rate. nccl where there are GPUs for all
    processes, gloo otherwise. --operation also takes reduce, gather, scatter, all-to-all and send-recv; --algorithm
    takes backend, ring, doubling, tree, two_level and auto.

    \b
    Examples:
      distributed bench collectives
      distributed bench collectives -b 8 -e 128M -f 2 --operation all
      distributed bench collectives --operation all-reduce --algorithm all --processes 4 --json all-reduce.json
      distributed bench collectives --pairs --processes 4
    """
    from distributed.bench.collectives.asked import read_asked
    from distributed.bench.collectives.benchmark import measure_collectives
    from distributed.bench.collectives.pairs import measure_pairs
    from distributed.bench.collectives.table import collectives_table, pairs_table

    asked = read_asked(
        begin=begin,
        end=end,
        factor=factor,
        largest_mib=largest,
        operations=operation,
        algorithms=algorithm,
        backend=backend,
    )
    common: dict[str, Any] = {"rounds": rounds, "backend": asked.backend, "iterations": iterations}
    with progress() as notify:
        if pairs:
            matrix = measure_pairs(processes, notify=notify, **common)
            table, record = pairs_table(matrix), matrix.to_dict()
        else:
            found = measure_collectives(
                processes,
                sizes=asked.sizes,
                operations=asked.operations,
                algorithms=asked.algorithms,
                notify=notify,
                **common,
            )
            table, record = collectives_table(found), found.to_dict()
    show(table, record, json_file, picture)


@app.command("network")
def network(
    num_nodes: Annotated[
        int, typer.Option(min=1, metavar="N", help="Machines; run the same command on each. 1: this one with itself.")
    ] = 1,
    master_addr: Annotated[
        str | None, typer.Option(metavar="HOST", help="Where they meet: the address of one of them.")
    ] = None,
    master_port: Annotated[
        int | None, typer.Option(min=1, max=65535, metavar="PORT", help="And its port there; 29400 unless given.")
    ] = None,
    node_rank: Annotated[
        int | None, typer.Option(min=0, metavar="R", help="The rank of this machine; by default they agree on one.")
    ] = None,
    join_token: JoinToken = None,
    interface: Annotated[
        str, typer.Option(metavar="NAME", help="To measure; by default the one on the way to --master-addr.")
    ] = "",
    streams: Annotated[int, typer.Option(min=1, max=64, metavar="N", help="Connections at once, besides 1.")] = 4,
    seconds: Annotated[float, typer.Option(min=0.2, metavar="S", help="That are counted of each turn.")] = 2.0,
    json_file: JsonFile = None,
    picture: PictureFile = None,
) -> None:
    """What the network carries between machines, as iperf3 and ib_write_bw measure it.

    Every two of them in turn: round trips, bytes a second with 1 and with N connections, in each direction and in both
    at once, over TCP on one interface; and ib_write_bw's rate, where both have it and InfiniBand or RoCE. Rates are of
    bytes that arrive. --streams and --seconds are those of node 0, and all nodes print the result.

    \b
    Examples:
      distributed bench network --num-nodes 2 --master-addr node0     (on both)
      distributed bench network --num-nodes 4 --master-addr node0 --interface eth1 --streams 8 --json network.json
      distributed bench network                                       (this machine's loopback)
    """
    from distributed.bench.network.benchmark import NodesAsked, measure_network
    from distributed.bench.network.table import network_table
    from distributed.bench.network.turns import NetworkAsked

    nodes = NodesAsked(num_nodes, master_addr, master_port, node_rank, join_token)
    with progress() as notify:
        asked = NetworkAsked(streams, seconds)
        found = measure_network(nodes, asked, interface, notify=notify, say=partial(typer.echo, err=True))
    show(network_table(found), found.to_dict(), json_file, picture)


@app.command("scaling")
def scaling(
    max_processes: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Most processes; by default every GPU, or every core.")
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
    from distributed.bench.scaling.benchmark import measure_scaling
    from distributed.bench.scaling.table import scaling_table

    with progress() as notify:
        found = measure_scaling(max_processes, steps=steps, repeats=repeats, strong=strong, notify=notify)
    show(scaling_table(found), found.to_dict(), json_file, picture)


@app.command("checkpoint")
def checkpoint(
    mebibytes: Annotated[int, typer.Option("--mib", min=32, metavar="N", help="State to save.")] = 512,
    rounds: Annotated[
        int, typer.Option(min=1, metavar="N", help="Repetitions of each way of saving, interleaved.")
    ] = 5,
    device: Annotated[str, typer.Option(metavar="NAME", help="Where the state is: cpu or cuda.")] = "cpu",
    processes: Annotated[
        int, typer.Option(min=1, metavar="N", help="Ranks; several hold the state in parts, as FSDP leaves it.")
    ] = 1,
    bitwise: Annotated[bool, typer.Option("--bitwise/--no-bitwise", hidden=True)] = False,
    json_file: JsonFile = None,
    picture: PictureFile = None,
) -> None:
    """What a checkpoint costs: how long training stands still for it, against a plain copy of the same bytes.

    Beside ours, torch.save and torch.distributed.checkpoint save the same state in the same run. A second save of
    ours, of which a twentieth has changed, shows how much is written again.

    With --processes N, N ranks shard a model and its optimizer with FSDP, and each saves its own shard beside a copy
    of it. With --device cuda they talk over NCCL, and share the GPUs where there are fewer than ranks.

    \b
    Examples:
      distributed bench checkpoint
      distributed bench checkpoint --processes 2
      distributed bench checkpoint --mib 10240 --device cuda
    """
    from distributed.bench.checkpoint.benchmark import measure_checkpoint
    from distributed.bench.checkpoint.sharded import measure_sharded
    from distributed.bench.checkpoint.table import checkpoint_table

    if bitwise:  # for one release
        raise ConfigError(
            "--bitwise is not part of this benchmark any more",
            why="what reproducible='bitwise' costs is measured by the repository's benchmark suite",
            do=f"in a checkout of the repository: {SUITE} bitwise",
        )
    if device not in get_args(Device):
        raise ConfigError(f"--device {device}", why="the state lies on a CPU or a GPU", do="--device cpu or cuda")
    place: Device = "cuda" if device == "cuda" else "cpu"
    with progress() as notify:
        if processes > 1:
            found = measure_sharded(processes, mebibytes=mebibytes, rounds=rounds, device=place, notify=notify)
        else:
            found = measure_checkpoint(mebibytes=mebibytes, rounds=rounds, device=place, notify=notify)
    show(checkpoint_table(found), found.to_dict(), json_file, picture)


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
    often, and their kills are interleaved. Also: how long a start takes, what the processes that watch use, and how
    soon a rank that is stuck is named. All of it takes about six minutes on two cores.

    \b
    Examples:
      distributed bench recovery
      distributed bench recovery --kills 5 --starts 2 --json recovery.json
    """
    from distributed.bench.recovery.benchmark import measure_recovery
    from distributed.bench.recovery.table import recovery_table

    with progress() as notify:
        found = measure_recovery(
            kills=kills, ranks=ranks, starts=starts, stalls=stalls, steps=steps, seed=seed, notify=notify
        )
    show(recovery_table(found), found.to_dict(), json_file, picture)


app.command("throughput", help=_THROUGHPUT)(throughput_command(WITHOUT_PEERS, draw))


def _moved(context: typer.Context) -> None:
    verb = context.info_name or ""
    raise ConfigError(
        f"`distributed bench {verb}` is not part of the package any more",
        why="a comparison needs the other trainers, which are in the repository's benchmark suite",
        do=f"in a checkout of the repository: {SUITE} {' '.join([MOVED[verb], *context.args])}",
    )


for verb in MOVED:  # for one release
    app.command(
        verb,
        hidden=True,
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )(_moved)
