"""RayRows: a Ray dataset whose rows can be read in any order by every rank, through Ray's object store.

Ray's own iterators hand out blocks as they come, which no later run would repeat. Here the dataset is computed once, in
its own order, and kept in the object store as pages of equal size; a rank then reads the rows that the epoch's order
gives it. So every row is used once an epoch, and a run can resume at any row with any number of ranks.
"""

from __future__ import annotations

import itertools
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from distributed.core.env import worker_env
from distributed.core.errors import DataError
from distributed.core.registry import import_extra

NAMESPACE = "distributed"  # of the actors here; a job's own is known to that job alone
PAGE_BYTES = 4 << 20  # of a page, about: small enough to be fetched whole for a few rows
_OPEN_PAGES = 256  # that a rank keeps hold of; the object store may spill the others to a disk
_BATCH_ROWS = 64  # that are read at once; at most that many are in a page of large rows

_MADE_HERE = itertools.count()  # ranks that run the same script make theirs in the same order

Page = dict[str, np.ndarray[Any, Any]]


def is_ray_dataset(data: object) -> bool:
    """Whether it is Ray's; found without importing Ray."""
    return any(kind.__module__.startswith("ray.data.") and kind.__name__ == "Dataset" for kind in type(data).__mro__)


def read_data(data: object) -> RayRows | None:
    """What `fit` makes of a Ray dataset; None of anything else of Ray's."""
    return RayRows(data) if is_ray_dataset(data) else None


class RayRows(Dataset[Any]):
    """A Ray dataset as a map-style one: what `fit` makes of it, or what you pass to a DataLoader.

        ds = ray.data.read_parquet("s3://…")
        trainer.fit(DataLoader(RayRows(ds, columns=("features", "label")), batch_size=32, shuffle=True))

    With `columns` a sample is a tuple of these, and the last one is the target; without, it is a dict of all. Numbers
    are tensors.
    """

    read_by = "Ray"  # in processes of its own

    def __init__(self, dataset: Any, columns: Sequence[str] | None = None) -> None:
        ray = import_extra("ray", "ray", "Ray Data")
        if not is_ray_dataset(dataset):
            raise DataError(f"RayRows was given a {type(dataset).__name__}", do="pass a ray.data.Dataset")
        if ray.util.client.ray.is_connected():
            raise DataError(
                "the Ray dataset was made over ray://",
                why="rows of such a dataset reach the ranks through the node of this process, which runs on none",
                do="make it in the script that the ranks run: distributed train --script … --address ray://…",
            )
        self._columns = None if columns is None else tuple(columns)
        self._shelf_name, is_rank = _shelf_name()
        self._shelf = _find_shelf(ray, self._shelf_name)
        self._address: str = ray.get_runtime_context().gcs_address
        self._length, self._page_rows = _fill(ray, self._shelf, dataset, self._columns, is_rank)
        self._pages: list[Any] | None = None  # references
        self._open: OrderedDict[int, Page] = OrderedDict()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Rows by their numbers; those of one page are taken out of it at once."""
        by_page: dict[int, list[int]] = {}
        for place, index in enumerate(indices):
            by_page.setdefault(index // self._page_rows, []).append(place)
        samples: list[Any] = [None] * len(indices)
        for number, places in by_page.items():
            rows = [indices[place] % self._page_rows for place in places]
            for place, sample in zip(places, self._take(self._page(number), rows), strict=True):
                samples[place] = sample
        return samples

    def _take(self, page: Page, rows: list[int]) -> Iterable[Any]:
        columns = {name: _values(page[name][rows]) for name in self._columns or page}  # a copy: pages are read-only
        if self._columns is not None:
            return zip(*columns.values(), strict=True)
        return (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))

    def _page(self, number: int) -> Page:
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        ray = import_extra("ray", "ray", "Ray Data")
        page: Page = ray.get(self._references(ray)[number])
        self._open[number] = page
        if len(self._open) > _OPEN_PAGES:
            self._open.popitem(last=False)
        return page

    def _references(self, ray: Any) -> list[Any]:
        """References to the pages, from the dataset's actor on this cluster."""
        if self._pages is None:
            if not ray.is_initialized():
                ray.init(self._address, log_to_driver=False, configure_logging=False)
            shelf = self._shelf or ray.get_actor(self._shelf_name, NAMESPACE)
            self._pages = ray.get(shelf.references.remote())
        return self._pages

    def __getstate__(self) -> dict[str, Any]:
        """For the ranks: references mean nothing in a file, so each rank requests them itself."""
        return self.__dict__ | {"_shelf": None, "_pages": None, "_open": OrderedDict()}


class _Shelf:
    """The actor that computes a dataset once and keeps its pages, for as long as its creator lives."""

    def __init__(self) -> None:
        self._references: list[Any] = []
        self._sizes: tuple[int, int] | None = None

    def fill(self, dataset: Any, columns: tuple[str, ...] | None, is_rank: bool) -> tuple[int, int]:
        """Rows, and rows of a page. Of several ranks that bring the same dataset, the first one's is read."""
        if self._sizes is None:
            import ray
            import ray.data

            _check_room(ray, dataset, is_rank)
            dataset.context.execution_options.preserve_order = True  # else blocks come as they are ready
            dataset.context.enable_progress_bars = False
            batches = dataset.iter_batches(batch_size=_BATCH_ROWS, batch_format="numpy")
            length = rows = 0
            for page in _pages(iter(batches), columns):
                size = len(next(iter(page.values())))
                length, rows = length + size, max(rows, size)  # only the last one is shorter
                self._references.append(ray.put(page))
            self._sizes = length, max(rows, 1)
        return self._sizes

    def references(self) -> list[Any]:
        return self._references


def _pages(batches: Iterator[Page], columns: tuple[str, ...] | None) -> Iterator[Page]:
    """Batches put together, all into pages with the same number of rows but for the last one."""
    for first in batches:
        missing = [name for name in columns or () if name not in first]
        if missing:
            raise DataError(f"the dataset has no column {missing[0]!r}", why=f"the dataset has {', '.join(first)}")
        names = columns or tuple(first)
        size = max(1, sum(first[name].nbytes for name in names))
        for several in _several([first], batches, max(1, PAGE_BYTES // size)):
            yield {name: np.concatenate([batch[name] for batch in several]) for name in names}


def _several(begun: list[Page], batches: Iterator[Page], count: int) -> Iterator[list[Page]]:
    while begun := begun + list(itertools.islice(batches, count - len(begun))):
        yield begun
        begun = []


def _check_room(ray: Any, dataset: Any, is_rank: bool) -> None:
    """Ranks hold their CPUs until the run ends, so tasks that find none beside them would wait for ever."""
    if not is_rank or isinstance(dataset, ray.data.dataset.MaterializedDataset):
        return
    if ray.available_resources().get("CPU", 0) < 1:
        raise DataError(
            "the cluster has no CPU left to compute the Ray dataset on",
            why=f"the ranks hold all of its {ray.cluster_resources().get('CPU', 0):.0f}",
            do="take fewer ranks, add a node, or call fit in a script of its own, where the dataset comes first",
        )


def _values(taken: np.ndarray[Any, Any]) -> Any:
    return torch.from_numpy(taken).unbind() if taken.dtype.kind in "fiub" else taken


def _shelf_name() -> tuple[str, bool]:
    """Alike on the ranks of a run that make their dataset themselves, so that they share it; and whether this is so."""
    world = worker_env()
    if world is None or not world.run_dir:
        return f"rows-{uuid.uuid4().hex}", False
    return f"rows-{world.run_dir}-{world.attempt}-{next(_MADE_HERE)}", True


def _find_shelf(ray: Any, name: str) -> Any:
    """Made where it is not there yet: on this node, so that it ends with the process that needs it."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    options = {"name": name, "namespace": NAMESPACE, "get_if_exists": True, "num_cpus": 0, "scheduling_strategy": here}
    return ray.remote(_Shelf).options(**options).remote()


def _fill(ray: Any, shelf: Any, dataset: Any, columns: tuple[str, ...] | None, is_rank: bool) -> tuple[int, int]:
    try:
        length, page_rows = ray.get(shelf.fill.remote(dataset, columns, is_rank))
    except ray.exceptions.RayTaskError as failed:
        raise failed.cause from None
    return length, page_rows
