"""EvaluationJob: what a rank does that trains nothing: it measures sets, or predicts every row of one.

The model is prepared as for a training, by the same strategies and loaders, without gradients, an optimizer's state or
checkpoints. Every rank comes to the same result.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from distributed.checkpoint.restore.restoring import restore
from distributed.checkpoint.restore.rng import restore_rng, rng_state
from distributed.checkpoint.storage.urls import open_storage
from distributed.core.engines.engine import load_strategy
from distributed.core.errors import DataError, TaskError
from distributed.core.plan import Plan
from distributed.data.loading.loader import EvalLoader
from distributed.data.named_sources import NamedSources, role_of
from distributed.runtime.process_settings import ProcessSettings
from distributed.runtime.session import Session
from distributed.strategies.base import Strategy
from distributed.train.checks.nonpersistent import take
from distributed.train.checks.samples import check_datasets, check_read
from distributed.train.checks.user_state import BUFFERS
from distributed.train.evaluation import SetMeasure
from distributed.train.loaders import open_evaluations
from distributed.train.metrics import MetricNames
from distributed.train.predictions.files import Shard, ShardWriter, read_index, write_index
from distributed.train.predictions.pieces import RowPiece, merge, predict
from distributed.train.resume.sharing import send_tree
from distributed.train.task import Task


@dataclass(frozen=True)
class EvaluationJob:
    """Plan, task and data of one rank that evaluates."""

    plan: Plan
    task: Task
    sets: NamedSources
    role: str  # of the data, in messages
    predicts: bool = False  # rows of the only set; else the metrics of all
    to: str = ""  # where predictions are written; "": they are returned
    run: str = ""  # what distinguishes this evaluation from others that write there
    weights: str = ""  # the checkpoint whose weights the model gets; "": it has its own
    settings: ProcessSettings = field(default_factory=ProcessSettings.of_this_process)  # of the caller


def run_evaluation(job: EvaluationJob, session: Session) -> Any:
    """Metrics by name, or predictions: all rows, or None where they are written. Every rank calls it."""
    rng = rng_state(session.device)
    try:
        return _run(job, session)
    finally:
        restore_rng(rng, session.device)


def _run(job: EvaluationJob, session: Session) -> Any:
    plan, task = job.plan, job.task
    found: Any
    with _prepared(job, session) as strategy:
        check_datasets(plan, session, {role_of(job.role, name): source for name, source in job.sets.items()})
        opened = open_evaluations(job.sets, plan, session, lockstep=strategy.lockstep_eval)

        def check(loader: EvalLoader) -> None:
            if plan.sample_check and plan.iterable_split == "share":
                check_read(session, loader)

        if job.predicts:
            (loader,) = opened.loaders.values()
            pieces = _checked(predict(strategy, loader), loader, check)
            if job.to:
                found = None
                _write(job, session, loader, pieces)
            else:
                found = _gather(session, loader, list(pieces))
        else:
            names = MetricNames(["loss", *task.metric_names], session)
            measure = SetMeasure(strategy, session, names=names, whole_set=task.whole_set, on_read=check)
            found = measure.run(opened.loaders)
        session.barrier("the end of an evaluation")
    return found


@contextmanager
def _prepared(job: EvaluationJob, session: Session) -> Iterator[Strategy]:
    """The strategy, with the model on this rank's device."""
    plan = job.plan
    strategy: Strategy = load_strategy(plan.strategy)(plan)
    try:
        session.take_place(plan.mesh)
        session.seed(plan.seed)
        strategy.setup(job.task, session)
        if job.weights:
            _load_weights(job, session, strategy)
        yield strategy
    finally:
        strategy.close()


def _load_weights(job: EvaluationJob, session: Session, strategy: Strategy) -> None:
    """Each rank reads the parts of the checkpoint that it needs."""

    def boxes(name: str, shape: tuple[int, ...]) -> Any:
        if name.startswith("model/"):
            return strategy.shard_ranges(name, shape)
        return None if name.startswith(f"{BUFFERS}/model/") else ()

    restored = restore(job.plan.checkpoint.dir, job.weights, session, boxes=boxes)
    assert restored is not None
    strategy.load_state({"model": restored.shared["model"]})
    take(job.task.model, restored.shared.get(BUFFERS, {}).get("model", {}))


def _checked(pieces: Iterator[RowPiece], loader: EvalLoader, check: Any) -> Iterator[RowPiece]:
    yield from pieces
    check(loader)


def _gather(session: Session, loader: EvalLoader, mine: list[RowPiece]) -> Any:
    """All rows, on every rank."""
    held = session.gather_texts("who has predictions", "yes" if mine else "")
    found: list[RowPiece] = []
    for rank, text in enumerate(held):
        if not text:
            continue
        tree = {"pieces": [list(piece) for piece in mine]}
        if session.world_size > 1:
            tree = send_tree(session, "predictions", rank, tree if rank == session.rank else None)
        own = [RowPiece(*piece) for piece in tree["pieces"]]
        last = found[-1].first + found[-1].size if found and not loader.is_numbered else 0
        found += [piece._replace(first=piece.first + last) for piece in own]
    _check_count(sum(piece.size for piece in found), loader)
    return merge(found)


def _write(job: EvaluationJob, session: Session, loader: EvalLoader, pieces: Iterator[RowPiece]) -> None:
    """Shards of every rank, and the index by rank 0 when all of them are there."""
    storage = open_storage(job.to)
    if session.is_main:
        index = read_index(storage)
        if index is not None and index.run != job.run:
            raise _taken(job.to)
        if index is not None:  # of this very evaluation, whose ranks were started again
            storage.delete("predictions.json")
    session.barrier("where predictions are written")
    writer = ShardWriter(storage, session.rank)
    for piece in pieces:
        writer.add(piece)
    writer.flush()
    texts = session.gather_texts("shards of predictions", json.dumps([asdict(shard) for shard in writer.shards]))
    shards = [[Shard(**shard) for shard in json.loads(text)] for text in texts]
    _check_count(sum(shard.rows for own in shards for shard in own), loader)
    if session.is_main:
        write_index(storage, shards, is_numbered=loader.is_numbered, run=job.run)


def check_target(to: str, run: str = "") -> None:
    """Raise where predictions are that this evaluation has not written."""
    index = read_index(open_storage(to))
    if index is not None and (not run or index.run != run):
        raise _taken(to)


def _taken(to: str) -> DataError:
    return DataError(
        f"{to} holds predictions already",
        why="nothing is overwritten: they may be of other data or another model",
        do="choose another folder, or delete that one",
    )


def _check_count(found: int, loader: EvalLoader) -> None:
    if loader.samples is not None and found != loader.samples:
        raise TaskError(
            f"{found} rows were predicted of a dataset with {loader.samples}",
            why="every row has one prediction, and ranks have left some out or made some twice",
            do="start every rank with the same settings and the same version of this library",
        )
