"""Saver: the writer of a state of torch's tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from distributed.checkpoint.assembly import Outline
from distributed.checkpoint.files import Storage
from distributed.checkpoint.layout import ChunkPlan
from distributed.checkpoint.lineage import NOBODY, Lineage
from distributed.checkpoint.outlining import outline
from distributed.checkpoint.publishing import Bytes, Saved
from distributed.checkpoint.staging import HostBuffer, copy_chunks
from distributed.checkpoint.writing import StateTree, Writer
from distributed.runtime.session import Session


class Saver(Writer):
    """One rank's writer of checkpoints; every rank makes one and calls it after the same steps.

    >>> import tempfile, torch
    >>> from distributed.core.env import WorkerEnv
    >>> saver = Saver(tempfile.mkdtemp(), Session(WorkerEnv(), torch.device("cpu"), None))
    >>> saver.save(500, {"model": {"w": torch.ones(3)}}, {"rng": {}}, {})
    >>> saver.wait().endswith("step-000500")
    True
    """

    def __init__(
        self,
        url: str | Storage,
        session: Session,
        *,
        asynchronous: bool = True,
        keep_last: int | None = None,
        keep_every: int | None = None,
        best: str | None = None,
        pinned: Iterable[str] = (),
        known: Iterable[str] = (),
        on_saved: Callable[[Saved], None] = lambda saved: None,
        timeout_s: float = 1800.0,
        guard_s: float = 3600.0,
        lineage: Lineage = NOBODY,
        check_held: Callable[[], None] = lambda: None,
        at: Callable[[str], None] = lambda point: None,
    ) -> None:
        """As of Writer."""
        staging = TensorStaging(pinned=session.device.type == "cuda")
        super().__init__(
            url,
            session,
            staging,
            asynchronous=asynchronous,
            keep_last=keep_last,
            keep_every=keep_every,
            best=best,
            pinned=pinned,
            known=known,
            on_saved=on_saved,
            timeout_s=timeout_s,
            guard_s=guard_s,
            lineage=lineage,
            check_held=check_held,
            at=at,
        )


class TensorStaging:
    """Tensors are copied into memory that the next save uses again."""

    def __init__(self, *, pinned: bool) -> None:
        self.frameworks: Mapping[str, str] = {"torch": str(torch.__version__)}
        self._buffer = HostBuffer(pinned=pinned)
        self.reserve, self.clear = self._buffer.reserve, self._buffer.clear

    def outline(self, tree: StateTree, before: Outline | None) -> tuple[Outline, Mapping[str, Any]]:
        return outline(tree, before)

    def copy(self, plan: Iterable[ChunkPlan], leaves: Mapping[str, Any]) -> list[tuple[ChunkPlan, Bytes]]:
        return copy_chunks(plan, leaves, self._buffer)
