"""Many jobs in one world of ranks on NCCL, whose start costs more than they do: what each returns or fails with."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from distributed.testing import run_ranks

SHARED: dict[str, Any] = {"device": "cuda", "share_gpus": True, "tf32": False}
ALONE = SHARED | {"share_gpus": False, "capture": False}  # one process, which the ranks are compared with
_AGREE_S = timedelta(seconds=30)

Job = tuple[Callable[..., Any], tuple[Any, ...]]


@dataclass(frozen=True)
class Failed:
    """In the place of a result."""

    told: str


def run_jobs(ranks: int, jobs: dict[str, Job]) -> list[dict[str, Any]]:
    """What each rank of a new world on NCCL has found; a job that fails on every rank leaves the others alone."""
    return run_ranks(_do_all, ranks, jobs, device="cuda")


def result(found: dict[str, Any], name: str) -> Any:
    value = found[name]
    assert not isinstance(value, Failed), value.told
    return value


def _do_all(jobs: dict[str, Job]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (function, args) in jobs.items():
        began = time.perf_counter()
        try:
            found[name] = function(*args)
        except Exception as failed:  # noqa: BLE001 - reported to the test that the case belongs to
            found[name] = Failed("".join(traceback.format_exception(failed)))
            print(found[name].told, flush=True)
        _agree(name, isinstance(found[name], Failed))
        print(f"{name}: {time.perf_counter() - began:.1f} s", flush=True)
    return found


def _agree(name: str, has_failed: bool) -> None:
    """Where some ranks have failed and others have not, the world is no good for the next job."""
    if not dist.is_initialized():
        return
    store = dist.PrefixStore(f"jobs/{name}", dist.distributed_c10d._get_default_store())
    store.set(str(dist.get_rank()), str(has_failed))
    names = [str(rank) for rank in range(dist.get_world_size())]
    store.wait(names, _AGREE_S)
    told = {store.get(rank).decode() for rank in names}
    assert len(told) == 1, f"{name} has failed on some ranks only"
