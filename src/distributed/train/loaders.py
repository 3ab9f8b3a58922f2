"""Loader: the interface through which the loop reads a rank's shard of the training data; and which one a run gets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from distributed.core.errors import DataError
from distributed.core.plan import Decision, Plan
from distributed.core.run_dir import RunDir
from distributed.data.checks.fingerprint import data_parts
from distributed.data.length_buckets import Lengths, check_lengths
from distributed.data.loading.dali import DaliBatches
from distributed.data.loading.lengths import (
    MeasuringRank,
    bucket_decision,
    keep_lengths,
    kept_lengths,
    measure_lengths,
)
from distributed.data.loading.loader import EvalLoader, TrainLoader
from distributed.data.loading.prefetch import EpochLoader, Prefetch
from distributed.data.loading.rows import RowEvalLoader, RowLoader, Rows, say_bytes
from distributed.data.loading.stream_loader import StreamLoader
from distributed.data.loading.virtual_rank_loader import VirtualRankLoader
from distributed.data.loading.workers import (
    WorkerCount,
    can_choose,
    find_worker_count,
    fixed_worker_count,
    keep,
    with_workers,
)
from distributed.data.shares import most_evaluated
from distributed.data.source import Source
from distributed.runtime.session import Session
from distributed.strategies.placement import local
from distributed.train.resume.sharing import share_from_first

_STATE_BYTES = 8  # of each number that is trained: two in fp32, as of Adam


class Loader(EpochLoader, Protocol):
    """What a run trains from."""

    @property
    def indices(self) -> list[int]: ...  # of the samples that this rank used in the step that came last

    @property
    def read_digest(self) -> int: ...  # of what was read of a stream until that step


class Training(NamedTuple):
    loader: Loader
    worker_count: WorkerCount | None  # the number of workers, where that was left to be found
    decisions: list[Decision]


class Evaluation(NamedTuple):
    loader: EvalLoader | None
    decisions: list[Decision]


class Evaluations(NamedTuple):
    loaders: dict[str, EvalLoader]  # by the names of their sets
    decisions: list[Decision]


def open_training(
    source: Source, plan: Plan, session: Session, optimizer: torch.optim.Optimizer | None = None
) -> Training:
    """What reads this rank's training data. `optimizer`: whose state will yet need memory of the device."""
    device, rank, decisions = session.device, session.data_rank, list[Decision]()
    if source.length_of is not None:
        source = with_lengths(source, plan, session)
        decisions = [bucket_decision(source, plan.batch, plan.seed)]
    is_drawn_by_rows = not source.is_stream and not plan.is_bitwise and source.lengths is None
    rows = _rows(source, plan, device, optimizer) if is_drawn_by_rows else None
    if plan.speed.data_on_device == "on" and (rows is None or not rows.is_on_device):
        raise _not_on_device(rows, device)
    if rows is not None:
        by_rows = RowLoader(source, rows, plan.batch, rank, seed=plan.seed, share=share_from_first(session))
        loader = by_rows if rows.is_on_device else Prefetch(by_rows, device, max_steps=plan.max_steps)
        return Training(loader, None, _row_decisions(rows, "training"))
    training = _open_read(source, plan, session)
    return training._replace(decisions=[*decisions, *training.decisions])


def with_lengths(source: Source, plan: Plan, session: Session) -> Source:
    """With the lengths of all samples: given, kept from an earlier world of the run, or measured by all ranks."""
    assert source.length_of is not None
    if source.lengths is None:
        key = json.dumps([source.length_of.name, data_parts(source)])
        path, device = RunDir(plan.run_dir).lengths, session.device
        kept = kept_lengths(key, path) if session.is_main else None
        is_kept = torch.tensor(int(kept is not None), device=device)
        if session.max("whether lengths are known", is_kept).item():
            shared = np.zeros(source.samples or 0, np.int32) if kept is None else kept
            sent = session.send_from("lengths of the samples", 0, torch.from_numpy(shared).to(device))
            found: Lengths = sent.cpu().numpy()
        else:
            ranks = MeasuringRank(
                session.rank,
                session.world_size,
                lambda values: session.sum("lengths of the samples", values.to(device)).cpu(),
            )
            tells = session.is_main and plan.observe.progress
            found = measure_lengths(source, ranks, partial(print, flush=True) if tells else lambda text: None)
            if session.is_main:
                keep_lengths(found, key, path)
        source = replace(source, lengths=found)
    assert source.lengths is not None
    check_lengths(source.lengths)
    return source


def _open_read(source: Source, plan: Plan, session: Session) -> Training:
    """Of data that is read sample by sample."""
    device, rank, on_gpu = session.device, session.data_rank, session.device.type == "cuda"
    how: dict[str, Any] = {"seed": plan.seed, "pin_memory": on_gpu, "share": share_from_first(session)}
    worker_count = _find_worker_count(source, plan, session) if plan.workers == "auto" else None
    source = _with_worker_count(source, plan, worker_count)
    decisions = [] if worker_count is None else [worker_count.decision]
    if source.is_stream:
        return Training(_open_stream(source, plan, session), worker_count, decisions)
    if plan.is_bitwise:
        return Training(VirtualRankLoader(source, plan.batch, rank, **how), worker_count, decisions)
    source, reads_ahead = _pinned(source, on_gpu)
    loader = TrainLoader(source, plan.batch, rank, seeds_batches=plan.workers is not None, **how)
    return Training(
        Prefetch(loader, device, max_steps=plan.max_steps) if reads_ahead else loader, worker_count, decisions
    )


def open_evaluations(
    sources: Mapping[str, Source],
    plan: Plan,
    session: Session,
    worker_count: WorkerCount | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    lockstep: bool,
) -> Evaluations:
    """Those of all sets, each choice reported once."""
    found = Evaluations({}, [])
    for name, source in sources.items():
        loader, decisions = open_evaluation(source, plan, session, worker_count, optimizer, lockstep=lockstep)
        if loader is not None:  # else none of its batches is wanted
            found.loaders[name] = loader
        found.decisions.extend(decision for decision in decisions if decision not in found.decisions)
    return found


def open_evaluation(
    source: Source | None,
    plan: Plan,
    session: Session,
    worker_count: WorkerCount | None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    lockstep: bool,
) -> Evaluation:
    """`worker_count`: what was found to be best for training, whose data has its place already."""
    if source is None:
        return Evaluation(None, [])
    rank, ranks = session.data_rank, plan.mesh.data_ranks
    size = source.batch_size or plan.batch.per_device
    most = most_evaluated(plan, source.samples, source.batch_size, drop_last=source.drop_last)
    if most == 0:
        return Evaluation(None, [])
    rows = None if source.is_stream else _rows(source, plan, session.device, optimizer)
    if rows is not None:
        by_rows = RowEvalLoader(
            source, rows, size, rank, ranks, lockstep=lockstep, share=share_from_first(session), most=most
        )
        return Evaluation(by_rows, _row_decisions(rows, "evaluation"))
    loader = EvalLoader(
        _with_worker_count(source, plan, worker_count if can_choose(source) else None),
        size,
        rank,
        ranks,
        split=plan.iterable_split,
        pin_memory=session.device.type == "cuda",
        lockstep=lockstep,
        batch_seed=None if plan.workers is None else plan.seed,
        share=share_from_first(session),
        most=most,
    )
    return Evaluation(loader, [])


def _rows(source: Source, plan: Plan, device: torch.device, optimizer: torch.optim.Optimizer | None) -> Rows | None:
    on_device = plan.speed.data_on_device
    state = 0 if optimizer is None or on_device != "auto" else state_to_come(optimizer, device)
    return Rows.of(source, device, on_device, state)


def state_to_come(optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """Bytes of the device that an optimizer will take with its first step: an estimate for any optimizer.

    >>> layer = torch.nn.Linear(10, 10, bias=False)
    >>> state_to_come(torch.optim.Adam(layer.parameters()), torch.device("cpu"))
    800
    """
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    trained = (p for p in parameters if p.requires_grad and p not in optimizer.state)
    return sum(_STATE_BYTES * here.numel() for here in map(local, trained) if here.device.type == device.type)


def _row_decisions(rows: Rows, whose: str) -> list[Decision]:
    return [] if rows.placing is None else [rows.placing.decision(whose)]


def _not_on_device(rows: Rows | None, device: torch.device) -> DataError:
    if rows is None or rows.placing is None:
        return DataError(
            "data_on_device=True, and the training data cannot be kept on the device",
            why="only a TensorDataset, or a Subset of one, with torch's default_collate can",
            do="make a TensorDataset of it, or leave data_on_device out",
        )
    size, free = say_bytes(rows.placing.size), say_bytes(rows.placing.free)
    return DataError(
        f"data_on_device=True, and the training data does not fit on {device}",
        why=f"the data takes {size}, and {device} has {free} free",
        do="leave data_on_device out: batches are then gathered on the host, one step ahead",
    )


def _open_stream(source: Source, plan: Plan, session: Session) -> Loader:
    split, on_gpu = plan.iterable_split, session.device.type == "cuda"
    if isinstance(source.dataset, DaliBatches):
        source.dataset.check(plan.batch, split)
        split = "dataset"
    source, reads_ahead = _pinned(source, on_gpu and split == "share")  # else reading has a collective

    def agree(samples: int, microbatches: int) -> tuple[int, int]:
        if session.world_size == 1:  # nor does the host wait for the device
            return samples, microbatches
        total = session.sum("samples of a step", torch.tensor([samples], device=session.device))
        most = session.max("micro-batches of a step", torch.tensor([microbatches], device=session.device))
        return int(total.item()), int(most.item())

    loader = StreamLoader(
        source, plan.batch, session.data_rank, seed=plan.seed, split=split, agree=agree, pin_memory=on_gpu
    )
    return Prefetch(loader, session.device, max_steps=plan.max_steps) if reads_ahead else loader


def _pinned(source: Source, could: bool) -> tuple[Source, bool]:
    """Whether batches are copied to the device ahead of their step; then they must lie in pinned memory."""
    reads_ahead = could and source.num_workers > 0
    return (replace(source, pin_memory=True) if reads_ahead else source), reads_ahead


def _find_worker_count(source: Source, plan: Plan, session: Session) -> WorkerCount:
    if not can_choose(source):
        return fixed_worker_count(source)
    kept, on_gpu = RunDir(plan.run_dir).worker_count(session.rank), session.device.type == "cuda"
    worker_count = find_worker_count(
        source,
        plan.batch,
        session.data_rank,
        cores=plan.threads_per_rank,
        overlaps=on_gpu,
        pin_memory=on_gpu,
        kept=kept if session.env.restarts else None,
    )
    keep(worker_count, kept)
    return worker_count


def _with_worker_count(source: Source, plan: Plan, worker_count: WorkerCount | None) -> Source:
    if worker_count is not None:
        return with_workers(source, worker_count.workers) if worker_count.rates else source
    return with_workers(source, plan.workers) if isinstance(plan.workers, int) else source
