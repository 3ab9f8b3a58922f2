"""AcrossRanks: who a process is among the ranks, and what goes over all of them, from the first line of a script on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from distributed.adapters.gathering import gather_objects, gather_rows
from distributed.core.batch_plan import BatchPlan
from distributed.core.collectives import choose_collectives
from distributed.core.config import DistributedConfig
from distributed.core.env import WorkerEnv
from distributed.core.errors import TaskError
from distributed.core.plan import Plan
from distributed.planner.hardware import probe_for
from distributed.planner.resources import read_resources
from distributed.runtime.rendezvous import open_session
from distributed.runtime.session import Session
from distributed.runtime.torch_compat import tree_map


class AcrossRanks:
    """A session that is joined at once: a script waits for others long before it has a model."""

    def __init__(self, config: DistributedConfig, world: WorkerEnv | None) -> None:
        env = world or WorkerEnv()
        resources, _, _ = read_resources(config, probe_for(config), env)
        plan = Plan(
            env.run_dir,
            BatchPlan(per_device=1),
            device=resources.device,
            shares_gpus=resources.shares_gpus,
            collectives=choose_collectives(resources.device, config.communication_backend)[0],
            collective_timeout_s=config.collective_timeout_s,
        )
        self.session: Session = open_session(plan, env)

    @property
    def device(self) -> torch.device:
        return self.session.device

    @property
    def num_processes(self) -> int:
        return self.session.world_size

    @property
    def process_index(self) -> int:
        return self.session.rank

    @property
    def local_process_index(self) -> int:
        return self.session.env.local_rank

    @property
    def is_main_process(self) -> bool:
        return self.session.is_main

    @property
    def is_local_main_process(self) -> bool:
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        return self.process_index == self.num_processes - 1

    @property
    def use_distributed(self) -> bool:
        return self.num_processes > 1

    @property
    def distributed_type(self) -> str:
        """As the values of Accelerate's DistributedType, which compare equal to text."""
        if not self.use_distributed:
            return "NO"
        return "MULTI_GPU" if self.device.type == "cuda" else "MULTI_CPU"

    def print(self, *words: Any, **options: Any) -> None:
        """By the main process of each machine."""
        if self.is_local_main_process:
            print(*words, **options)

    def wait_for_everyone(self) -> None:
        self.session.barrier("wait_for_everyone")

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """The main process goes through it, then the others do."""
        with self._goes_first(self.is_main_process):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """The main process of each machine goes through it, then the others do."""
        with self._goes_first(self.is_local_main_process):
            yield

    @contextmanager
    def _goes_first(self, is_first: bool) -> Iterator[None]:
        if not is_first:
            self.session.barrier("another process goes first")
        yield
        if is_first:
            self.session.barrier("another process goes first")

    def on_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return self._on(function, lambda: self.is_main_process)

    def on_local_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return self._on(function, lambda: self.is_local_main_process)

    def on_last_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return self._on(function, lambda: self.is_last_process)

    def _on(self, function: Callable[..., Any], is_here: Callable[[], bool]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*given: Any, **named: Any) -> Any:
            return function(*given, **named) if is_here() else None

        return call

    def gather(self, tensor: Any) -> Any:
        """The rows of all ranks, of each tensor of a tree."""
        return self._gathered(tensor, is_empty=False)

    def _gathered(self, tree: Any, *, is_empty: bool) -> Any:
        """`is_empty`: whether none of this rank's rows count."""

        def gather(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                raise TaskError(
                    f"gather got a {type(leaf).__name__}",
                    why="gather takes tensors and trees of them",
                    do="gather_object",
                )
            rows = leaf.reshape(1) if leaf.dim() == 0 else leaf
            return gather_rows(self.session, "gather", rows[:0] if is_empty else rows)

        return tree_map(gather, tree)

    def gather_object(self, value: Any) -> list[Any]:
        """A picklable object of each rank."""
        return gather_objects(self.session, "gather_object", value)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum or the mean over all ranks, of each tensor of a tree."""
        if reduction not in ("sum", "mean", "none"):
            raise TaskError(f"reduce(…, {reduction!r})", why="there are 'sum', 'mean' and 'none'", do="'sum'")

        def add(leaf: torch.Tensor) -> torch.Tensor:
            if reduction == "none":
                return leaf * scale
            whole = self.session.sum("reduce", leaf.detach().clone().contiguous())
            return (whole / self.num_processes if reduction == "mean" else whole) * scale

        return tree_map(add, tensor)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Each tensor of a tree as long as the longest of the ranks."""

        def pad(leaf: torch.Tensor) -> torch.Tensor:
            if dim >= leaf.dim():
                return leaf
            length = torch.tensor([leaf.shape[dim]], device=self.device)
            most = int(self.session.max("longest tensor", length).item())
            if most == leaf.shape[dim]:
                return leaf
            shape = [most if at == dim else size for at, size in enumerate(leaf.shape)]
            found = leaf.new_full(shape, pad_index)
            start = most - leaf.shape[dim] if pad_first else 0
            found.narrow(dim, start, leaf.shape[dim]).copy_(leaf)
            return found

        return tree_map(pad, tensor)
