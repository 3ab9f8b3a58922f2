"""Exchange: a checkpoint's tensors one at a time, under the names that other programs know them by.

Export and diff go through this, so that a model need not fit into memory to be written elsewhere or compared.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from distributed.checkpoint.chunks import ChunkStore, Damaged
from distributed.checkpoint.digests import as_bytes
from distributed.checkpoint.files import Storage
from distributed.checkpoint.manifest import Manifest, Part, TensorEntry
from distributed.checkpoint.reading import load_parts
from distributed.checkpoint.tree import unflatten
from distributed.core.errors import CheckpointError

_KEPT_CHUNKS = 4  # small tensors share chunks, and neighbours are read one after another


@dataclass(frozen=True)
class Leaf:
    """A stored tensor in the place of the tensor itself; two names that are tied have the same one."""

    stored: str
    entry: TensorEntry


class TensorReader:
    """Tensors of one checkpoint, every chunk of which is compared with its hash when it is read."""

    def __init__(self, storage: Storage, manifest: Manifest) -> None:
        self._manifest, self._chunks = manifest, ChunkStore(storage)
        self._recent: OrderedDict[str, bytes] = OrderedDict()

    def check_sizes(self, leaves: list[Leaf]) -> None:
        """Raises unless all chunks of these tensors are there; a quick look before long work."""
        needed = {ref.chunk for leaf in leaves for piece in leaf.entry.pieces for ref in piece.refs}
        self._chunks.check_sizes({digest: self._manifest.chunks[digest] for digest in needed})

    def blocks(self, leaf: Leaf) -> Iterator[Any]:
        """A tensor's bytes in row-major order, in blocks of at most one chunk unless it was sharded."""
        try:
            if all(piece.ranges is None for piece in leaf.entry.pieces):
                for piece in leaf.entry.pieces:
                    for ref in piece.refs:
                        yield memoryview(self._chunk(ref.chunk))[ref.offset : ref.offset + ref.length]
            else:
                part = Part({"tensor": {"__tensor__": "tensor"}}, {"tensor": leaf.entry})
                yield as_bytes(load_parts(self._manifest, [part], self._chunks)[0]["tensor"]).numpy()
        except Damaged as bad:
            first = bad.problems[0]
            raise Damaged(f"{first.what}; it belongs to {leaf.stored}", why=first.why, do=first.do) from bad

    def tensor(self, leaf: Leaf) -> torch.Tensor:
        whole = torch.empty(leaf.entry.shape, dtype=leaf.entry.torch_dtype)
        memory, at = as_bytes(whole).numpy(), 0
        for block in self.blocks(leaf):
            data = np.frombuffer(block, dtype=np.uint8)
            memory[at : at + len(data)] = data
            at += len(data)
        return whole

    def _chunk(self, digest: str) -> bytes:
        if digest not in self._recent:
            self._recent[digest] = self._chunks.get(digest, self._manifest.chunks[digest])
            if len(self._recent) > _KEPT_CHUNKS:
                self._recent.popitem(last=False)
        self._recent.move_to_end(digest)
        return self._recent[digest]


def component(manifest: Manifest, name: str, where: str) -> Any:
    """A component of the shared tree, with leaves in place of its tensors."""
    if name not in manifest.shared.skeleton:
        held = ", ".join(manifest.shared.skeleton) or "nothing"
        raise CheckpointError(f"{where} holds no {name}", why=f"it holds {held}", do="choose another checkpoint")
    return leaf_tree(manifest.shared)[name]


def leaf_tree(part: Part) -> dict[str, Any]:
    leaves: dict[str, Any] = {name: Leaf(name, entry) for name, entry in part.tensors.items()}
    return dict(unflatten(part.skeleton, leaves))


def walk(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf, tensor or scalar, with its path.

    >>> dict(walk({"state": {0: {"step": 3}}, "groups": [{"lr": 0.1}]}))
    {'state/0/step': 3, 'groups/0/lr': 0.1}
    """
    if isinstance(tree, dict | list | tuple):
        for key, child in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from walk(child, f"{path}/{key}" if path else str(key))
    else:
        yield path, tree
