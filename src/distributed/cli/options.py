"""The options of `distributed train`, each with its help text; some serve other commands too."""

from __future__ import annotations

from typing import Annotated

import typer

from distributed.core.engines.engine import ENGINES

Script = Annotated[str, typer.Option(metavar="FILE", help="The Python script to run in every rank.")]
OptionalScript = Annotated[
    str | None, typer.Option("--script", metavar="FILE", help="The Python script to run in every rank.")
]
Module = Annotated[
    str | None,
    typer.Option("--module", "-m", metavar="NAME", help="In place of a script: a module, as python -m runs it."),
]
LocalRank = Annotated[
    bool,
    typer.Option(
        "--local-rank",
        help="Also give each rank's script --local-rank=N as its first argument, as torch.distributed.launch does.",
    ),
]
LocalRankOfOld = Annotated[bool, typer.Option("--local_rank", help="The same, as --local_rank=N.")]
Settings = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Any setting: see `distributed config show`.")
]
NumGpus = Annotated[str | None, typer.Option(metavar="N", help="Devices in all (CPU processes without CUDA).")]
Backend = Annotated[
    str | None, typer.Option(metavar="NAME", help=f"The engine: {', '.join(['auto', *ENGINES.entries])}.")
]
NumNodes = Annotated[str | None, typer.Option(metavar="N", help="Machines; run the same command on each.")]
GpusPerNode = Annotated[str | None, typer.Option(metavar="N", help="Devices on each machine.")]
MinNodes = Annotated[str | None, typer.Option(metavar="N", help="Fewest machines to continue with.")]
MaxNodes = Annotated[str | None, typer.Option(metavar="N", help="Most machines to grow to.")]
NodeRank = Annotated[
    str | None,
    typer.Option(metavar="R", help="The rank of this machine, from 0; without it, the machines agree on one."),
]
MasterAddr = Annotated[
    str | None, typer.Option(metavar="HOST", help="Rendezvous: the address of node 0, the same on all.")
]
MasterPort = Annotated[
    str | None, typer.Option(metavar="PORT", help="The rendezvous port of node 0; 29400 unless given.")
]
JoinToken = Annotated[
    str | None,
    typer.Option(
        metavar="@FILE",
        help="The run's secret, without which no node joins; the same on all. Better than here, where `ps` shows a"
        " token itself, in DISTRIBUTED_JOIN_TOKEN. Without one, node 0 leaves it in the shared run directory.",
    ),
]
Address = Annotated[
    str | None,
    typer.Option(metavar="WHERE", help="The Ray cluster that runs the ranks: auto, host:port or ray://host:port."),
]
Device = Annotated[str | None, typer.Option(metavar="NAME", help="auto, cpu or cuda.")]
ShareGpus = Annotated[
    bool, typer.Option("--share-gpus", help="Let several ranks share a GPU: to try a run, not for speed.")
]
Sharding = Annotated[
    str | None, typer.Option(metavar="KIND", help="Shard the model's state: none, grad_op, full or hybrid.")
]
ZeroStage = Annotated[str | None, typer.Option(metavar="0..3", help="The same by ZeRO's numbers.")]
TensorParallel = Annotated[str | None, typer.Option(metavar="N", help="Ranks that each layer is sharded over.")]
PipelineParallel = Annotated[
    str | None, typer.Option(metavar="N", help="Stages that the model's blocks are split into.")
]
ContextParallel = Annotated[str | None, typer.Option(metavar="N", help="Ranks that each sequence is sharded over.")]
ActivationCheckpointing = Annotated[
    str | None,
    typer.Option(metavar="HOW", help="Compute blocks again in backward: full, selective, or n: each n-th."),
]
CpuOffload = Annotated[
    bool, typer.Option("--cpu-offload", help="Keep sharded parameters and optimizer state in host memory.")
]
DeepspeedConfig = Annotated[
    str | None,
    typer.Option(
        "--deepspeed-config", "--deepspeed_config", metavar="FILE", help="DeepSpeed's own configuration, in JSON."
    ),
]
OffloadOptimizer = Annotated[
    str | None, typer.Option(metavar="WHERE", help="For deepspeed: keep the optimizer state in cpu or nvme.")
]
OffloadParameters = Annotated[
    str | None, typer.Option(metavar="WHERE", help="The same for the parameters, with --zero-stage 3.")
]
OffloadDir = Annotated[str | None, typer.Option(metavar="DIR", help="For nvme: a folder on a fast disk.")]
Compression = Annotated[
    str | None,
    typer.Option(metavar="KIND", help="Gradients on the wire: fp16, bf16, topk, randomk, powersgd, int8 or onebit."),
]
Synchronization = Annotated[
    str | None,
    typer.Option(
        metavar="KIND", help="When replicas meet: every_step, local_sgd, post_local_sgd, diloco or asynchronous."
    ),
]
Lora = Annotated[str | None, typer.Option(metavar="RANK", help="Train adapters of this rank; or true.")]
ConfigFile = Annotated[str | None, typer.Option(metavar="FILE", help="A YAML file of settings.")]
RunDirectory = Annotated[
    str | None, typer.Option(metavar="DIR", help="Where logs and events go; runs/<time> unless given.")
]
DryRun = Annotated[
    str | None,
    typer.Option(
        metavar="[=N]",
        help="Show what would run; start and create nothing. With =N: also run the script here, without devices or "
        "memory, up to one step as rank 0 of N ranks.",
    ),
]
