"""ModuleCalls: the calls of a LightningModule's methods, with what it sees of the run while one of them runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from distributed.adapters.lightning.hooks import overrides
from distributed.adapters.lightning.module_log import ModuleLog, is_metric
from distributed.adapters.lightning.stand_in import ModuleTrainer
from distributed.adapters.unmapped import UnmappedError
from distributed.core.errors import TaskError
from distributed.train.checks.reachable import changes, look


class ModuleCalls:
    """Of one module on one rank. Between two calls, the module holds nothing of the run."""

    def __init__(self, module: Any, trainer: ModuleTrainer, log: ModuleLog) -> None:
        self.module, self.trainer, self._log = module, trainer, log
        self.samples = 0  # of the batch that runs

    def has(self, hook: str) -> bool:
        return overrides(self.module, hook)

    def hook(self, name: str, *given: Any, stage: str | None = None) -> Any:
        """Call a method if the module has its own."""
        return self.call(name, *given, stage=stage) if self.has(name) else None

    def call(self, name: str, *given: Any, stage: str | None = None) -> Any:
        with self._attached(name, stage):
            return getattr(self.module, name)(*given)

    def step(self, name: str, batch: Any, stage: str) -> Any:
        """Call a step with its batch, and the number of that if it takes one."""
        function = getattr(self.module, name)
        given = (batch, self.trainer.batch_idx) if _takes_two(function) else (batch,)
        with self._attached(name, stage):
            return function(*given)

    @contextmanager
    def leaving_no_trace(self) -> Iterator[None]:
        """Around a pass that does not count: nothing is logged, and torchmetrics are as they were before."""
        module, log = self.module, self._log
        metrics = [part for part in module.modules() if is_metric(part)]
        kept = [dict(vars(metric)) for metric in metrics]
        for metric in metrics:
            vars(metric).update({name: _copied(value) for name, value in metric.metric_state.items()})
        log.is_silent = True
        try:
            yield
        finally:
            log.is_silent = False
            log.of_step.clear()
            for metric, before in zip(metrics, kept, strict=True):
                vars(metric).clear()
                vars(metric).update(before)

    @contextmanager
    def checked(self, name: str) -> Iterator[None]:
        """Around a stand-in, with which a rank without samples keeps in step: the module may keep nothing of it."""
        module = self.module
        own = [*module.parameters(), *module.buffers()]
        before = look({"module": module}, own)
        with self.leaving_no_trace():
            yield
        if moved := changes(before, look({"module": module}, own)):
            raise TaskError(
                f"{type(module).__name__}.{name} keeps what it sees, and a rank without samples runs it with a copy",
                why=f"the step changes {moved[0]}",
                do="drop_last=True, or keep sums in a torchmetrics.Metric or by self.log",
            )

    @contextmanager
    def _attached(self, where: str, stage: str | None) -> Iterator[None]:
        module, trainer, before = self.module, self.trainer, self.trainer.stage
        trainer.stage = before if stage is None else stage
        own: dict[str, Callable[..., Any]] = {
            "log": _Logging(self, self._log, where),
            "log_dict": _LoggingAll(self, self._log, where),
            "optimizers": self._optimizers,
            "lr_schedulers": self._schedulers,
            "all_gather": _refused("self.all_gather", "self.log averages over the ranks"),
            "manual_backward": _refused("self.manual_backward", "return the loss from training_step"),
        }
        module.trainer = trainer
        vars(module).update(own)
        try:
            yield
        finally:
            for name in own:
                vars(module).pop(name, None)
            module.trainer = None
            trainer.stage = before

    def _optimizers(self, use_pl_optimizer: bool = True) -> Any:
        return self.trainer.optimizers[0]

    def _schedulers(self) -> Any:
        found = self.trainer.schedulers
        return found[0] if len(found) == 1 else found or None


class _Logging:
    """`self.log` of a module, while one of its methods runs."""

    def __init__(self, calls: ModuleCalls, log: ModuleLog, where: str) -> None:
        self._calls, self._log, self._where = calls, log, where

    def __call__(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,  # this, and the other names without effect, are of Lightning's own progress bar
        logger: bool | None = None,
        *,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,  # means are over all ranks
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        if rank_zero_only or sync_dist_group is not None:
            given = "rank_zero_only=True" if rank_zero_only else "sync_dist_group"
            why = "every rank's number is part of the mean"
            raise TaskError(f"self.log({name!r}, …, {given})", why=why, do="leave it out, and log on every rank")
        self._log.log(
            self._where,
            name,
            value,
            stage=self._calls.trainer.stage,
            module=self._calls.module,
            samples=self._calls.samples,
            on_step=on_step,
            on_epoch=on_epoch,
            batch_size=batch_size,
            reduce_fx=reduce_fx,
        )


class _LoggingAll(_Logging):
    """`self.log_dict`."""

    def __call__(self, dictionary: Mapping[str, Any], *given: Any, **options: Any) -> None:  # type: ignore[override]
        for name, value in dictionary.items():
            super().__call__(name, value, *given, **options)


def _refused(what: str, do: str) -> Callable[..., Any]:
    def refuse(*given: Any, **named: Any) -> Any:
        raise UnmappedError(what, why="a run has nothing of this name", do=do)

    return refuse


def _copied(value: Any) -> Any:
    if isinstance(value, list):
        return [part.clone() for part in value]
    return value.clone() if isinstance(value, torch.Tensor) else value


def _takes_two(function: Callable[..., Any]) -> bool:
    """Whether a step takes the number of its batch beside it."""
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.KEYWORD_ONLY]
    return len(parameters) > 1 or any(p.kind is p.VAR_POSITIONAL for p in parameters)
