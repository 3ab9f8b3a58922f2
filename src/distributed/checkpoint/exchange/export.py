"""Export: a checkpoint's weights as safetensors, whole or in shards, or as a plain `.pt` state dict.

Safetensors are streamed a chunk at a time; a `.pt` holds the model in memory once. A file has its name only when it is
whole, and of sharded ones the index comes last.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from distributed.checkpoint.exchange.catalog import Opened
from distributed.checkpoint.exchange.files import Counting, Files, check_space
from distributed.checkpoint.exchange.named_tensors import Leaf, TensorReader, component
from distributed.checkpoint.format.manifest import Manifest, Part
from distributed.checkpoint.restore.fetching import Progress
from distributed.checkpoint.restore.reading import load_parts
from distributed.checkpoint.storage.chunks import ChunkStore
from distributed.core.errors import CheckpointError, ConfigError

FORMATS = ("safetensors", "pt")
_SAFE_TYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.safetensors")
Notify = Callable[[int], None]  # the number of bytes done since the last call


@dataclass(frozen=True)
class Exported:
    files: tuple[str, ...]  # the one to pass on stands first: the file, or the index of the shards
    tensors: int
    total_bytes: int
    tied: Mapping[str, str]  # names that are not written, and the name under which their tensor is
    left_out: tuple[str, ...]  # what is no tensor, which safetensors cannot hold


def export_checkpoint(
    checkpoint: Opened,
    to: str,
    format: str = "safetensors",
    *,
    max_shard_bytes: int | None = None,
    with_optimizer: bool = False,
    force: bool = False,
    progress: Progress = lambda done, total: None,
) -> Exported:
    """Write the model's weights to a file of this machine; `with_optimizer` adds the optimizer's state."""
    if format not in FORMATS:
        raise ConfigError(f"the format {format!r} is not known", do=f"choose one of: {', '.join(FORMATS)}")
    if "://" in to:
        raise ConfigError(
            f"{to} is not a path", why="exports are written to this machine", do="write it here, then copy"
        )
    if format == "pt" and max_shard_bytes is not None:
        raise ConfigError("--max-shard-size has no effect on a .pt file", do="leave it out, or use safetensors")
    target = _target(to, format)
    try:
        if format == "pt":
            return _export_pt(checkpoint, target, with_optimizer, force, progress)
        return _export_safetensors(
            checkpoint,
            target,
            most_bytes=max_shard_bytes,
            with_optimizer=with_optimizer,
            force=force,
            progress=progress,
        )
    except OSError as failed:
        raise CheckpointError(
            f"{target} cannot be written", why=failed.strerror or str(failed), do="check the folder, or write elsewhere"
        ) from failed


def plan_shards(sizes: Mapping[str, int], most_bytes: int | None) -> list[list[str]]:
    """Names in their order, in as few files as this order needs; a tensor that is larger has a file for itself.

    >>> plan_shards({"a": 4, "b": 4, "c": 9, "d": 1}, 8)
    [['a', 'b'], ['c'], ['d']]
    """
    shards: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if shards[-1] and most_bytes is not None and used + size > most_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def render_header(leaves: Mapping[str, Leaf], metadata: Mapping[str, str]) -> bytes:
    """The head of a safetensors file in which these tensors follow in this order."""
    document: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name, leaf in leaves.items():
        end = at + leaf.entry.nbytes
        kind = _SAFE_TYPES[leaf.entry.dtype]
        document[name] = {"dtype": kind, "shape": list(leaf.entry.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # what follows is aligned
    return len(text).to_bytes(8, "little") + text


def _export_safetensors(
    checkpoint: Opened, target: Path, *, most_bytes: int | None, with_optimizer: bool, force: bool, progress: Progress
) -> Exported:
    leaves, tied, left_out = _named_leaves(component(checkpoint.manifest, "model", checkpoint.path))
    metadata = {"format": "pt"}
    if with_optimizer:
        _add_optimizer(checkpoint, leaves, metadata)
    unknown = [f"{name} ({leaf.entry.dtype})" for name, leaf in leaves.items() if leaf.entry.dtype not in _SAFE_TYPES]
    if unknown or "__metadata__" in leaves:
        raise CheckpointError(
            f"{len(unknown) or 1} tensors cannot be written as safetensors",
            why=f"the format has no type for {', '.join(unknown[:5])}"
            if unknown
            else "__metadata__ is not free as a name",
            do="use --format pt",
        )
    shards = plan_shards({name: leaf.entry.nbytes for name, leaf in leaves.items()}, most_bytes)
    names = [target.name]
    index = target.with_name(f"{target.name}.index.json")
    if len(shards) > 1:
        names = [f"{target.stem}-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    stale = _clear_the_way(target, index, force)
    total = sum(leaf.entry.nbytes for leaf in leaves.values())
    check_space(target.parent, total)
    reader = TensorReader(checkpoint.storage, checkpoint.manifest)
    reader.check_sizes(list(leaves.values()))
    notify = _adder(progress, total)
    with Files(target.parent) as files:
        for number, (file, shard) in enumerate(zip(names, shards, strict=True)):
            own = {name: leaves[name] for name in sorted(shard, key=lambda name: -_itemsize(leaves[name]))}
            held = {alias: name for alias, name in tied.items() if name in own}  # as safetensors' save_model has it
            with files.create(file) as stream:
                _write_tensors(stream, own, held | metadata, reader, notify)
            if number == 0 and with_optimizer:
                metadata["optimizer"] = f"see {file}"
        if len(shards) > 1:
            weights = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
            document = {"metadata": {"total_size": total}, "weight_map": weights}
            with files.create(index.name) as stream:
                stream.write((json.dumps(document, indent=2) + "\n").encode())
        files.publish(replaced=stale)
    written = [str(target.parent / name) for name in names]
    first = [str(index)] if len(shards) > 1 else []
    return Exported((*first, *written), len(leaves), total, tied, left_out)


def _write_tensors(
    stream: IO[bytes], leaves: Mapping[str, Leaf], metadata: Mapping[str, str], reader: TensorReader, notify: Notify
) -> None:
    stream.write(render_header(leaves, metadata))
    for leaf in leaves.values():
        for block in reader.blocks(leaf):
            stream.write(block)
            notify(len(block))


def _export_pt(checkpoint: Opened, target: Path, with_optimizer: bool, force: bool, progress: Progress) -> Exported:
    _, tied, _ = _named_leaves(component(checkpoint.manifest, "model", checkpoint.path))
    wanted = ["model", "optimizer"] if with_optimizer else ["model"]
    part = _narrow(checkpoint.manifest, wanted, checkpoint.path)
    _clear_the_way(target, None, force)
    check_space(target.parent, part.nbytes)
    store = ChunkStore(checkpoint.storage)
    halves = 2 * part.nbytes  # to read and to write
    (tree,) = load_parts(
        checkpoint.manifest, [part], store, lambda done, total: progress(done * part.nbytes // total, halves)
    )
    with Files(target.parent) as files:
        with files.create(target.name) as stream:
            counting: Any = Counting(stream, lambda done: progress(min(part.nbytes + done, halves), halves))
            torch.save(tree if with_optimizer else tree["model"], counting)
        files.publish()
    # Tied tensors share their memory in a .pt, so every name is there.
    return Exported((str(target),), len(part.tensors) + len(tied), part.nbytes, {}, ())


def _named_leaves(model: Any) -> tuple[dict[str, Leaf], dict[str, str], tuple[str, ...]]:
    """Tensors by name, the names of those that are tied to one of them, and what is no tensor."""
    if not isinstance(model, dict):
        raise CheckpointError("the model in this checkpoint is not a state dict", do="use --format pt")
    leaves: dict[str, Leaf] = {}
    tied: dict[str, str] = {}
    left_out: list[str] = []
    by_stored: dict[str, str] = {}
    for name, value in model.items():
        if not isinstance(value, Leaf):
            left_out.append(str(name))
        elif value.stored in by_stored:
            tied[str(name)] = by_stored[value.stored]
        else:
            by_stored[value.stored] = str(name)
            leaves[str(name)] = value
    return leaves, tied, tuple(left_out)


def _add_optimizer(checkpoint: Opened, leaves: dict[str, Leaf], metadata: dict[str, str]) -> None:
    """Its tensors under their stored names, optimizer/…, and the rest as JSON that refers to them."""
    component(checkpoint.manifest, "optimizer", checkpoint.path)
    for name, entry in _narrow(checkpoint.manifest, ["optimizer"], checkpoint.path).tensors.items():
        if name in leaves:
            raise CheckpointError(f"{name} is a name of the model and of the optimizer", do="use --format pt")
        leaves[name] = Leaf(name, entry)
    metadata["optimizer"] = json.dumps(checkpoint.manifest.shared.skeleton["optimizer"])


def _narrow(manifest: Manifest, names: list[str], where: str) -> Part:
    """These components alone, with the tensors that they refer to."""
    for name in names:
        component(manifest, name, where)
    skeleton = {name: manifest.shared.skeleton[name] for name in names}
    used = {leaf.stored for name in names for leaf in _leaves(component(manifest, name, where))}
    return Part(skeleton, {name: entry for name, entry in manifest.shared.tensors.items() if name in used})


def _leaves(tree: Any) -> Iterator[Leaf]:
    if isinstance(tree, Leaf):
        yield tree
    elif isinstance(tree, dict | list | tuple):
        for child in tree.values() if isinstance(tree, dict) else tree:
            yield from _leaves(child)


def _target(to: str, format: str) -> Path:
    path, suffix = Path(to), f".{format}"
    if path.is_dir() or to.endswith("/"):
        return path / f"model{suffix}"
    if format == "safetensors" and path.suffix != suffix:
        raise ConfigError(f"{to} does not end in {suffix}", do=f"--to {to}{suffix}, or a folder: --to {to}/")
    return path


def _clear_the_way(target: Path, index: Path | None, force: bool) -> list[Path]:
    """Files of an earlier export that a new one replaces; raises when there are any and `force` is not set."""
    stale = [path for path in (index, target) if path is not None and path.exists()]
    if index is not None and target.parent.is_dir():
        stale += [p for p in sorted(target.parent.glob("*.safetensors")) if _is_shard_of(p.name, target.stem)]
    if stale and not force:
        raise ConfigError(
            f"{stale[0]} exists" + (f", and {len(stale) - 1} files more" if len(stale) > 1 else ""),
            why="an export does not overwrite",
            do="write to another name, or add --force",
        )
    return stale


def _is_shard_of(name: str, stem: str) -> bool:
    return name.startswith(stem) and bool(_SHARD.fullmatch(name[len(stem) :]))


def _itemsize(leaf: Leaf) -> int:
    return leaf.entry.item_bytes


def _adder(progress: Progress, total: int) -> Notify:
    done = 0

    def notify(more: int) -> None:
        nonlocal done
        done += more
        progress(done, total)

    return notify
