"""Weights out of checkpoints and into them, with a bar and a summary."""

from __future__ import annotations

from distributed.checkpoint.exchange.averages import as_model
from distributed.checkpoint.exchange.catalog import open_one
from distributed.checkpoint.exchange.choosing import open_chosen
from distributed.checkpoint.exchange.export import export_checkpoint
from distributed.checkpoint.exchange.importing import import_weights
from distributed.checkpoint.restore.reading import load
from distributed.cli.checkpoint.text import byte_bar, console, size
from distributed.core.errors import CheckpointError, ConfigError
from distributed.core.plan import LoraPlan


def choose(path: str, *, best: bool, step: int | None) -> str:
    """The path of the checkpoint that is meant: the last one of a folder, unless another is asked for."""
    if best and step is not None:
        raise ConfigError(
            "both --best and --step are given", why="the two options may name two checkpoints", do="leave one out"
        )
    if best or step is not None:
        return open_chosen(path, "best" if best else step or 0).path
    return path


def export_to(
    path: str,
    to: str,
    format: str,
    *,
    max_shard_bytes: int | None,
    with_optimizer: bool,
    force: bool,
    averaged: str | None = None,
) -> None:
    opened = open_one(path) if averaged is None else as_model(open_one(path), averaged)
    with byte_bar("exporting") as progress:
        done = export_checkpoint(
            opened,
            to,
            format,
            max_shard_bytes=max_shard_bytes,
            with_optimizer=with_optimizer,
            force=force,
            progress=progress,
        )
    screen = console()
    screen.print(f"{opened.path}: {done.tensors} tensors, {size(done.total_bytes)}, written as {format}")
    for file in done.files:
        screen.print(f"  {file}")
    for alias, name in done.tied.items():
        screen.print(f"  tied: {alias} is {name}; safetensors.torch.load_model puts it back")
    if done.left_out:
        screen.print(f"  left out, because it is no tensor: {', '.join(done.left_out)}", style="yellow")


def export_adapter(path: str, to: str) -> None:
    """What `lora=` has trained, for `PeftModel.from_pretrained(base, to)`."""
    opened = open_one(path)
    memory = opened.manifest.meta.get("plan", {}).get("memory", {})
    if not memory.get("lora"):
        raise CheckpointError(
            f"{opened.path} holds no adapters", why="the model was not trained with lora=", do="leave --format peft out"
        )
    from distributed.strategies.model.lora import save_adapter  # an extra, and torch

    with byte_bar("exporting") as progress:
        weights = load(opened.path, ranks=(), progress=progress).shared["model"]
    plan = LoraPlan(**memory["lora"] | {"targets": tuple(memory["lora"]["targets"])})
    save_adapter(weights, plan, to)
    console().print(f"{opened.path}: adapters of rank {plan.rank}, written as peft")
    console().print(f"  {to}")


def import_from(
    source: str, to: str, *, step: int, key: str | None, strip_prefix: str, weights_only: bool, trust: bool
) -> None:
    with byte_bar("importing") as progress:
        done = import_weights(
            source,
            to,
            step=step,
            key=key,
            strip_prefix=strip_prefix,
            weights_only=weights_only,
            trust=trust,
            progress=progress,
        )
    screen = console()
    screen.print(
        f"{done.path}: {done.tensors} tensors, {size(done.total_bytes)} from {done.format}, "
        f"{size(done.written_bytes)} of it new"
    )
    if done.left_out:
        screen.print(f"  left out, because it is no tensor: {', '.join(done.left_out)}", style="yellow")
    if done.with_optimizer:
        screen.print("  with the optimizer's state, by the names of the parameters")
    if done.note:
        screen.print(f"  {done.note}", style="yellow")
    screen.print(f"  to begin from it: resume_from_checkpoint={done.path}")
