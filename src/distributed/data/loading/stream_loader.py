"""StreamLoader: this rank's shares of a dataset that can only be read from its beginning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from distributed.core.batch_plan import BatchPlan
from distributed.core.errors import DataError
from distributed.data.checks.stream_digest import total_digest
from distributed.data.checks.tally import Tally
from distributed.data.drawn import Tree
from distributed.data.generators import KeptGenerators
from distributed.data.loading.dali import DaliBatches
from distributed.data.loading.loader import Microbatch, Step
from distributed.data.shares import stream_weights
from distributed.data.source import Source
from distributed.data.stream import (
    OwnStream,
    SharedStream,
    StreamBatch,
    StreamSamples,
    StreamSeeds,
    open_stream,
    reads_otherwise,
)


class StreamLoader:
    """As TrainLoader, for a stream: every rank reads all of it and keeps its share, or the dataset splits itself."""

    def __init__(
        self,
        source: Source,
        batch: BatchPlan,
        rank: int,
        *,
        seed: int,
        split: str,
        agree: Callable[[int, int], tuple[int, int]],
        pin_memory: bool = False,
    ) -> None:
        self._source, self._batch, self._rank, self._seed = source, batch, rank, seed
        self._splits_itself, self._agree = split == "dataset", agree
        self._options = source.loader_options(pin_memory=pin_memory)
        self.step_samples: StreamSamples | None = None
        self._expected: int | None = None

    steps_per_epoch = samples_per_epoch = None

    def steps_in(self, epoch: int) -> None:
        return None

    indices: list[int] = []  # noqa: RUF012 - a stream's samples have no numbers
    note = ""

    @property
    def read_digest(self) -> int:
        return 0 if self.step_samples is None else self.step_samples.digest

    def order_digest(self, epoch: int) -> str:
        return ""  # a stream has no order before it was read

    def state(self, epoch: int) -> Tree:
        return {}

    def load_state(self, state: Tree) -> None:
        pass

    def tally(self, epoch: int, first_step: int, stop_step: int) -> Tally:
        return Tally(0, 0, 0, 0)

    def expect(self, digest: int) -> None:
        """What was read in the steps that the next epoch begins after: reading them again must come to the same."""
        self._expected = digest

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Step]:
        batches, batch = self._read(epoch), self._batch
        stand_in: StreamBatch | None = None
        step, digest = 0, 0
        expected, self._expected = self._expected, None
        outer = KeptGenerators() if first_step and not self._source.num_workers else None  # collating draws from them
        while True:
            if step == first_step:
                if expected is not None and digest != expected:
                    raise reads_otherwise(epoch, first_step)
                if outer is not None:
                    outer.put_back()
                outer = expected = None
            if batch.limit and step >= batch.limit:
                return
            micros = [micro for _, micro in zip(range(batch.accumulation), batches, strict=False)]
            stand_in = micros[0] if micros else stand_in
            digest = total_digest(digest, *(m.digest for m in micros))
            total, most = sum(m.total for m in micros), len(micros)
            if self._splits_itself:
                total, most = self._agree(sum(m.size for m in micros), len(micros))
            if total == 0:
                return
            if batch.drop_last and total < batch.global_batch:
                continue
            if stand_in is None:
                raise DataError(
                    "this rank's shard of the stream is empty, while others have samples",
                    why="iterable_split='dataset' leaves the sharding to the dataset",
                    do="let the dataset yield at least 1 sample on every rank, or set iterable_split='share'",
                )
            micros += [stand_in._replace(size=0)] * (most - len(micros))
            if step >= first_step:
                self.step_samples = StreamSamples(digest)
                weights = stream_weights([m.size for m in micros], total, batch.ranks)
                rows = zip(micros, weights, strict=True)
                yield Step([Microbatch(m.batch, weight, m.size) for m, weight in rows], total)
            step += 1

    def _read(self, epoch: int) -> Iterator[StreamBatch]:
        if isinstance(self._source.dataset, DaliBatches):
            return self._source.dataset.batches()
        set_epoch = getattr(self._source.dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        dataset, collate, batch = self._source.dataset, self._source.collate_fn, self._batch
        seeds = StreamSeeds.of(self._seed, epoch, self._rank, splits_itself=self._splits_itself)
        if self._splits_itself:
            stream: Any = OwnStream(dataset, collate, seeds, batch.per_device)
        else:
            stream = SharedStream(dataset, collate, seeds, group=batch.micro_batch, ranks=batch.ranks, rank=self._rank)
        return iter(open_stream(stream, seeds, self._options))

    def sample_indices(
        self, epoch: int, step: int, batch: BatchPlan | None = None, rank: int | None = None
    ) -> list[int]:
        return []
