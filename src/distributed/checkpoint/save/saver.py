"""Saver: the loop waits for a copy into host memory; hashing, writing and publishing run in the background.

Every rank stores its share of what all hold, its boxes of what they hold in parts, and all of what is its own. At most
one save is in flight; what goes wrong in it is raised on every rank by the next call.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from distributed.checkpoint.format.layout import ChunkPlan, share
from distributed.checkpoint.format.tree_spec import TreeSpec
from distributed.checkpoint.save.publishing import Bytes, Publisher, Saved, SaveJob
from distributed.checkpoint.save.retention import Collector, Retention
from distributed.checkpoint.storage.chunks import ChunkStore
from distributed.checkpoint.storage.files import Storage
from distributed.checkpoint.storage.lineage import NOBODY, Lineage
from distributed.checkpoint.storage.mailbox import Mailbox, Ranks
from distributed.checkpoint.storage.urls import check_writable, open_storage
from distributed.core.errors import DistributedError

StateTree = dict[str, Any]
_ABANDON_S = 2.0


class Staging(Protocol):
    """How a live state is copied into host memory that belongs to no one else: torch's, or another library's."""

    frameworks: Mapping[str, str]  # versions of what makes the state

    def outline(self, tree: StateTree, before: TreeSpec | None) -> tuple[TreeSpec, Mapping[str, Any]]:
        """A tree's outline, and what its chunks are copied from, by name. A plan of the one before may be kept."""

    def reserve(self, lengths: Iterable[int]) -> None:
        """Take the memory for chunks of these lengths."""

    def clear(self) -> None:
        """What was copied is not needed any more."""

    def copy(self, plan: Iterable[ChunkPlan], leaves: Mapping[str, Any]) -> list[tuple[ChunkPlan, Bytes]]:
        """A copy of the chunks' bytes, independent of later changes of the state."""


class Saver:
    """One rank's writer of checkpoints; every rank makes one and calls it after the same steps.

    >>> import tempfile, torch
    >>> from distributed.checkpoint.save.staging import TensorStaging
    >>> from distributed.core.env import WorkerEnv
    >>> from distributed.runtime.session import Session
    >>> saver = Saver(tempfile.mkdtemp(), Session(WorkerEnv(), torch.device("cpu"), None), TensorStaging())
    >>> saver.save(500, {"model": {"w": torch.ones(3)}}, {"rng": {}}, {})
    >>> saver.wait().endswith("step-000500")
    True
    """

    def __init__(
        self,
        url: str | Storage,
        session: Ranks,
        staging: Staging,
        *,
        asynchronous: bool = True,
        keep_last: int | None = None,
        keep_every: int | None = None,
        best: str | None = None,
        best_count: int = 1,
        pinned: Iterable[str] = (),
        known: Iterable[str] = (),
        on_saved: Callable[[Saved], None] = lambda saved: None,
        timeout_s: float = 1800.0,
        guard_s: float = 3600.0,
        lineage: Lineage = NOBODY,
        check_held: Callable[[], None] = lambda: None,
        neighbours: Sequence[int] = (),
        at: Callable[[str], None] = lambda point: None,
    ) -> None:
        """`known` are chunks that a restore has verified. `check_held` raises on rank 0 where another run has the
        folder by now. `neighbours`: the ranks on this host. `at` is called at each named point of a save, for tests."""
        self._storage, self._session, self._asynchronous = open_storage(url), session, asynchronous
        retention = Retention(keep_last, keep_every, best, best_count, frozenset(pinned))
        self._publisher = Publisher(
            self._storage,
            session=session,
            chunks=ChunkStore(self._storage, known),
            notes=Mailbox(session),
            collector=Collector(self._storage, retention, guard_s, at, lineage.run),
            timeout_s=timeout_s,
            at=at,
            frameworks=staging.frameworks,
            lineage=lineage,
            check_held=check_held,
            neighbours=neighbours,
        )
        self._staging = staging
        self._on_saved, self._at = on_saved, at
        self._thread: threading.Thread | None = None
        self._outcome: Saved | DistributedError | None = None
        self._stall_s, self._count = 0.0, 0
        self._whole: TreeSpec | None = None  # of the last save: the next one is mostly cut alike
        self._mine: TreeSpec | None = None
        self.last_saved: Saved | None = None

    def prepare(self, shared: StateTree, own: StateTree) -> None:
        """Before the first save: check that one of this size can be written, and take the host memory for it."""
        whole, mine = self._staging.outline(shared, None)[0], self._staging.outline(own, None)[0]
        self._whole, self._mine = whole, mine
        if self._session.is_main:
            check_writable(self._storage, whole.nbytes + self._session.world_size * mine.nbytes)
        part = share(list(whole.plan), self._session.rank, self._session.world_size)
        self._finish()
        self._staging.reserve(chunk.length for chunk in (*part, *whole.box_plan, *mine.plan, *mine.box_plan))

    def save(
        self,
        step: int,
        shared: StateTree,
        own: StateTree,
        meta: Mapping[str, Any] | None = None,
        *,
        metric: float | None = None,
        wait: bool = False,
    ) -> None:
        """Copy the state and return; raises what went wrong in the save before this one. `wait` for the last one."""
        begun = time.perf_counter()
        self._finish()  # at most one save is in flight
        whole, shared_tensors = self._staging.outline(shared, self._whole)
        mine, own_tensors = self._staging.outline(own, self._mine)
        self._whole, self._mine = whole, mine
        places = {id(chunk): index for index, chunk in enumerate(whole.plan)}
        part = share(list(whole.plan), self._session.rank, self._session.world_size)
        self._staging.clear()
        copied = self._staging.copy(part, shared_tensors)
        box_copied = self._staging.copy(whole.box_plan, shared_tensors)
        own_copied = self._staging.copy((*mine.plan, *mine.box_plan), own_tensors)
        frozen = json.loads(json.dumps(dict(meta or {})))
        shared_bytes = [(places[id(chunk)], chunk, data) for chunk, data in copied]
        job = SaveJob(
            self._count,
            step=step,
            shared=whole,
            own=mine,
            shared_bytes=shared_bytes,
            box_bytes=box_copied,
            own_bytes=own_copied,
            meta=frozen,
            metric=metric,
            begun=begun,
        )
        self._count += 1
        self._at("copied")
        self._thread = threading.Thread(target=self._run, args=(job,), name=f"checkpoint-{step}", daemon=True)
        self._thread.start()
        self._stall_s = time.perf_counter() - begun
        if wait or not self._asynchronous:
            self._thread.join()
            self._stall_s = time.perf_counter() - begun
            self._finish()

    def poll(self) -> None:
        """Raise or report the outcome of the save in flight if there is one, without waiting."""
        if self._thread is not None and not self._thread.is_alive():
            self._finish()

    def wait(self) -> str | None:
        """The path of the last checkpoint that was published, when the save in flight has ended."""
        self._finish()
        return None if self.last_saved is None else self.last_saved.path

    def close(self) -> None:
        """Wait for the save in flight; raises what went wrong in it."""
        self._finish()

    def abandon(self) -> None:
        """Forget the save in flight, without waiting for other ranks, which may be gone."""
        self._publisher.notes.give_up()
        if self._thread is not None:
            self._thread.join(_ABANDON_S)  # it may hang in a connection that is dead
            self._thread = None

    def _finish(self) -> None:
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        outcome, self._outcome = self._outcome, None
        if isinstance(outcome, DistributedError):
            raise outcome
        assert outcome is not None
        self.last_saved = replace(outcome, stall_s=self._stall_s)
        self._on_saved(self.last_saved)

    def _run(self, job: SaveJob) -> None:
        self._outcome = self._publisher.run(job)
