"""DaliBatches: an iterator of NVIDIA DALI as a stream whose batches are ready when they come.

A DALI pipeline reads, decodes and augments on its own, on the GPU too, and its reader shards the files itself. So
nothing here cuts or orders samples: the ranks agree on how many a step has, as with any stream that splits itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import IterableDataset

from distributed.core.batch_plan import BatchPlan
from distributed.core.errors import DataError
from distributed.data.stream import StreamBatch

_PLUGIN = "nvidia.dali.plugin.pytorch"


def is_dali_iterator(data: object) -> bool:
    """Whether it is one of DALI's for PyTorch; found without importing DALI."""
    kinds = type(data).__mro__
    return any(f"{kind.__module__}.".startswith(f"{_PLUGIN}.") for kind in kinds) and hasattr(data, "__next__")


class DaliBatches(IterableDataset[Any]):
    """An iterator over one pipeline, that of this rank: what `fit` makes of it, or what you pass to `fit`.

        pipeline = my_pipeline(batch_size=64, device_id=local_rank, shard_id=rank, num_shards=world_size)
        images = DALIClassificationIterator(pipeline, reader_name="Reader", last_batch_policy=LastBatchPolicy.PARTIAL)
        trainer.fit(DaliBatches(images, columns=("data", "label")), iterable_split="dataset")

    With `columns` a batch is a list of these, and the last one is the target; without, it is DALI's dict.
    """

    read_by = "DALI"  # in threads of its own

    def __init__(self, iterator: Any, columns: Sequence[str] | None = None) -> None:
        if not is_dali_iterator(iterator):
            raise DataError(f"DaliBatches was given a {type(iterator).__name__}", do=f"pass an iterator of {_PLUGIN}")
        self._iterator, self._columns = iterator, None if columns is None else tuple(columns)
        self._is_open = False  # whether an epoch was begun and not ended

    @property
    def batch_size(self) -> int | None:
        return getattr(self._iterator, "batch_size", None)

    def check(self, batch: BatchPlan, split: str) -> None:
        """Refuse what would make other batches of those that DALI has made."""
        if self.batch_size is not None and batch.per_device != self.batch_size:
            raise DataError(
                f"batch_size={batch.per_device}, and the DALI pipeline makes batches of {self.batch_size}",
                why="DALI's batches are used unchanged, so that both sizes must be the same",
                do=f"build the pipeline with batch_size={batch.per_device}, or leave that setting out",
            )
        if batch.ranks > 1 and split != "dataset":
            raise DataError(
                f"a DALI iterator is read by {batch.ranks} ranks with iterable_split={split!r}",
                why="DALI's reader shards the data already (shard_id, num_shards), and the ranks would shard it again",
                do="set iterable_split='dataset'",
            )

    def batches(self) -> Iterator[StreamBatch]:
        """One epoch of this rank. An epoch that was left is read to its end first: DALI cannot begin one before."""
        if self._is_open:
            for _ in self._iterator:
                pass
            self._end()
        self._is_open = True
        for made in self._iterator:
            batch = self._only(made)
            size = len(next(iter(batch.values())))
            if size:
                yield StreamBatch(self._chosen(batch), size, size)
        self._end()

    def _end(self) -> None:
        self._is_open = False
        if str(getattr(self._iterator, "_auto_reset", False)).lower() not in ("true", "yes"):
            self._iterator.reset()

    def _only(self, made: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        if len(made) != 1:
            raise DataError(
                f"the DALI iterator has {len(made)} pipelines",
                why="each rank trains on one device, and takes the batches of one pipeline",
                do="build an iterator over one pipeline in every rank, with device_id=local_rank",
            )
        return made[0]

    def _chosen(self, batch: Mapping[str, Any]) -> Any:
        if self._columns is None:
            return dict(batch)
        missing = [name for name in self._columns if name not in batch]
        if missing:
            raise DataError(
                f"the DALI pipeline has no output {missing[0]!r}", why=f"the pipeline has {', '.join(batch)}"
            )
        return [batch[name] for name in self._columns]

    def __iter__(self) -> Iterator[Any]:
        return (made.batch for made in self.batches())

    def __reduce__(self) -> Any:
        raise TypeError(
            "a DALI pipeline stays in the process that built it: let every rank build its own, "
            "in a script that `distributed train --script …` starts"
        )
