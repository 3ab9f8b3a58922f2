"""Sources: what a user passes to `fit`, in a form that can be sent to the processes that train."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from distributed.core.errors import DataError
from distributed.data.order import derive_seed

_STRUCTURES = "x, (x, y) or (x, y, sample_weight) of arrays, a tf.data.Dataset of batches, or a function returning one"


class Source(Protocol):
    """Data as it was given."""

    @property
    def samples(self) -> int | None: ...  # None: not known

    @property
    def batch_size(self) -> int | None: ...

    def made(self, seed: int) -> Arrays | Stream: ...


@dataclass(frozen=True)
class Arrays:
    """Columns of one length: inputs, and perhaps targets and sample weights."""

    columns: tuple[Any, ...]
    shuffle: bool = True
    batch_size: int | None = None

    @property
    def samples(self) -> int:
        return rows(self.columns)

    def take(self, positions: Any) -> Any:
        return map_tree(lambda column: column[positions], self.columns)

    def made(self, seed: int) -> Arrays:
        return self


@dataclass(frozen=True)
class Stream:
    """A dataset that can be opened for any epoch; what it has shuffled, it shuffles again in the same way."""

    open: Callable[[int], Any]

    def epoch(self, epoch: int) -> Any:
        return self.open(epoch)

    @property
    def samples(self) -> int | None:
        return None


@dataclass(frozen=True)
class Given:
    """A dataset of this process."""

    dataset: Any
    batch_size: int | None = None
    samples: int | None = None

    def made(self, seed: int) -> Stream:
        return Stream(_Passes(self.dataset))

    def __reduce__(self) -> Any:
        """Sent as the graph that it is; where that is not all, it cannot be."""
        policy = 2  # fail where a part of it lives in this process only, such as a Python function
        try:
            variant = self.dataset._variant_tensor
            graph = tf.raw_ops.DatasetToGraphV2(input_dataset=variant, external_state_policy=policy)
        except tf.errors.OpError as failed:
            raise DataError(
                "this tf.data.Dataset cannot be sent to other processes",
                why=str(failed.message).splitlines()[0],
                do="pass a function that returns it: fit(lambda: make_dataset())",
            ) from failed
        return _given_graph, (graph.numpy(), self.dataset.element_spec, self.batch_size)


def _given_graph(graph: bytes, spec: Any, batch_size: int | None) -> Given:
    from tensorflow.python.data.ops import dataset_ops  # a dataset of a graph has no public door

    variant = tf.raw_ops.DatasetFromGraph(graph_def=graph)
    return Given(dataset_ops._VariantDataset(variant, spec), batch_size)


class _Passes:
    """A dataset that shuffles draws a new order each time it is read: earlier passes are begun, so that this one is the
    same also in a run that did not make them."""

    def __init__(self, dataset: Any) -> None:
        self._dataset, self._begun = dataset, 0

    def __call__(self, epoch: int) -> Any:
        while self._begun < epoch:
            next(iter(self._dataset), None)
            self._begun += 1
        self._begun = epoch + 1
        return self._dataset


@dataclass(frozen=True)
class Made:
    """A function, called in the process that trains; with the epoch, where it takes one."""

    function: Callable[..., Any]
    role: str
    batch_size: int | None = None
    samples: int | None = None

    def made(self, seed: int) -> Arrays | Stream:
        if not self._takes_epoch():
            found = read_source(self._seeded(seed, 0), self.role)
            if isinstance(found, Arrays):
                return found
        return Stream(lambda epoch: _as_dataset(self._seeded(seed, epoch), self.role))

    def _seeded(self, seed: int, epoch: int) -> Any:
        """A shuffle that has no seed of its own gets one of this epoch, the same in every process."""
        tf.random.set_seed(derive_seed(seed, "data", epoch) % 2**31)
        return self.function(epoch) if self._takes_epoch() else self.function()

    def _takes_epoch(self) -> bool:
        return bool(inspect.signature(self.function).parameters)


def _as_dataset(data: Any, role: str) -> Any:
    if isinstance(data, tf.data.Dataset):
        _check_batched(data, role)
        return data
    raise DataError(
        f"the function given as {role} returned a {type(data).__name__}",
        why="one that takes the epoch returns that epoch's tf.data.Dataset",
        do="return a dataset of batches, or take no argument and return arrays",
    )


def read_source(data: Any, role: str, *, shuffle: bool = True) -> Any:
    """The source of what a user passes as `role`."""
    if isinstance(data, Arrays | Given | Made):
        return data
    if isinstance(data, tf.data.Dataset):
        return Given(data, _check_batched(data, role))
    if isinstance(data, np.ndarray | tf.Tensor):
        return _arrays((data,), role, shuffle)
    if isinstance(data, tuple) and 1 <= len(data) <= 3:
        return _arrays(data, role, shuffle)
    if callable(data):
        return Made(data, role)
    is_loader = type(data).__module__.partition(".")[0] == "torch"
    raise DataError(
        f"{role} is a {type(data).__name__}" + (" of torch" if is_loader else ""),
        why=f"{role} must be {_STRUCTURES}",
        do=f"pass {role}=(x, y)",
    )


def _arrays(columns: tuple[Any, ...], role: str, shuffle: bool) -> Arrays:
    while columns and columns[-1] is None:
        columns = columns[:-1]
    found = map_tree(np.asarray, columns)
    lengths = {len(column) if column.ndim else 0 for column in leaves(found)}
    if len(lengths) != 1 or any(column.dtype == object for column in leaves(found)):
        sizes = ", ".join(f"{column.dtype}{list(column.shape)}" for column in leaves(found))
        raise DataError(f"{role} has columns that do not go together: {sizes}", why="each has an entry for each sample")
    return Arrays(found, shuffle)


def _check_batched(dataset: Any, role: str) -> int | None:
    """The size of its batches, where that is fixed."""
    shapes = [spec.shape for spec in leaves(dataset.element_spec)]
    if any(shape.rank == 0 for shape in shapes) or len({shape[0] for shape in shapes if shape.rank}) > 1:
        raise DataError(
            f"{role} is a tf.data.Dataset of single samples",
            why="Keras reads datasets of batches, which are then cut for the replicas",
            do=f"pass {role}=dataset.batch(32)",
        )
    size = shapes[0][0] if shapes and shapes[0].rank else None
    return _batched_as(dataset) if size is None else int(size)


def check_order(source: Any, role: str) -> None:
    """Every process reads the whole of a dataset and keeps its share: so all must read it in one order."""
    if draws_its_own_order(source):
        raise DataError(
            f"{role} shuffles without a seed",
            why="each process would draw an order of its own, and samples would be repeated and left out",
            do="dataset.shuffle(buffer_size, seed=0); the order still differs from epoch to epoch",
        )


def draws_its_own_order(source: Any) -> bool:
    """Whether the graph of a dataset has a shuffle whose seeds are both 0, which means none."""
    if not isinstance(source, Given):
        return False
    try:
        graph = tf.raw_ops.DatasetToGraphV2(input_dataset=source.dataset._variant_tensor, external_state_policy=1)
    except tf.errors.OpError:  # what cannot be written down cannot be looked at
        return False
    definition = tf.compat.v1.GraphDef.FromString(graph.numpy())
    constants = {
        node.name: tf.make_ndarray(node.attr["value"].tensor)
        for node in definition.node
        if node.op == "Const" and node.attr["dtype"].type == tf.int64.as_datatype_enum
    }
    shuffles = (node for node in definition.node if node.op.startswith("Shuffle"))
    return any([int(constants.get(name, 1)) for name in node.input[2:4]] == [0, 0] for node in shuffles)


def _batched_as(dataset: Any) -> int | None:
    """The size that `batch` was called with, read without reading a batch: that would begin a shuffled pass."""
    while dataset is not None and not hasattr(dataset, "_batch_size"):
        dataset = getattr(dataset, "_input_dataset", None)
    return None if dataset is None else int(dataset._batch_size)


def example_of(source: Source, seed: int) -> Any:
    """A batch of the kind that it yields, for building a model; of a dataset only the shapes are read."""
    made = source.made(seed)
    if isinstance(made, Arrays):
        return made.take(slice(0, 1))
    spec = made.epoch(0).element_spec
    batch = map_tree(lambda one: tf.zeros([size or 1 for size in one.shape], one.dtype), spec)
    return batch if isinstance(batch, tuple) else (batch,)


def map_tree(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same structure of tuples, lists and dicts, with each leaf through a function; None stays."""
    if isinstance(tree, Mapping):
        return {key: map_tree(function, value) for key, value in tree.items()}
    if isinstance(tree, tuple):
        return tuple(map_tree(function, value) for value in tree)
    if isinstance(tree, list):
        return [map_tree(function, value) for value in tree]
    return None if tree is None else function(tree)


def leaves(tree: Any) -> list[Any]:
    """
    >>> leaves(({"a": 1, "b": [2, None]}, 3))
    [1, 2, 3]
    """
    if isinstance(tree, Mapping):
        return [leaf for value in tree.values() for leaf in leaves(value)]
    if isinstance(tree, list | tuple):
        return [leaf for value in tree for leaf in leaves(value)]
    return [] if tree is None else [tree]


def rows(batch: Any) -> int:
    """Samples in a batch."""
    first = leaves(batch)[0]
    return int(first.shape[0])
