"""distributed checkpoint: look into checkpoints, verify and compare them, and exchange weights with other programs."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated

import typer

# What these verbs do needs torch, and `distributed --help` must not wait for it: so they import it when they run.

app = typer.Typer(
    help="Look into, verify, compare, export and import checkpoints.", no_args_is_help=True, rich_markup_mode=None
)

One = Annotated[str, typer.Argument(metavar="PATH", help="A checkpoint (…/step-000500), or a folder: its newest.")]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON, for programs.")]


class Format(StrEnum):
    safetensors = "safetensors"
    pt = "pt"
    peft = "peft"  # the adapters of lora= alone


@app.callback()
def _checkpoint() -> None:
    pass


@app.command("ls", short_help="List the checkpoints of a folder or run.")
def ls(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="A checkpoint_dir, a run directory, or a URL.")],
    as_json: AsJson = False,
) -> None:
    """List checkpoints: step, age, size, what each added, ranks, metric, and whether it is whole.

    A chunk that several checkpoints use is stored once: `new` is what a checkpoint added to those before it. Manifests
    are checked and chunks counted; to read every byte, use verify.

    \b
    Examples:
      distributed checkpoint ls runs/20260101-120000
      distributed checkpoint ls s3://bucket/run/checkpoints
    """
    from distributed.cli.checkpoint.views import show_listing

    show_listing(directory, as_json)


@app.command("inspect", short_help="Show what a checkpoint holds.")
def inspect(
    path: One,
    tensors: Annotated[bool, typer.Option("--tensors", help="Every tensor: type, shape, placement, size.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what a checkpoint holds: components, progress, versions, settings; with --tensors every tensor.

    \b
    Examples:
      distributed checkpoint inspect runs/20260101-120000/checkpoints/step-000500 --tensors
      distributed checkpoint inspect runs/20260101-120000 --json
    """
    from distributed.cli.checkpoint.views import show_contents

    show_contents(path, tensors, as_json)


@app.command("verify", short_help="Read every byte and compare it with its hash.")
def verify(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A checkpoint, or a folder: all that it holds.")],
) -> None:
    """Read every byte and compare it with its hash; the exit code is 5 if anything is damaged.

    \b
    Examples:
      distributed checkpoint verify runs/20260101-120000
    """
    from distributed.cli.checkpoint.views import show_verification

    show_verification(path)


@app.command("diff", short_help="Compare two checkpoints.")
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint, or a folder: its newest.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The other one.")],
    limit: Annotated[int, typer.Option(min=0, metavar="N", help="Lines of each kind; 0: all.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Compare two checkpoints: names, types and shapes, values, and how many bytes they share.

    Only tensors whose digests differ are read. The exit code is 0 whether or not something differs.

    \b
    Examples:
      distributed checkpoint diff checkpoints/step-000500 checkpoints/step-001000
    """
    from distributed.cli.checkpoint.views import show_difference

    show_difference(a, b, limit, as_json)


@app.command("export", short_help="Write weights as safetensors, .pt or a folder of peft.")
def export(
    path: One,
    to: Annotated[str, typer.Option("--to", metavar="FILE", help="Where to write; a folder: model.<format> in it.")],
    format: Annotated[Format, typer.Option("--format", help="What to write.")] = Format.safetensors,
    max_shard_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="safetensors: several files of at most this, such as 5GB, and an index."),
    ] = None,
    with_optimizer: Annotated[bool, typer.Option("--with-optimizer", help="Also the optimizer's state.")] = False,
    best: Annotated[bool, typer.Option("--best", help="Of a folder or run: the best by its keep_best.")] = False,
    step: Annotated[
        int | None, typer.Option("--step", min=0, metavar="N", help="Of a folder or run: that of this step.")
    ] = None,
    averaged: Annotated[
        str | None, typer.Option("--averaged", metavar="NAME", help="The averages of this callback, such as EMA.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export.")] = False,
) -> None:
    """Write the model's weights as safetensors or as a plain .pt state dict, or the adapters of lora= as peft has them.

    Tensors that are tied are written once in safetensors, as safetensors.torch.save_model does, and noted in the file.

    \b
    Examples:
      distributed checkpoint export runs/20260101-120000 --to model.safetensors
      distributed checkpoint export runs/20260101-120000 --best --to model.safetensors
      distributed checkpoint export checkpoints/step-000500 --to out/ --max-shard-size 5GB
      distributed checkpoint export checkpoints/step-000500 --to weights.pt --format pt
      distributed checkpoint export checkpoints/step-000500 --to adapter/ --format peft
    """
    from distributed.cli.checkpoint.transfers import choose, export_adapter, export_to

    path = choose(path, best=best, step=step)
    if format is Format.peft:
        if averaged is not None:
            raise typer.BadParameter("adapters are written as they were trained", param_hint="--averaged")
        export_adapter(path, to)
        return
    most = None if max_shard_size is None else parse_size(max_shard_size)
    export_to(
        path,
        to,
        format.value,
        max_shard_bytes=most,
        with_optimizer=with_optimizer,
        force=force,
        averaged=averaged,
    )


@app.command("import", short_help="Make a checkpoint from another program's weights.")
def import_(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE_OR_DIR", help="A .pt, .safetensors or index, or a folder of them, of DCP or of DeepSpeed."
        ),
    ],
    to: Annotated[str, typer.Option("--to", metavar="DIR", help="The checkpoint_dir to put it into, or a URL.")],
    step: Annotated[int, typer.Option(min=0, metavar="N", help="The step that a run resumes from.")] = 0,
    key: Annotated[
        str | None, typer.Option(metavar="NAME", help="Where the state dict is, such as state_dict; '.': at the top.")
    ] = None,
    strip_prefix: Annotated[str, typer.Option(metavar="TEXT", help="Cut off names, such as module.")] = "",
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="DeepSpeed: leave the optimizer's state out.")
    ] = False,
    trust: Annotated[
        bool, typer.Option("--trust", help="Let the pickle in a torch DCP directory run code. Only for your own files.")
    ] = False,
) -> None:
    """Make a checkpoint from weights of another program, for resume_from_checkpoint.

    It holds the model alone; from a folder of DeepSpeed also the optimizer's state. No code of the file is
    run: a .pt whose pickle needs code is refused, the pickle in a torch DCP directory may name nothing but the records
    that torch writes (--trust lifts that), and what DeepSpeed's files name gets inert stand-ins.

    \b
    Examples:
      distributed checkpoint import model.safetensors --to checkpoints
      distributed checkpoint import lightning.ckpt --to checkpoints --key state_dict --strip-prefix model.
      distributed checkpoint import deepspeed-output --to checkpoints
    """
    from distributed.cli.checkpoint.transfers import import_from

    import_from(source, to, step=step, key=key, strip_prefix=strip_prefix, weights_only=weights_only, trust=trust)


def parse_size(text: str) -> int:
    """
    >>> parse_size("5GB"), parse_size("1.5 MiB"), parse_size("300")
    (5000000000, 1572864, 300)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", text, re.IGNORECASE)
    size = 0
    if found:
        power = " kmgt".index(found.group(2).lower() or " ")
        size = int(float(found.group(1)) * (1024 if found.group(3) else 1000) ** power)
    if size < 1:
        raise typer.BadParameter(f"{text!r} is not a size: write 5GB, 500MB or 1GiB", param_hint="--max-shard-size")
    return size
