"""Where a run of a Keras model stands, how that goes into a checkpoint and comes back."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import tensorflow as tf

from distributed.checkpoint.restore.candidates import find
from distributed.checkpoint.restore.fetching import fetch_parts
from distributed.checkpoint.save.arrays import ArrayMemory
from distributed.checkpoint.storage.chunks import ChunkStore
from distributed.checkpoint.storage.manifests import read_manifest
from distributed.checkpoint.storage.urls import open_storage
from distributed.core.env import WorkerEnv
from distributed.core.history import EpochRecord
from distributed.core.plan import Plan
from distributed.data.order import derive_seed
from distributed.engines.tensorflow.input.data import KerasLoader
from distributed.engines.tensorflow.model.model import array_of
from distributed.engines.tensorflow.model.variables import name_variables, seed_variables
from distributed.engines.tensorflow.state import Checkpoints
from distributed.engines.tensorflow.world.strategy import KerasWorld
from distributed.train.progress import Progress


@dataclass
class RecordedProgress(Progress):
    """How far training has come, with all that a checkpoint holds of it besides the variables."""

    epochs: list[EpochRecord] = field(default_factory=list)
    meter: dict[str, float] = field(default_factory=dict)


class KerasRunState:
    """Everything of this process that a checkpoint holds, and the checkpoints themselves."""

    def __init__(
        self, plan: Plan, env: WorkerEnv, world: KerasWorld, model: Any, *, scaler: Any, train: KerasLoader
    ) -> None:
        self._plan, self._env, self._world, self._train = plan, env, world, train
        self._named = name_variables(model, scaler)
        self._checkpoints: Checkpoints | None = None
        self.progress = RecordedProgress()
        self.source = "the beginning"  # of the state that this run begins with

    @property
    def path(self) -> str:
        return self._checkpoints.path if self._checkpoints is not None else ""

    @property
    def skipped(self) -> tuple[tuple[str, str], ...]:
        return self._checkpoints.skipped if self._checkpoints is not None else ()

    @property
    def changed(self) -> tuple[str, ...]:
        return self._checkpoints.changed if self._checkpoints is not None else ()

    def restore(self, *, on_saved: Callable[[Any], None], on_failed: Callable[[Any], None]) -> None:
        self._checkpoints = Checkpoints(
            self._plan,
            self._env.is_main,
            self._env,
            samples=self._train.samples_per_epoch,
            shuffle=self._train.shuffle,
            spread=lambda number: int(self._world.gather(number)[0]),
            on_saved=on_saved,
            on_failed=on_failed,
        )
        position = self._checkpoints.restore(self._named)
        if position is not None:
            self.source = self._checkpoints.path
            records = [EpochRecord(**record) for record in position.pop("epochs", [])]
            known = {name: value for name, value in position.items() if name in RecordedProgress.__dataclass_fields__}
            self.progress = RecordedProgress(**known, epochs=records)
        self._spread_seeds()

    def save(self, meter: dict[str, float], metrics: dict[str, float] | None = None, *, wait: bool = False) -> None:
        """Every process reads the variables, since some are sums over all of them; the main one writes.

        `meter` is what was measured in this epoch.
        """
        assert self._checkpoints is not None
        self.progress.meter = meter
        arrays = {name: array_of(variable) for name, variable in self._named.items()}
        self._checkpoints.save(self.progress.step, arrays, asdict(self.progress), metrics, wait)

    def poll(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.poll()

    def close(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.close()

    def _spread_seeds(self) -> None:
        """Each replica draws dropout of its own: Keras 3 begins them all with one seed, and so with the same masks. How
        far they have come is in the checkpoint."""
        for number, variable in enumerate(seed_variables(self._named)):
            held = getattr(variable, "value", variable)
            drawn = int(array_of(variable)[1])
            for own, replica in zip(getattr(held, "values", [held]), self._world.replicas, strict=False):
                seed = derive_seed(self._plan.seed, "dropout", number, replica) % 2**31
                own.assign(tf.cast([seed, drawn], own.dtype))


def read_arrays(path: str) -> dict[str, Any]:
    """Everything that a checkpoint holds, by `component/name`."""
    (candidate,) = find(open_storage(os.path.dirname(path)), path)
    storage = open_storage(candidate.root)
    manifest = read_manifest(storage, candidate.name)
    (tree,) = fetch_parts(manifest, [manifest.shared], ChunkStore(storage), ArrayMemory())
    parts = {component: part for component, part in tree.items() if isinstance(part, dict)}
    return {f"{component}/{name}": value for component, part in parts.items() for name, value in part.items()}
