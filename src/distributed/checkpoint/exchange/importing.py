"""Import: weights of `.pt`, safetensors, torch DCP or DeepSpeed become a checkpoint that a run can start from.

It holds the model and nothing else, save that a DeepSpeed folder's optimizer comes in too. Where training stands and
the random generators start from the seed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from distributed.checkpoint.exchange.dcp import METADATA, DcpTensor, read_dcp
from distributed.checkpoint.exchange.deepspeed import Gathered, placeholders, read_deepspeed
from distributed.checkpoint.exchange.deepspeed_files import is_deepspeed, is_part
from distributed.checkpoint.exchange.pt import read_pt
from distributed.checkpoint.format.digests import digest_bytes
from distributed.checkpoint.format.manifest import Part, manifest_file, render, step_name
from distributed.checkpoint.format.tensors import as_bytes
from distributed.checkpoint.format.tree_spec import TreeSpec
from distributed.checkpoint.restore.fetching import Progress
from distributed.checkpoint.save.assembly import RankPart, StoredChunk, assemble
from distributed.checkpoint.save.outline import outline
from distributed.checkpoint.storage.chunks import ChunkStore
from distributed.checkpoint.storage.files import Storage, check_name
from distributed.checkpoint.storage.urls import check_writable, open_storage
from distributed.core.errors import CheckpointError, ConfigError
from distributed.core.registry import nearest
from distributed.runtime.host_memory import free_host_memory

_USUAL_KEYS = ("model", "state_dict", "model_state_dict", "module")
_INDEX = ".safetensors.index.json"
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_MAX_INDEX_BYTES = 64 * 2**20


@dataclass(frozen=True)
class ImportedWeights:
    """A state dict from elsewhere, and what came with it. Tensors that share memory are tied."""

    format: str
    tensors: Mapping[str, torch.Tensor]
    left_out: tuple[str, ...] = ()
    optimizer: Mapping[str, Any] | None = None  # state and param_groups, by the names of `tensors`
    step: int = 0  # that the other program had come to, where it says so
    about: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    readers: Mapping[int, Gathered] = field(default_factory=dict)  # by the id of the tensor that stands for one

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.readers[id(tensor)].read() if id(tensor) in self.readers else tensor


@dataclass(frozen=True)
class Imported:
    path: str
    format: str
    tensors: int
    total_bytes: int
    written_bytes: int
    left_out: tuple[str, ...]
    with_optimizer: bool = False
    note: str = ""  # why there is no optimizer, where there could be one


def import_weights(
    source: str,
    to: str,
    *,
    step: int = 0,
    key: str | None = None,
    strip_prefix: str = "",
    weights_only: bool = False,
    trust: bool = False,
    progress: Progress = lambda done, total: None,
) -> Imported:
    """Make a checkpoint from a file or folder of this machine; a run that begins with it counts on from `step`."""
    storage = open_storage(to)
    _refuse_overwriting(storage, step)
    weights = read_weights(source, key=key, trust=trust)
    tensors = _strip(weights.tensors, strip_prefix, source)
    state: dict[str, Any] = {"model": tensors}
    if weights.optimizer is not None and not weights_only:
        state["optimizer"] = _strip_optimizer(weights.optimizer, strip_prefix)
    tree, flat = outline(state)
    check_writable(storage, tree.nbytes)
    about = {"from": os.path.abspath(source), "format": weights.format, "components": list(state)}
    meta = {"imported": about | {"step": weights.step} | dict(weights.about)}
    written = _publish(storage, step, tree, weights=weights, tensors=flat, meta=meta, progress=progress)
    path, note = storage.locate(step_name(step)), "" if weights_only else weights.note
    return Imported(
        path,
        format=weights.format,
        tensors=len(tensors),
        total_bytes=tree.nbytes,
        written_bytes=written,
        left_out=weights.left_out,
        with_optimizer="optimizer" in state,
        note=note,
    )


def _refuse_overwriting(storage: Storage, step: int) -> None:
    if storage.size(manifest_file(step_name(step))) is not None:
        raise ConfigError(
            f"{storage.locate(step_name(step))} exists", why="an import does not overwrite", do="choose another --step"
        )


def read_weights(source: str, *, key: str | None = None, trust: bool = False) -> ImportedWeights:
    """The state dict that a file or folder holds; `key` says where, `trust` lets DCP's metadata run code."""
    path = Path(source)
    if "://" in source:
        raise ConfigError(f"{source} is not a path", why="imports are read from this machine", do="copy it here first")
    if not path.exists():
        raise _missing(path)
    is_dcp = path.is_dir() and (path / METADATA).exists()
    if trust and not is_dcp:
        raise ConfigError(
            "--trust has no effect here", why=f"{source} is no torch DCP directory", do="leave --trust out"
        )
    if is_dcp:
        state, left_out = choose_model(read_dcp(path, trust=trust), key, source)
        needed, free = sum(tensor.nbytes for tensor in state.values()), free_host_memory()
        if needed > free:
            raise CheckpointError(
                f"the model has {needed / 2**30:.1f} GiB, and this machine has {free / 2**30:.1f} GiB of memory free",
                do="import it on a larger machine",
            )
        return ImportedWeights("dcp", {name: tensor.read() for name, tensor in state.items()}, left_out)
    if is_deepspeed(path):
        if key is not None:
            raise ConfigError("--key has no effect here", why="DeepSpeed saves one state dict", do="leave --key out")
        return _deepspeed_weights(source)
    if is_part(path) and key is None:
        raise CheckpointError(
            f"{source} is one file of a DeepSpeed save",
            why="DeepSpeed splits the model over several files",
            do=f"pass its folder: {path.parent}",
        )
    safe = _find_safetensors(path)
    if safe is not None:
        if key is not None:
            raise ConfigError("--key has no effect here", why="safetensors hold one state dict", do="leave --key out")
        tensors = _read_index(safe) if safe.name.endswith(".json") else _read_safetensors(safe)
        return ImportedWeights("safetensors", tensors)
    if path.is_file() and (path.suffix in _TORCH_SUFFIXES or _begins_with(path, b"PK")):
        state, left_out = choose_model(read_pt(path), key, source)
        return ImportedWeights("pt", state, left_out)
    raise CheckpointError(
        f"{source} cannot be imported",
        why="the source is no .pt or .safetensors file, nor a folder of *.safetensors, of torch's DCP or of DeepSpeed",
        do="pass such a file or folder",
    )


def _deepspeed_weights(source: str) -> ImportedWeights:
    found = read_deepspeed(source)
    readers: dict[int, Gathered] = {}
    made: dict[int, torch.Tensor] = {}
    model = placeholders(found.model, readers, made)
    optimizer = None if found.optimizer is None else placeholders(found.optimizer, readers, made)
    note = f"the optimizer's state is left out: {found.why_no_optimizer}" if optimizer is None else ""
    return ImportedWeights(
        "deepspeed",
        tensors=model,
        left_out=found.left_out,
        optimizer=optimizer,
        step=found.step,
        about=found.about,
        note=note,
        readers=readers,
    )


def choose_model(tree: Any, key: str | None, where: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The state dict in what was saved, and what is no tensor in it.

    >>> choose_model({"state_dict": {"w": torch.ones(2)}, "epoch": 3}, None, "a.ckpt")[0]
    {'w': tensor([1., 1.])}
    """
    chosen = tree
    if isinstance(tree, Mapping) and key not in (None, "."):
        assert key is not None
        chosen = _at(tree, key, where)
    elif isinstance(tree, Mapping) and key is None and any(isinstance(value, Mapping) for value in tree.values()):
        usual = [name for name in _USUAL_KEYS if _holds_tensors(tree.get(name))]
        if len(usual) != 1:
            raise CheckpointError(
                f"{where} does not say which of its parts is the model",
                why=f"the file holds {', '.join(map(str, list(tree)[:12]))}",
                do="name it: --key NAME; or --key . for the tensors beside them",
            )
        chosen = tree[usual[0]]
    if not _holds_tensors(chosen):
        raise CheckpointError(
            f"{where} holds no state dict" + (f" at {key}" if key else ""),
            why=f"a state dict is names with tensors, and this is a {type(chosen).__name__} without",
            do="save one: torch.save(model.state_dict(), 'weights.pt')",
        )
    state = {str(name): value for name, value in chosen.items() if _is_tensor(value)}
    return state, tuple(str(name) for name, value in chosen.items() if not _is_tensor(value))


def _publish(
    storage: Storage,
    step: int,
    tree: TreeSpec,
    *,
    weights: ImportedWeights,
    tensors: Mapping[str, torch.Tensor],
    meta: Mapping[str, Any],
    progress: Progress,
) -> int:
    """A save of one process that copies no more than a chunk; the manifest comes last. Returns the bytes written."""
    chunks, stored, written, done = ChunkStore(storage), [], 0, 0
    last: tuple[str, Any] = ("", None)
    for chunk in tree.plan:
        parts = []
        for byte_range in chunk.ranges:
            if last[0] != byte_range.tensor:
                last = (byte_range.tensor, as_bytes(weights.read(tensors[byte_range.tensor]).detach()).numpy())
            parts.append(last[1][byte_range.start : byte_range.start + byte_range.length])
        content = parts[0] if len(parts) == 1 else np.concatenate(parts)
        digest, more = chunks.put(content)
        blocks = (digest,) if len(parts) == 1 else tuple(digest_bytes(part) for part in parts)
        stored.append(StoredChunk(digest, blocks))
        written, done = written + more, done + chunk.length
        progress(done, tree.nbytes)
    part = RankPart(0, tree.signature, dict(enumerate(stored)), Part({}, {}), {}, written)
    manifest = assemble(step, tree, [part], meta=meta, metric=None, frameworks={"torch": str(torch.__version__)})
    chunks.check_sizes(dict(manifest.chunks))
    storage.write(manifest_file(step_name(step)), render(manifest))
    return written


def _find_safetensors(path: Path) -> Path | None:
    """The file or the index of shards that a path means."""
    if path.is_file():
        return path if path.suffix == ".safetensors" or path.name.endswith(_INDEX) else None
    for pattern in (f"*{_INDEX}", "*.safetensors"):
        found = sorted(path.glob(pattern))
        if len(found) > 1:
            names = ", ".join(file.name for file in found[:5])
            raise CheckpointError(f"{path} holds {len(found)} of them", why=names, do="pass one of these files")
        if found:
            return found[0]
    return None


def _read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Tensors that are read when they are used; those of an optimizer that our export put beside them are not taken."""
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            names = [name for name in file.keys() if not ("optimizer" in metadata and name.startswith("optimizer/"))]  # noqa: SIM118
            tensors = {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError, ValueError) as bad:
        raise CheckpointError(
            f"{path} is not a sound safetensors file", why=str(bad)[:300], do="check the file, or copy it again"
        ) from bad
    # safetensors' save_model and our export write a tied tensor once and note its other names.
    return tensors | {
        alias: tensors[name] for alias, name in metadata.items() if alias not in tensors and name in tensors
    }


def _read_index(index: Path) -> dict[str, torch.Tensor]:
    try:
        if index.stat().st_size > _MAX_INDEX_BYTES:
            raise ValueError(f"it is longer than {_MAX_INDEX_BYTES} bytes")
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted({check_name(file) for file in weight_map.values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as bad:
        why = f"{type(bad).__name__}: {str(bad)[:200]}"
        raise CheckpointError(f"{index} is not an index of safetensors", why=why, do="check the file") from bad
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        tensors |= _read_safetensors(index.parent / file)
    # Our export notes in every shard that tensors of an optimizer are beside the model's; they were not taken.
    lost = [name for name in weight_map if name not in tensors and not name.startswith("optimizer/")]
    if lost:
        raise CheckpointError(
            f"{len(lost)} tensors that {index} names are missing",
            why=f"{lost[0]} is not in {weight_map[lost[0]]}",
            do="copy all shards again",
        )
    order = [*(name for name in weight_map if name in tensors), *(name for name in tensors if name not in weight_map)]
    return {name: tensors[name] for name in order}


def _at(tree: Mapping[Any, Any], key: str, where: str) -> Any:
    """A part by its name, or by names with dots between them."""
    if key in tree:
        return tree[key]
    inner: Any = tree
    for name in key.split("."):
        if not isinstance(inner, Mapping) or name not in inner:
            held = [str(known) for known in inner] if isinstance(inner, Mapping) else []
            close = nearest(name, held) or held[:12]
            raise CheckpointError(f"{where} holds no {key}", do=f"choose one of: {', '.join(close)}")
        inner = inner[name]
    return inner


def _strip(tensors: Mapping[str, torch.Tensor], prefix: str, where: str) -> dict[str, torch.Tensor]:
    if not prefix:
        return dict(tensors)
    if not any(name.startswith(prefix) for name in tensors):
        names = ", ".join(list(tensors)[:3])
        raise ConfigError(
            f"no name in {where} begins with {prefix!r}", why=f"the names are {names} …", do="leave --strip-prefix out"
        )
    renamed = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    if len(renamed) != len(tensors):
        raise ConfigError(f"without {prefix!r} two names in {where} are the same", do="leave --strip-prefix out")
    return renamed


def _strip_optimizer(optimizer: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The same for its names, of which those of the weights have shown that no two become one."""
    groups = [
        group | {"params": [name.removeprefix(prefix) for name in group["params"]]}
        for group in optimizer["param_groups"]
    ]
    return {
        "state": {name.removeprefix(prefix): held for name, held in optimizer["state"].items()},
        "param_groups": groups,
    }


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, Mapping) and any(_is_tensor(item) for item in value.values())


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor | DcpTensor)


def _begins_with(path: Path, mark: bytes) -> bool:
    with open(path, "rb") as file:
        return file.read(len(mark)) == mark


def _missing(path: Path) -> CheckpointError:
    beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    close = nearest(path.name, beside)
    hint = f"did you mean {' or '.join(str(path.parent / name) for name in close)}?" if close else "check the path"
    return CheckpointError(f"{path} does not exist", do=hint)
