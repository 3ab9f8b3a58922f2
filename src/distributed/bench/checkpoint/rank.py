"""A rank of the checkpoint benchmark on a sharded model: it holds its shard, and copies or saves it when told to."""

from __future__ import annotations

import json
import math
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from distributed.bench.checkpoint.copying import change, copy_into, copy_plainly, empty_like
from distributed.bench.interleave import answer, answering
from distributed.bench.workloads.gpt import Gpt, GptSize
from distributed.bench.workloads.models import text_rows
from distributed.checkpoint.format.tree import flatten
from distributed.checkpoint.restore.rng import rng_state
from distributed.checkpoint.save.saver import Saver
from distributed.checkpoint.save.staging import TensorStaging
from distributed.core.config import DistributedConfig
from distributed.core.env import WorkerEnv, worker_env
from distributed.data.loading.loader import Microbatch
from distributed.planner.hardware import probe_hardware
from distributed.planner.planning import JobProfile, make_plan
from distributed.runtime.session import Session
from distributed.runtime.tensor_shard import TensorShard
from distributed.runtime.world import leave_world
from distributed.strategies.torch_mesh import TorchMesh
from distributed.train.task import Task

CHANGED = 0.05  # of the bytes, between a save and the one after it
_STATE_BYTES = 12  # of a parameter: itself and AdamW's two tensors, in fp32
_WIDTHS = ((256, 256), (4096, 768), (math.inf, 2048))  # up to a number of MiB: GPT-2's, then that of GPT 1.3B
_VOCABULARY, _HEAD, _LENGTH = 8192, 64, 64


def make_model(mebibytes: int) -> tuple[nn.Module, GptSize]:
    """A GPT with about this much state, not made yet: as many tensors as training has, small ones among them.

    >>> [(size.width, size.blocks) for _, size in map(make_model, (64, 1024, 10240))]
    [(256, 4), (768, 12), (2048, 17)]
    """
    width = next(width for most, width in _WIDTHS if mebibytes < most)
    of_block = _STATE_BYTES * (12 * width**2 + 13 * width) / 2**20
    beside = _STATE_BYTES * _VOCABULARY * width / 2**20
    blocks = max(2, round((mebibytes - beside) / of_block))
    size = GptSize(blocks, width, width // _HEAD, _LENGTH, 1, _VOCABULARY)
    with torch.device("meta"):
        return Gpt(size), size


class Rank:
    """A rank of an FSDP run after its first step. Clocks are monotonic, and the same for all ranks of a machine."""

    def __init__(self, env: WorkerEnv, device: str, mebibytes: int, folder: str) -> None:
        settings: dict[str, Any] = {"backend": "fsdp", "device": device, "num_gpus": env.world_size, "batch_size": 1}
        config = DistributedConfig(**settings, share_gpus=device == "cuda")
        plan = make_plan(config, JobProfile(), probe_hardware(), run_dir=folder, world=env)
        how: dict[str, Any] = {"device": plan.device, "collectives": plan.collectives}
        self._session = Session.open(env, timeout_s=plan.collective_timeout_s, shares_gpus=plan.shares_gpus, **how)
        self._session.take_place(plan.mesh)
        self._folder, self._count, self._published = folder, 0, 0.0
        model, size = make_model(mebibytes)
        self._strategy = TorchMesh(plan)
        self._strategy.setup(Task(model, loss_weighting="samples"), self._session)
        self._first_step(size)
        self._shard = _pieces(self._strategy.state())
        torch.manual_seed(env.rank)
        for piece in self._shard.values():  # two chunks with the same bytes would be written once
            piece.normal_()
        is_gpu = self._session.device.type == "cuda"
        self._kept = empty_like(self._shard, pinned=is_gpu)
        staging = TensorStaging(pinned=is_gpu, check=self._session.check)
        options: dict[str, Any] = {
            "keep_last": 1,
            "guard_s": 0.0,
            "neighbours": self._session.neighbours,
            "at": self._note,
        }
        self._saver = Saver(f"{folder}/ours", self._session, staging, **options)
        self._saver.prepare(self._strategy.state(), self._own())

    def _first_step(self, size: GptSize) -> None:
        """After it the optimizer has its state."""
        ids, labels, _ = text_rows(size.batch, size=size)
        self._strategy.train_step([Microbatch({"ids": ids, "labels": labels}, 1.0, size.batch)])

    def describe(self) -> dict[str, Any]:
        return {"shard_mib": sum(piece.nbytes for piece in self._shard.values()) / 2**20}

    def take_turn(self, way: str) -> dict[str, Any]:
        if way == "copy":
            is_gpu = self._session.device.type == "cuda"
            return self._timed(lambda: copy_into(self._kept, self._shard) if is_gpu else copy_plainly(self._shard))
        if way == "copy, memory kept":
            return self._timed(lambda: copy_into(self._kept, self._shard))
        if way == "dcp.async_save":
            return self._save_by_torch()
        change(self._shard, 1.0 if way == "save" else CHANGED)
        return self._save()

    def _save(self) -> dict[str, Any]:
        self._count += 1
        found = self._timed(lambda: self._saver.save(self._count, self._strategy.state(), self._own(), {}))
        self._saver.wait()
        saved = self._saver.last_saved
        assert saved is not None
        written = {"total_s": saved.seconds, "written_mib": saved.written_bytes / 2**20}
        return found | written | {"published": self._published if self._session.is_main else None}

    def _save_by_torch(self) -> dict[str, Any]:
        self._count += 1
        futures: list[Any] = []
        place = f"{self._folder}/dcp-{self._count}"

        def save() -> None:
            model, optimizer = get_state_dict(self._strategy.module, self._strategy.optimizer)
            futures.append(dcp.async_save({"model": model, "optimizer": optimizer}, checkpoint_id=place))

        found = self._timed(save)
        futures[0].result()
        total = time.monotonic() - found["begun"]
        if self._session.is_main:
            shutil.rmtree(place)
        return found | {"total_s": total}

    def _timed(self, work: Callable[[], object]) -> dict[str, Any]:
        """All ranks begin together, with nothing left to do on the device."""
        self._synchronize()
        self._session.barrier("the turn of a benchmark")
        self._synchronize()
        begun = time.monotonic()
        work()
        ended = time.monotonic()
        return {"begun": begun, "ended": ended, "stall_s": ended - begun}

    def _synchronize(self) -> None:
        if self._session.device.type == "cuda":
            torch.cuda.synchronize(self._session.device)

    def _own(self) -> dict[str, Any]:
        return {"rng": rng_state(self._session.device)}

    def _note(self, point: str) -> None:
        if point == "manifest written":
            self._published = time.monotonic()

    def close(self) -> None:
        self._saver.close()
        self._strategy.close()


def _pieces(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What this rank holds of it: the live tensors themselves, tied ones once."""
    held = {name: leaf for name, leaf in flatten(state)[0].items() if isinstance(leaf, TensorShard)}
    return {f"{name}/{n}": piece for name, leaf in held.items() for n, (_, piece) in enumerate(leaf.pieces)}


def main() -> None:
    """`python -m distributed.bench.checkpoint.rank DEVICE MEBIBYTES FOLDER PORT`, by the benchmark."""
    device, mebibytes, folder, port = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    env = worker_env() or WorkerEnv()
    with answering(port, env.rank) as channel:
        rank: Rank | None = None
        for line in channel:
            order = json.loads(line)
            if rank is None:
                rank = Rank(env, device, mebibytes, folder)
            answer(channel, rank.describe() if order == "describe" else rank.take_turn(order))
        if rank is not None:
            rank.close()
    leave_world()


if __name__ == "__main__":
    main()
