"""Preparation: what a script gives to `prepare`, in one call or several, until the first loop over it opens the run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from distributed.adapters.accelerate.across_ranks import AcrossRanks
from distributed.adapters.accelerate.arguments import ScriptOptions, accumulation_of
from distributed.adapters.accelerate.prepared import PreparedLoader, PreparedOptimizer, PreparedScheduler
from distributed.adapters.accelerate.run import ScriptRun
from distributed.adapters.accelerate.seeds import seed_of_script
from distributed.core.batch_plan import BatchPlan
from distributed.core.config import DistributedConfig
from distributed.core.env import WorkerEnv
from distributed.core.errors import TaskError
from distributed.core.plan import Decision
from distributed.data.drawn import SeededOrder
from distributed.data.shares import EpochSplit


class Preparation(AcrossRanks):
    """The objects of a script, and the run that is made of them."""

    def __init__(
        self, config: DistributedConfig, world: WorkerEnv | None, run_dir: str, options: ScriptOptions
    ) -> None:
        super().__init__(config, world)
        self.run, self.options = ScriptRun(config, world, run_dir), options
        self._model: nn.Module | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._loaders: list[Any] = []
        self._prepared: list[Any] = []  # by the run, once it is open
        self._schedulers = 0
        self._objects: list[Any] = []  # registered for checkpoints

    def take_step(self, optimizer: torch.optim.Optimizer) -> None:
        """What `step` of a prepared optimizer does."""
        raise NotImplementedError

    @property
    def sync_gradients(self) -> bool:
        """Whether the optimizer steps with this batch."""
        return self.run.is_last_of_step

    def prepare(self, *objects: Any, device_placement: Any = None) -> Any:
        """Models, optimizers, DataLoaders and schedulers for a run, in their order; also in several calls."""
        if self.run.is_open:
            raise TaskError(
                "prepare after the training has begun",
                why="a run is planned for all that is prepared",
                do="call it before the first loop over the data",
            )
        made = tuple(self._prepare(one) for one in objects)
        return made if len(made) > 1 else made[0]

    prepare_model = prepare_optimizer = prepare_data_loader = prepare_scheduler = prepare

    def _prepare(self, found: Any) -> Any:
        if isinstance(found, nn.Module):
            self._model = _only("model", self._model, found)
            return found
        if isinstance(found, torch.optim.Optimizer):
            self._optimizer = _only("optimizer", self._optimizer, found)
            return PreparedOptimizer(found, self)
        if isinstance(found, DataLoader | Dataset):
            return self._prepare_loader(found)
        if hasattr(found, "step") and hasattr(found, "state_dict"):
            self.run.track(**{f"scheduler-{self._schedulers}": found})
            self._schedulers += 1
            return PreparedScheduler(found, self)
        raise TaskError(
            f"prepare got a {type(found).__name__}",
            why="it prepares a model, its optimizer, DataLoaders and schedulers",
            do="accelerator.register_for_checkpointing(…) saves other objects",
        )

    def _prepare_loader(self, loader: Any) -> PreparedLoader:
        at = len(self._loaders)
        self._loaders.append(loader)

        def batches() -> Iterator[Any]:
            prepared = self.loaders_of_run()[at]
            return self.run.one_epoch() if at == 0 else prepared()

        def length() -> int:
            return len(self._prepared[0]) if at == 0 and self._prepared else self._length(loader, is_trained=at == 0)

        return PreparedLoader(loader, batches, length)

    def _length(self, loader: Any, *, is_trained: bool) -> int:
        """Batches of a rank in a pass, the same on all of them."""
        samples, size, ranks = len(loader.dataset), self._size_on_rank(loader), self._data_ranks
        if is_trained:
            accumulation = accumulation_of(self.run.config)
            return EpochSplit(samples, BatchPlan(size, ranks, accumulation, loader.drop_last), 0).micro_batches
        read = samples // size * size if loader.drop_last else samples
        return math.ceil(math.ceil(read / ranks) / size)

    @property
    def _data_ranks(self) -> int:
        """Those with samples of their own."""
        return self.num_processes // (self.run.config.tensor_parallel * self.run.config.context_parallel)

    def _size_on_rank(self, loader: Any) -> int:
        """The samples of a batch there."""
        asked = loader.batch_size or 1
        if not self.options.split_batches:
            return int(asked)
        size, rest = divmod(asked, self._data_ranks)
        if rest or not size:
            raise TaskError(
                f"split_batches with batch_size={asked} and {self._data_ranks} ranks",
                why="each rank takes the same part of a batch",
                do=f"a batch_size that {self._data_ranks} divides",
            )
        return int(size)

    def loaders_of_run(self) -> list[Any]:
        """Opens the run, where that was not asked for before."""
        if not self.run.is_open:
            self._open()
        return self._prepared

    def _open(self) -> None:
        missing = [("model", self._model), ("optimizer", self._optimizer), ("DataLoader", self._loaders or None)]
        for what, found in missing:
            if found is None:
                raise TaskError(
                    f"no {what} was prepared",
                    why="a run is planned for a model, its optimizer and its data",
                    do="accelerator.prepare(model, optimizer, train_loader)",
                )
        self.run.config = self._with_script(self.run.config)
        for at, found in enumerate(self._objects):
            self.run.track(**{f"object-{at}": found})
        loaders = [self._split(loader) for loader in self._loaders]
        _, _, *self._prepared = self.run.prepare(self._model, self._optimizer, *loaders)

    def _with_script(self, config: Any) -> Any:
        """The settings with what the script has said since the beginning."""
        more: dict[str, Any] = {}
        seed = seed_of_script()
        if not config.given("seed") and seed is not None:
            more["seed"] = seed
            self.run.notes += (Decision(f"seed {seed}", "the script has given it to torch", "seed"),)
        return config.merged(more, "the script") if more else config

    def _split(self, loader: Any) -> Any:
        """A DataLoader with the batch size of a rank, and the order that its configuration asks for."""
        if not isinstance(loader, DataLoader):
            return loader
        changes: dict[str, Any] = {}
        if self.options.split_batches:
            changes["batch_size"] = self._size_on_rank(loader)
        if self.options.seeds_sampler and isinstance(loader.sampler, torch.utils.data.RandomSampler):
            seed = self.options.data_seed
            changes["sampler"] = SeededOrder(len(loader.sampler), torch.initial_seed() if seed is None else seed)
        return loader if not changes else _copied(loader, **changes)


def _only(what: str, before: Any, found: Any) -> Any:
    if before is not None and before is not found:
        raise TaskError(
            f"prepare got several {what}s",
            why=f"the steps of a run have one {what}",
            do="distributed.Task trains several, each by its own optimizer",
        )
    return found


def _copied(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    names = ("batch_size", "sampler", "num_workers", "collate_fn", "pin_memory", "drop_last", "timeout")
    more = ("worker_init_fn", "multiprocessing_context", "prefetch_factor", "persistent_workers")
    given = {name: getattr(loader, name) for name in (*names, *(more if loader.num_workers else ()))}
    return DataLoader(loader.dataset, **(given | changes))
