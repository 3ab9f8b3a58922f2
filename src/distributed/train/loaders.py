"""Loader: what the loop asks of whatever gives it a rank's share of the training data; and which one a run gets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from distributed.core.plan import BatchPlan, Plan
from distributed.data.dali import DaliBatches
from distributed.data.leaf_loader import LeafLoader
from distributed.data.loader import EvalLoader, Step, StreamLoader, TrainLoader
from distributed.data.prefetch import Prefetch
from distributed.data.rows import RowEvalLoader, RowLoader, Rows
from distributed.data.source import Source
from distributed.data.workers import Staff, as_told, can_choose, find_staff, keep, with_workers
from distributed.runtime.session import Session


class Loader(Protocol):
    @property
    def steps_per_epoch(self) -> int | None: ...

    @property
    def samples_per_epoch(self) -> int | None: ...

    @property
    def indices(self) -> list[int]: ...  # of the samples that this rank used in the step that came last

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Step]: ...

    def sample_indices(
        self, epoch: int, step: int, batch: BatchPlan | None = None, rank: int | None = None
    ) -> list[int]: ...


def open_training(source: Source, plan: Plan, session: Session) -> tuple[Loader, Staff | None]:
    """What reads this rank's training data, and the number of workers, where that was left to be found."""
    device, rank, on_gpu = session.device, session.data_rank, session.device.type == "cuda"
    rows = None if source.is_stream or plan.is_bitwise else Rows.of(source, device)
    if rows is not None:
        by_rows = RowLoader(source, rows, plan.batch, rank, seed=plan.seed)
        return by_rows if rows.is_ahead else Prefetch(by_rows, device), None
    staff = _find_staff(source, plan, session) if plan.workers == "auto" else None
    source = _staffed(source, plan, staff)
    if source.is_stream:
        return _open_stream(source, plan, session), staff
    if plan.is_bitwise:
        return LeafLoader(source, plan.batch, rank, seed=plan.seed, pin_memory=on_gpu), staff
    source, reads_ahead = _pinned(source, on_gpu)
    seeds = plan.workers is not None
    loader = TrainLoader(source, plan.batch, rank, seed=plan.seed, pin_memory=on_gpu, seeds_batches=seeds)
    return Prefetch(loader, device) if reads_ahead else loader, staff


def open_evaluation(
    source: Source | None, plan: Plan, session: Session, staff: Staff | None, *, in_step: bool
) -> EvalLoader | None:
    """`staff`: what was found to be best for training."""
    if source is None:
        return None
    rank, ranks = session.data_rank, plan.mesh.data_ranks
    size = source.batch_size or plan.batch.per_device
    rows = None if source.is_stream else Rows.of(source, session.device)
    if rows is not None:
        return RowEvalLoader(source, rows, size, rank, ranks, in_step=in_step)
    return EvalLoader(
        _staffed(source, plan, staff if can_choose(source) else None),
        size,
        rank,
        ranks,
        split=plan.iterable_split,
        pin_memory=session.device.type == "cuda",
        in_step=in_step,
        batch_seed=None if plan.workers is None else plan.seed,
    )


def _open_stream(source: Source, plan: Plan, session: Session) -> Loader:
    split, on_gpu = plan.iterable_split, session.device.type == "cuda"
    if isinstance(source.dataset, DaliBatches):
        source.dataset.check(plan.batch, split)
        split = "dataset"
    source, reads_ahead = _pinned(source, on_gpu and split == "share")  # else the ranks meet while they read

    def agree(samples: int, microbatches: int) -> tuple[int, int]:
        if session.world_size == 1:  # nor does the host wait for the device
            return samples, microbatches
        total = session.sum("samples of a step", torch.tensor([samples], device=session.device))
        most = session.max("micro-batches of a step", torch.tensor([microbatches], device=session.device))
        return int(total.item()), int(most.item())

    loader = StreamLoader(
        source, plan.batch, session.data_rank, seed=plan.seed, split=split, agree=agree, pin_memory=on_gpu
    )
    return Prefetch(loader, session.device) if reads_ahead else loader


def _pinned(source: Source, could: bool) -> tuple[Source, bool]:
    """Whether batches are copied to the device ahead of their step; then they must lie in pinned memory."""
    reads_ahead = could and source.num_workers > 0
    return (replace(source, pin_memory=True) if reads_ahead else source), reads_ahead


def _find_staff(source: Source, plan: Plan, session: Session) -> Staff:
    if not can_choose(source):
        return as_told(source)
    kept, on_gpu = Path(plan.run_dir, "workers", f"rank-{session.rank}.json"), session.device.type == "cuda"
    staff = find_staff(
        source,
        plan.batch,
        session.data_rank,
        cores=plan.threads_per_rank,
        overlaps=on_gpu,
        pin_memory=on_gpu,
        kept=kept if session.env.restarts else None,
    )
    keep(staff, kept)
    return staff


def _staffed(source: Source, plan: Plan, staff: Staff | None) -> Source:
    if staff is not None:
        return with_workers(source, staff.workers) if staff.rates else source
    return with_workers(source, plan.workers) if isinstance(plan.workers, int) else source
