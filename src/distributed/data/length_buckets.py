"""Length buckets: batches of samples of similar length, so that little of what is computed is padding.

A shuffled epoch is cut into pools of some hundred global batches, each pool is sorted by length and cut into batches,
and both the batches of the epoch and the samples within each batch are shuffled again. All of it is a function of the
seed, the epoch, the lengths and the size of a global batch; the number of ranks has no part in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from distributed.core.errors import DataError
from distributed.data.order import derive_seed, permutation

_POOL = 128  # global batches that are sorted together: more waste less, and mix less
_PARTS = 4  # into which a short epoch is cut at least, or each epoch would have the same batches
_KEYS = ("input_ids", "tokens", "text", "length")  # of a sample with named entries, where none is said

Lengths = np.ndarray[Any, np.dtype[np.int32]]
Order = np.ndarray[Any, np.dtype[np.int64]]


def bucketed_order(lengths: Lengths, batch: int, seed: int, epoch: int) -> Order:
    """The order of an epoch, of which each `batch` in a row have similar lengths; the last ones, which are fewer, any.

    The first epoch begins with the batch that has the longest sample: one that does not fit into memory fails at once.

    >>> lengths = np.array([3, 50] * 16, dtype=np.int32)
    >>> order = bucketed_order(lengths, 2, seed=0, epoch=0)
    >>> sorted(order) == list(range(32)), lengths[order[:8]].tolist()
    (True, [50, 50, 3, 3, 50, 50, 50, 50])
    """
    shuffled = permutation(len(lengths), seed, epoch)
    steps = len(lengths) // batch
    pool = batch * max(1, min(_POOL, steps // _PARTS))
    pools = [shuffled[at : min(at + pool, steps * batch)] for at in range(0, steps * batch, pool)]
    ordered = [drawn[np.argsort(lengths[drawn], kind="stable")] for drawn in pools]
    groups = np.concatenate([shuffled[:0], *ordered]).reshape(steps, batch)
    high, low = divmod(derive_seed(seed, "buckets", epoch), 2**32)
    draws = np.random.RandomState([low, high])
    groups = groups[draws.permutation(steps)]
    within = np.argsort(draws.random_sample(groups.shape), axis=1, kind="stable")
    groups = np.take_along_axis(groups, within, axis=1)
    if epoch == 0 and steps:
        longest = int(np.argmax(lengths[groups].max(axis=1)))
        groups[[0, longest]] = groups[[longest, 0]]
    return np.concatenate([groups.reshape(-1), shuffled[steps * batch :]])


def padding(order: Order, lengths: Lengths, size: int) -> float:
    """The part of the padded entries that is padding, where each `size` samples in a row are padded to one length.

    >>> round(padding(np.arange(4), np.array([1, 3, 2, 2], dtype=np.int32), 2), 3)
    0.2
    """
    taken = lengths[order]
    whole = len(taken) // size * size
    rows = taken[:whole].reshape(-1, size)
    padded = int(rows.max(axis=1, initial=0).sum()) * size + int(taken[whole:].max(initial=0)) * (len(taken) - whole)
    return 1 - int(taken.sum()) / padded if padded else 0.0


@dataclass(frozen=True)
class SampleLength:
    """What the length of a sample is: a function of it, the name of an entry, or "" for what it looks like."""

    of: Callable[[Any], int] | str = ""

    @property
    def name(self) -> str:
        if isinstance(self.of, str):
            return repr(self.of) if self.of else "len"
        return getattr(self.of, "__qualname__", type(self.of).__name__)

    def __call__(self, sample: Any) -> int:
        """
        >>> SampleLength()({"input_ids": [7, 8, 9], "label": 1}), SampleLength("n")({"n": 4}), SampleLength()(("ab", 0))
        (3, 4, 2)
        """
        if not isinstance(self.of, str):
            return int(self.of(sample))
        if self.of:
            return _length_of(sample[self.of])
        if isinstance(sample, Mapping):
            return _length_of(sample[next(key for key in _KEYS if key in sample)])
        return _length_of(sample[0] if isinstance(sample, tuple | list) and len(sample) else sample)

    def measure(self, dataset: Any, index: int) -> int:
        """Of one sample of a dataset."""
        try:
            return self(dataset[index])
        except Exception as failed:
            raise DataError(
                f"the length of sample {index} is not known: {type(failed).__name__}: {failed}",
                why=f"bucket_by_length asked for {self.name}",
                do="name the entry whose length counts, as in bucket_by_length=input_ids; or give a function: "
                "sampler=LengthBucketSampler(dataset, batch_size, length=lambda sample: …)",
            ) from failed


def _length_of(value: Any) -> int:
    """Of a sequence; a number is the length itself."""
    return len(value) if hasattr(value, "__len__") else int(value)


class LengthBucketSampler(Sampler[int]):
    """A sampler of batches of similar length, with `set_epoch`; a Trainer makes the order for all of its ranks.

    `length` is a function of a sample, the name of one of its entries, or the lengths of all samples, which then need
    not be read. In a Trainer the seed is that of the run, and batches are those of all ranks together.

    >>> data = [[0] * n for n in (3, 9, 3, 9, 3, 9, 3, 9)]
    >>> sampler = LengthBucketSampler(data, batch_size=2)
    >>> sorted(sampler) == list(range(8))
    True
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        length: Callable[[Any], int] | str | Sequence[int] = "",
        *,
        seed: int = 0,
    ) -> None:
        is_rule = isinstance(length, str) or callable(length)
        self.dataset, self.batch_size, self.seed, self._epoch = dataset, batch_size, seed, 0
        self.rule = SampleLength(length if isinstance(length, str) or callable(length) else "")
        self.lengths: Lengths | None = None if is_rule else as_lengths(length, len(dataset))  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[int]:
        if self.lengths is None:
            found = [self.rule.measure(self.dataset, index) for index in range(len(self.dataset))]
            self.lengths = as_lengths(found, len(self.dataset))
        return iter(bucketed_order(self.lengths, self.batch_size, self.seed, self._epoch).tolist())


def as_lengths(lengths: Sequence[int], samples: int) -> Lengths:
    """Checked, and the same numbers as an array."""
    found = np.asarray(lengths)
    if found.shape != (samples,) or found.dtype.kind not in "iu" or (samples and found.min() < 0):
        raise DataError(
            f"the lengths given for {samples} samples are {found.dtype} of the shape {list(found.shape)}",
            why="each sample has one length, a whole number",
            do="pass one integer a sample, in the dataset's order",
        )
    return found.astype(np.int32)


def check_lengths(lengths: Lengths) -> None:
    """Refuse lengths by which nothing can be sorted."""
    if len(lengths) and lengths.min() == lengths.max():
        raise DataError(
            f"bucket_by_length, and all {len(lengths)} samples have the length {lengths[0]}",
            why="there is no padding to be saved",
            do="leave bucket_by_length out",
        )


def digest_of(lengths: Lengths) -> str:
    return hashlib.blake2b(np.ascontiguousarray(lengths).data, digest_size=8).hexdigest()
