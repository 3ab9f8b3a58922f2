"""WholeBatch: functions over all samples of a micro-batch, such as batch_norm, are computed over all ranks.

One process would call these functions with the whole micro-batch; a rank calls them with its share. The functions are
replaced where they are looked up, and not the modules that call them: so a subclass keeps its forward, a module its
hooks, its parametrizations and all of its names, and a model may call them without a module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from distributed.core.errors import TaskError
from distributed.runtime.torch_compat import BatchNormBase, let_compiler_find_functions, view_base
from distributed.strategies.data_parallel.batchnorm import Groups, normalize_over_ranks

_Functions = dict[str, Callable[..., Any]]  # by name
_Read = Callable[[str], Callable[..., Any]]
_Write = Callable[[_Functions], None]
_TABLES = ("embedding", "embedding_bag")  # both take a weight, indices, one more argument, and `scale_grad_by_freq`
_KERNELS = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")  # called only by their own names


class WholeBatch:
    """A scope for the forward and backward pass of one micro-batch; every rank enters it at the same time.

    Its collectives have no name: a model is compiled with them, and the compiler cannot trace the report of one.
    """

    def __init__(self, groups: Groups = (None,), copies: int = 1, *, normalizes: bool = True) -> None:
        """`groups`: those over which samples are divided. `copies`: how many of their ranks have the same samples.

        Unless it `normalizes`, each rank normalizes by its own share.
        """
        self._groups, self._copies, self._normalizes = tuple(groups), copies, normalizes
        self._is_empty = False
        self._kept: list[tuple[_Write, _Functions]] = []
        self._put: list[tuple[_Read, _Write, _Functions]] | None = None  # for each module or class that has some

    def of(self, size: int) -> WholeBatch:
        """The scope of a share with this number of samples; an empty one is a stand-in, which changes no statistics."""
        self._is_empty = not size
        return self

    def __enter__(self) -> None:
        if self._put is None:
            self._put = _by_owner(self._replacements())
        self._kept = [(write, dict(zip(put, map(read, put), strict=True))) for read, write, put in self._put]
        for _, write, put in self._put:
            write(put)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for write, kept in self._kept:
            write(kept)
        self._kept = []

    def _replacements(self) -> list[tuple[Any, str, Callable[..., Any]]]:
        let_compiler_find_functions(sys.modules)  # torch's own
        always = [
            (torch, "instance_norm", self._instance_norm(torch.instance_norm)),
            (torch, "embedding_renorm_", self._embedding_renorm(torch.embedding_renorm_)),
            *_refused_frequencies(),
        ]
        if not self._normalizes:
            return always
        return [
            *always,
            (F, "batch_norm", self._functional_batch_norm(F.batch_norm)),
            (torch, "batch_norm", self._batch_norm(torch.batch_norm)),
            (nn.SyncBatchNorm, "forward", BatchNormBase.forward),  # torch's own has other collectives
            *((torch, name, _refused(name, getattr(torch, name))) for name in _KERNELS),
        ]

    def _functional_batch_norm(self, own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Replaces F.batch_norm too, which refuses a share of one sample before it calls torch.batch_norm."""

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
            own_statistics = {"running_mean": running_mean, "running_var": running_var}
            return self._normalize(input, **own_statistics, weight=weight, bias=bias, momentum=momentum, eps=eps)

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
            own_statistics = {"running_mean": running_mean, "running_var": running_var}
            return self._normalize(input, **own_statistics, weight=weight, bias=bias, momentum=momentum, eps=eps)

        return batch_norm

    def _normalize(self, input: torch.Tensor, **given: Any) -> torch.Tensor:
        return normalize_over_ranks(input, **given, groups=self._groups, copies=self._copies, is_empty=self._is_empty)

    def _instance_norm(self, own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Normalize each instance; running statistics are means over the instances of all ranks."""

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
        """The weighted mean of the ranks' statistics, which began equal and are each a mean over a rank's instances."""
        sums = torch.cat([running.double().nan_to_num(0.0) * instances, running.new_full((1,), instances).double()])
        for group in self._groups:
            dist.all_reduce(sums, group=group)
        running.copy_(sums[:-1] / sums[-1:])

    def _embedding_renorm(self, own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Shorten every row that the micro-batch of all ranks looks up, in each rank's replica of the table."""

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
    """The scope for ranks that run a micro-batch at different times, as pipelines do: such functions are refused."""

    def __init__(self, *, normalizes: bool = True, asked: str = "pipeline_parallel") -> None:
        """`asked`: the setting by which they do."""
        super().__init__(normalizes=normalizes)
        self._asked = asked

    def _replacements(self) -> list[tuple[Any, str, Callable[..., Any]]]:
        whole = [(owner, name) for owner, name, _ in super()._replacements() if name not in _TABLES]
        refused = [(owner, name, self._refusing(name, getattr(owner, name))) for owner, name in whole]
        return [*refused, *_refused_frequencies()]

    def _refusing(self, name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if _needs_all(name, input, args, kwargs):
                raise TaskError(
                    f"the model calls {name}, with {self._asked} and several shares of a batch",
                    why="the function needs the samples of all ranks at once, which these run at different times",
                    do=f"leave {self._asked} out"
                    + (", or set sync_batchnorm=False" if name.endswith("batch_norm") else ""),
                )
            return own(input, *args, **kwargs)

        return refuse


class PartsOfBatch(WholeBatch):
    """The scope of one process that runs a batch in parts, as virtual ranks: only scale_grad_by_freq is refused."""

    def _replacements(self) -> list[tuple[Any, str, Callable[..., Any]]]:
        return _refused_frequencies()


def _by_owner(replacements: list[tuple[Any, str, Callable[..., Any]]]) -> list[tuple[_Read, _Write, _Functions]]:
    """For each owner, how its functions are read and written, all at once: a scope is entered in every step."""
    found: dict[int, tuple[Any, _Functions]] = {}
    for owner, name, function in replacements:
        found.setdefault(id(owner), (owner, {}))[1][name] = function
    return [(vars(owner).__getitem__, _writer(owner), functions) for owner, functions in found.values()]


def _writer(owner: Any) -> _Write:
    if isinstance(owner, ModuleType):
        return vars(owner).update

    def write(functions: _Functions) -> None:
        for name, function in functions.items():
            setattr(owner, name, function)

    return write


def _refused_frequencies() -> list[tuple[Any, str, Callable[..., Any]]]:
    return [(torch, name, _refusing_frequencies(name, getattr(torch, name))) for name in _TABLES]


def _refusing_frequencies(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    def lookup(weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("scale_grad_by_freq", args[2] if len(args) > 2 else False):
            raise TaskError(
                f"the model calls {name} with scale_grad_by_freq=True, with several shares of a batch",
                why="the lookup divides gradients by how often a row occurs in the batch, which is computed in shares",
                do="leave scale_grad_by_freq out, or train with one rank and without virtual ranks",
            )
        return own(weight, *args, **kwargs)

    return lookup


def _needs_all(name: str, input: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call computes over all samples of a batch."""
    if not isinstance(input, torch.Tensor) or input.is_meta:  # a module's forward calls such a function itself
        return False
    if name == "embedding_renorm_":
        return True
    if name == "instance_norm":
        return args[2] is not None and args[4] is True
    is_training = kwargs.get("training") or any(value is True for value in args[:7])  # cuDNN's switch comes after
    return bool(is_training) and not _is_alike(input)


def _is_alike(input: torch.Tensor) -> bool:
    """Whether an input is equal on every rank: without data, or a weight, as in layers with standardized weights."""
    return input.is_meta or isinstance(input, nn.Parameter) or isinstance(view_base(input), nn.Parameter)


def _refused(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if input.is_meta or not (kwargs.get("training") or any(value is True for value in args)):
            return own(input, *args, **kwargs)
        raise TaskError(
            f"the model calls torch.{name}",
            why="the function would normalize by one rank's share of the batch, while one process has the whole batch",
            do="call torch.nn.functional.batch_norm, which is computed over all ranks, or set sync_batchnorm=False",
        )

    return kernel
