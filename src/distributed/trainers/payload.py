"""The payload: a job written down once for all ranks. Large tensors are mapped by them, not copied.

It goes from a process to its own children through a file that only this user can read. They are given its digest, and
refuse any other file in its place.
"""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from distributed.core.atomic import Sealed, create_private, seal
from distributed.core.errors import Problem, TaskError
from distributed.data.named_sources import role_of
from distributed.train.evaluation_job import EvaluationJob
from distributed.train.job_reading import PICKLE
from distributed.train.rank_job import RankJob
from distributed.trainers.pickling import JobPickler, PickleModule


def write_payload(job: RankJob | EvaluationJob, path: Path) -> Sealed:
    """Write the job, or say which attribute of it cannot be sent. The caller closes the sealed file."""
    handle = create_private(path)
    try:
        with os.fdopen(handle, "wb", closefd=False) as file:
            torch.save(job, file, pickle_module=PickleModule, pickle_protocol=5)
        with os.fdopen(handle, "rb", closefd=False) as written, zipfile.ZipFile(written) as archive:
            name = next(name for name in archive.namelist() if name.endswith(PICKLE))
            return seal(path, handle, archive.read(name))
    except Exception as failed:  # pickling runs any object's own code, which may raise anything
        os.close(handle)
        path.unlink(missing_ok=True)
        raise TaskError(_culprits(job) or [Problem("the job cannot be sent to the ranks", why=str(failed))]) from failed


def _culprits(job: RankJob | EvaluationJob) -> list[Problem]:
    """Which attributes cannot be pickled, each by its path."""
    task = job.task
    if isinstance(job, EvaluationJob):
        sources = {role_of(job.role, name): source for name, source in job.sets.items()}
    else:
        evaluated = {role_of("val_loader", name): source for name, source in job.evaluation.items()}
        sources = {"train_loader": job.train} | evaluated
    parts = {
        "model": task.model,
        "loss_fn": task.loss_fn,
        "optimizer": task.optimizer,
        "scheduler": task.scheduler,
        "metrics": dict(task.metrics or {}),
        "callbacks": [] if isinstance(job, EvaluationJob) else list(job.callbacks),
    }
    for role, source in sources.items():
        parts |= {f"{role}.dataset": source.dataset, f"{role}.collate_fn": source.collate_fn}
        parts |= {f"{role}.sampler": source.own_sampler and source.own_sampler.sampler}
        parts |= {f"{role}.worker_init_fn": source.worker_init_fn}
    problems = []
    for name, part in parts.items():
        found = _deepest(name, part, seen=set())
        if found is not None:
            path, value, error = found
            problems.append(
                Problem(
                    f"{path} cannot be sent to the ranks: it is a {type(value).__name__}",
                    why=str(error).splitlines()[0],
                    do="make it where it is used (in forward or __getitem__), or leave it out in __getstate__",
                )
            )
    return problems


def _deepest(path: str, value: Any, seen: set[int]) -> tuple[str, Any, Exception] | None:
    """The innermost part that fails, because its own parts do not."""
    error = _pickling_error(value)
    if error is None or id(value) in seen:
        return None
    seen.add(id(value))
    for child_path, child in _children(path, value):
        found = _deepest(child_path, child, seen)
        if found is not None:
            return found
    return path, value, error


def _pickling_error(value: Any) -> Exception | None:
    try:
        JobPickler(io.BytesIO(), protocol=5).dump(value)
    except Exception as error:  # noqa: BLE001 - pickling runs any object's own code
        return error
    return None


def _children(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"{path}[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"{path}[{index}]", item) for index, item in enumerate(value))
    else:
        for name, item in getattr(value, "__dict__", {}).items():
            if name == "_modules" and isinstance(item, Mapping):
                yield from ((f"{path}.{child}", module) for child, module in item.items())
            else:
                yield f"{path}.{name}", item
        for cell_name, cell in zip(
            getattr(getattr(value, "__code__", None), "co_freevars", ()),
            getattr(value, "__closure__", None) or (),
            strict=False,
        ):
            yield f"{path} (its variable {cell_name})", cell.cell_contents
