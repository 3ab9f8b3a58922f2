"""WholeBatch: functions that take the samples of a micro-batch together take those of all ranks, while it is run.

One process would give these functions the whole micro-batch; a rank gives them its share. They are replaced where
they are looked up, and not the modules that call them: so a subclass keeps its forward, a module its hooks, its
parametrizations and every name it is registered under, and a model may call them without a module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from distributed.core.errors import TaskError
from distributed.strategies.batchnorm import Groups, normalize_over_ranks

_KERNELS = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")  # which nobody calls but by their own name


class WholeBatch:
    """A scope for the forward and backward pass of one micro-batch; every rank enters it at the same time."""

    def __init__(self, groups: Groups = (None,), copies: int = 1, *, normalizes: bool = True) -> None:
        """`groups`: those over which samples are shared out. `copies`: how many of their ranks see the same ones.

        Unless it `normalizes`, batches are normalized by the share of each rank.
        """
        self._groups, self._copies, self._normalizes = tuple(groups), copies, normalizes
        self._is_empty = False
        self._kept: list[tuple[Any, str, Any]] = []
        self._put: list[tuple[Any, str, Callable[..., Any]]] | None = None

    def of(self, size: int) -> WholeBatch:
        """The scope of a share of so many samples; one of none is a stand-in, which leaves no trace."""
        self._is_empty = not size
        return self

    def __enter__(self) -> None:
        if self._put is None:
            self._put = self._replacements()
        self._kept = [(owner, name, getattr(owner, name)) for owner, name, _ in self._put]
        for owner, name, function in self._put:
            setattr(owner, name, function)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for owner, name, function in self._kept:
            setattr(owner, name, function)
        self._kept = []

    def _replacements(self) -> list[tuple[Any, str, Callable[..., Any]]]:
        if "torch._dynamo" in sys.modules:  # it finds torch's functions by name, once: they must be torch's own then
            sys.modules["torch._dynamo"].trace_rules.get_torch_obj_rule_map()
        always = [
            (torch, "instance_norm", self._instance_norm(torch.instance_norm)),
            (torch, "embedding_renorm_", self._embedding_renorm(torch.embedding_renorm_)),
        ]
        if not self._normalizes:
            return always
        return [
            *always,
            (F, "batch_norm", self._functional_batch_norm(F.batch_norm)),
            (torch, "batch_norm", self._batch_norm(torch.batch_norm)),
            (nn.SyncBatchNorm, "forward", _BatchNorm.forward),  # torch's own would meet the others in its own way
            *((torch, name, _refused(name, getattr(torch, name))) for name in _KERNELS),
        ]

    def _functional_batch_norm(self, own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Replaced beside torch.batch_norm, as it refuses a share of one sample before it comes to that."""

        def batch_norm(
            input: torch.Tensor,
            running_mean: torch.Tensor | None,
            running_var: torch.Tensor | None,
            weight: torch.Tensor | None = None,
            bias: torch.Tensor | None = None,
            training: bool = False,
            momentum: float = 0.1,
            eps: float = 1e-5,
        ) -> torch.Tensor:
            if not training or _is_alike(input):
                return own(input, running_mean, running_var, weight, bias, training, momentum, eps)
            return self._normalize(input, running_mean, running_var, weight, bias, momentum, eps)

        return batch_norm

    def _batch_norm(self, own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def batch_norm(
            input: torch.Tensor,
            weight: torch.Tensor | None,
            bias: torch.Tensor | None,
            running_mean: torch.Tensor | None,
            running_var: torch.Tensor | None,
            training: bool,
            momentum: float,
            eps: float,
            cudnn_enabled: bool,
        ) -> torch.Tensor:
            if not training or _is_alike(input):
                return own(input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled)
            return self._normalize(input, running_mean, running_var, weight, bias, momentum, eps)

        return batch_norm

    def _normalize(self, input: torch.Tensor, *args: Any) -> torch.Tensor:
        return normalize_over_ranks(input, *args, groups=self._groups, copies=self._copies, is_empty=self._is_empty)

    def _instance_norm(self, own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Instances are normalized by themselves; running statistics are means over all of them."""

        def instance_norm(
            input: torch.Tensor,
            weight: torch.Tensor | None,
            bias: torch.Tensor | None,
            running_mean: torch.Tensor | None,
            running_var: torch.Tensor | None,
            use_input_stats: bool,
            momentum: float,
            eps: float,
            cudnn_enabled: bool,
        ) -> torch.Tensor:
            result = own(input, weight, bias, running_mean, running_var, use_input_stats, momentum, eps, cudnn_enabled)
            if use_input_stats and not input.is_meta:
                for running in (running_mean, running_var):
                    if running is not None:
                        self._average(running, 0 if self._is_empty else input.size(0))
            return result

        return instance_norm

    @torch.no_grad()
    def _average(self, running: torch.Tensor, instances: int) -> None:
        """Of the ranks' statistics, which began alike and are each a mean over so many instances."""
        sums = torch.cat([running.double().nan_to_num(0.0) * instances, running.new_full((1,), instances).double()])
        for group in self._groups:
            dist.all_reduce(sums, group=group)
        running.copy_(sums[:-1] / sums[-1:])

    def _embedding_renorm(self, own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """One process shortens every row that the micro-batch looks up; so does each rank, in its copy of the table."""

        @torch.no_grad()
        def embedding_renorm_(
            weight: torch.Tensor, indices: torch.Tensor, max_norm: float, norm_type: float
        ) -> torch.Tensor:
            if weight.is_meta:
                return own(weight, indices, max_norm, norm_type)
            is_used = torch.zeros(weight.size(0), dtype=torch.uint8, device=weight.device)
            is_used[indices.reshape(-1)] = 0 if self._is_empty else 1
            for group in self._groups:
                dist.all_reduce(is_used, op=dist.ReduceOp.MAX, group=group)
            norms = torch.linalg.vector_norm(weight, norm_type, dim=1)
            factors = torch.where((is_used > 0) & (norms > max_norm), max_norm / (norms + 1e-7), 1.0)
            return weight.mul_(factors.unsqueeze(1).to(weight.dtype))

        return embedding_renorm_


class NoWholeBatch(WholeBatch):
    """The same scope where ranks do not run a micro-batch at one time: what needs all of its samples is refused."""

    def _replacements(self) -> list[tuple[Any, str, Callable[..., Any]]]:
        return [(owner, name, self._refusing(name, getattr(owner, name))) for owner, name, _ in super()._replacements()]

    def _refusing(self, name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if _needs_all(name, input, args, kwargs):
                raise TaskError(
                    f"the model calls {name}, with pipeline_parallel and several shares of a batch",
                    why="it needs the samples of all ranks, which a pipeline does not bring together",
                    do="leave pipeline_parallel out"
                    + (", or set sync_batchnorm=False" if name.endswith("batch_norm") else ""),
                )
            return own(input, *args, **kwargs)

        return refuse


def _needs_all(name: str, input: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call takes the samples of a batch together."""
    if not isinstance(input, torch.Tensor) or input.is_meta:  # a module's forward comes to a function before long
        return False
    if name == "embedding_renorm_":
        return True
    if name == "instance_norm":
        return args[2] is not None and args[4] is True
    is_training = kwargs.get("training") or any(value is True for value in args[:7])  # cuDNN's switch comes after
    return bool(is_training) and not _is_alike(input)


def _is_alike(input: torch.Tensor) -> bool:
    """Whether it is the same on every rank: without data, or a weight, as layers with standardized weights give it."""
    return input.is_meta or isinstance(input, nn.Parameter) or isinstance(input._base, nn.Parameter)


def _refused(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if input.is_meta or not (kwargs.get("training") or any(value is True for value in args)):
            return own(input, *args, **kwargs)
        raise TaskError(
            f"the model calls torch.{name}",
            why="it would normalize by this rank's share of the batch, where one process has the whole of it",
            do="call torch.nn.functional.batch_norm, which is computed over all ranks, or set sync_batchnorm=False",
        )

    return kernel
