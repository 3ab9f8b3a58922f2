"""Exchange: a checkpoint's tensors one at a time, under the names that other programs know them by.

Export and diff go through this, so that a model need not fit into memory to be written elsewhere or compared.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from distributed.checkpoint.format.boxes import slabs
from distributed.checkpoint.format.layout import CHUNK_BYTES
from distributed.checkpoint.format.manifest import Manifest, Part, TensorEntry
from distributed.checkpoint.format.parsing import Damaged
from distributed.checkpoint.format.skeleton import unflatten
from distributed.checkpoint.format.tensors import TensorMemory, as_bytes
from distributed.checkpoint.restore.gathering import Gathering
from distributed.checkpoint.storage.chunks import ChunkStore
from distributed.checkpoint.storage.files import Storage
from distributed.core.errors import CheckpointError
from distributed.runtime.tensor_shard import Box, TensorShard

_KEPT_CHUNKS = 4  # small tensors share chunks, and neighbours are read one after another
_RUN_BYTES = 16 * CHUNK_BYTES  # of a tensor in boxes at once: less, and chunks of columns are read more often


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
        """A tensor's bytes in row-major order, in blocks of at most one chunk, or of 64 MiB where it is in boxes."""
        if any(piece.ranges is not None for piece in leaf.entry.pieces):
            for run in self.runs(leaf):
                yield as_bytes(run).numpy()
            return
        with _belongs_to(leaf):
            for piece in leaf.entry.pieces:
                for ref in piece.refs:
                    yield memoryview(self._chunk(ref.chunk))[ref.offset : ref.offset + ref.length]

    def runs(self, leaf: Leaf) -> Iterator[torch.Tensor]:
        """A tensor's elements in row-major order, 64 MiB at a time: the same cuts however it is stored."""
        entry, itemsize = leaf.entry, leaf.entry.item_bytes
        if all(piece.ranges is None for piece in entry.pieces):
            entry = replace(entry, shape=(entry.nbytes // itemsize,))
        count, most = entry.nbytes // itemsize, _RUN_BYTES // itemsize
        for start in range(0, count, most):
            found = self._gather(leaf, entry, tuple(slabs(entry.shape, start, min(start + most, count))))
            assert isinstance(found, TensorShard)
            pieces = [piece.reshape(-1) for _, piece in found.pieces]
            yield pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def tensor(self, leaf: Leaf) -> torch.Tensor:
        whole = self._gather(leaf, leaf.entry, None)
        assert isinstance(whole, torch.Tensor)
        return whole

    def _gather(self, leaf: Leaf, entry: TensorEntry, boxes: tuple[Box, ...] | None) -> torch.Tensor | TensorShard:
        with _belongs_to(leaf):
            gathering = Gathering(leaf.stored, entry, boxes, TensorMemory())
            gathering.allocate()
            for run in gathering.runs:
                gathering.take(run, self._chunk(run.ref.chunk))
        found: torch.Tensor | TensorShard = gathering.result
        return found

    def _chunk(self, digest: str) -> bytes:
        if digest not in self._recent:
            self._recent[digest] = self._chunks.get(digest, self._manifest.chunks[digest])
            if len(self._recent) > _KEPT_CHUNKS:
                self._recent.popitem(last=False)
        self._recent.move_to_end(digest)
        return self._recent[digest]


@contextmanager
def _belongs_to(leaf: Leaf) -> Iterator[None]:
    """Damage is reported with the tensor that it is found in."""
    try:
        yield
    except Damaged as bad:
        first = bad.problems[0]
        raise Damaged(f"{first.what}; it belongs to {leaf.stored}", why=first.why, do=first.do) from bad


def component(manifest: Manifest, name: str, where: str) -> Any:
    """A component of the shared tree, with leaves in place of its tensors."""
    if name not in manifest.shared.skeleton:
        held = ", ".join(manifest.shared.skeleton) or "nothing"
        raise CheckpointError(
            f"{where} holds no {name}", why=f"the checkpoint holds {held}", do="choose another checkpoint"
        )
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
