"""DeepSpeed in a process: its configuration, environment and process group, and its files on a disk.

Each of these is the user's process's own again when the engine is closed.
"""

from __future__ import annotations

import copy
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.nn.functional

from distributed.core.env import environ_with, inherited_environ
from distributed.core.plan import Plan
from distributed.engines.deepspeed.offload import files_of
from distributed.engines.deepspeed.ops import ops_folder
from distributed.runtime.session import Session

_OFFLOADS = ("offload_optimizer", "offload_param")


def complete(plan: Plan) -> dict[str, Any]:
    """The plan's configuration with what depends on the number of ranks, and nothing that waits for a GPU or prints."""
    batch = plan.batch
    config: dict[str, Any] = copy.deepcopy(plan.engine["config"])
    config.setdefault("timers", {"throughput": {"enabled": False}})
    for name in _OFFLOADS:  # two runs may have been given the same folder
        place = config["zero_optimization"].get(name) or {}
        if place.get("device") == "nvme":
            place["nvme_path"] = str(files_of(place["nvme_path"], plan.run_dir))
    if plan.memory.recompute == "selective":  # see `linear_kept`
        config["zero_optimization"]["memory_efficient_linear"] = False
    return config | {
        "train_micro_batch_size_per_gpu": batch.per_device,
        "gradient_accumulation_steps": batch.accumulation,
        "train_batch_size": batch.per_device * batch.accumulation * plan.mesh.data_ranks,
    }


@contextmanager
def files_on_disk(config: Mapping[str, Any], session: Session) -> Iterator[None]:
    """What a rank puts onto a disk is taken away in the end, with the folders that are empty then.

    What an earlier world of this run has left goes before: it may have had ranks that are not here. Every rank comes.
    """
    zero = config["zero_optimization"]
    roots = {Path(place["nvme_path"]) for name in _OFFLOADS if "nvme_path" in (place := zero.get(name) or {})}
    if roots:
        for root in roots if session.env.local_rank == 0 else ():  # of each node, whose disk it may be
            shutil.rmtree(root, ignore_errors=True)
        session.barrier("files of an earlier world")
    try:
        yield
    finally:
        for root in roots:
            for parent, _, _ in list(os.walk(root)):  # which does not mind that other ranks do the same
                shutil.rmtree(Path(parent) / f"rank{session.rank}", ignore_errors=True)
            for parent, _, _ in list(os.walk(root, topdown=False)):
                with suppress(OSError):  # another rank's files are there, or it has taken the folder away
                    os.rmdir(parent)


def device_index(session: Session) -> int:
    """Of this rank's device, as DeepSpeed counts them."""
    return session.env.local_rank if session.device.index is None else session.device.index


@contextmanager
def deepspeed_environ(device: str, device_index: int) -> Iterator[None]:
    """Sets the variables that DeepSpeed reads: some of them at every step, and not every launcher sets them.

    `LOCAL_RANK` it takes for the index of its device, which it is not where ranks share one.
    """
    variables = {"LOCAL_RANK": str(device_index), "TORCH_EXTENSIONS_DIR": str(ops_folder(inherited_environ()))}
    if device == "cpu":
        variables["DS_ACCELERATOR"] = "cpu"  # looked for when it is imported
    with environ_with(variables):
        yield


@contextmanager
def linear_kept() -> Iterator[None]:
    """Stage 3 replaces ``torch.nn.functional.linear`` and leaves it so, for every model of the process.

    Its own adds the bias in place where autograd does not see it, and what another model keeps of the product, to
    recompute the rest from it, would have the bias in it.
    """
    linear = torch.nn.functional.linear
    try:
        yield
    finally:
        torch.nn.functional.linear = linear


@contextmanager
def process_group(device: str) -> Iterator[None]:
    """DeepSpeed takes the process group that is there; a single process has none, and gets one of its own."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo" if device == "cpu" else "nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        comm: Any = sys.modules.get("deepspeed.comm.comm")
        if comm is None or comm.cdb is None:  # it came to nothing before DeepSpeed saw the group
            dist.destroy_process_group()
        else:
            comm.destroy_process_group()
            comm.cdb = None
