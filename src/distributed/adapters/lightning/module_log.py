"""ModuleLog: what a LightningModule gives `self.log`, as numbers of a step and as exact means of an epoch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from distributed.core.errors import TaskError
from distributed.runtime.session import Session
from distributed.strategies.base import Logged, MetricSum
from distributed.train.given.step_results import logged_value
from distributed.train.metrics import MetricNames
from distributed.train.whole_set.metrics import states_of_ranks
from distributed.train.whole_set.torch_metrics import MergedMetric

_BATCH_HOOKS = ("on_train_batch", "on_before_", "on_after_backward", "on_validation_batch")
_PREFIXES = {"validating": "val_", "testing": "test_"}  # that the run puts before the names of an evaluation


def is_metric(value: Any) -> bool:
    """Whether a value is a torchmetrics Metric, which is imported where there is one."""
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, torchmetrics.Metric)


class ModuleLog:
    """Of one rank. Between two steps it holds sums alone, so that a checkpoint can have them."""

    def __init__(self) -> None:
        self.of_step: dict[str, Logged] = {}  # of the batch that runs
        self.is_silent = False  # in a pass that leaves no trace
        self._here: dict[str, MetricSum] = {}  # of this epoch on this rank, since the last `fold`
        self._before: dict[str, MetricSum] = {}  # of all ranks, before that
        self._metrics: dict[str, dict[str, str]] = {"training": {}, "validating": {}}  # paths of torchmetrics, by name

    # ---- what the module calls

    def log(
        self,
        where: str,
        name: str,
        value: Any,
        *,
        stage: str,
        module: nn.Module,
        samples: int,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        batch_size: int | None = None,
        reduce_fx: Any = "mean",
    ) -> None:
        """`where`: the method of the module that logs; `samples`: of its batch."""
        in_step, in_batch_hook = where.endswith("_step"), where.startswith(_BATCH_HOOKS)
        is_training = stage == "training"
        on_step = (is_training and (in_step or in_batch_hook)) if on_step is None else on_step
        on_epoch = not on_step if on_epoch is None else on_epoch
        if self.is_silent or not (on_step or on_epoch):
            return
        self._check(name, on_step=on_step and not is_training, reduce_fx=reduce_fx if on_epoch else "mean")
        if is_metric(value):
            self._log_metric(name, value, module, stage, is_both=on_step and on_epoch, on_epoch=on_epoch)
            if not on_step:
                return
            value = value._forward_cache  # of its last call
        counted = samples if batch_size is None else batch_size
        weight = float(counted) if in_step or in_batch_hook else 1.0
        logged = logged_value(name, value, batch_size, of_own_loop=True)  # which names what it validates itself
        if not is_training and in_step:
            self.of_step[name.removeprefix(_PREFIXES.get(stage, ""))] = logged
            return
        if on_step and in_step:
            self.of_step[f"{name}_step" if on_epoch else name] = logged
        if on_epoch or not in_step:
            self._add(f"{name}_epoch" if on_step and on_epoch else name, logged.value, weight)

    def _check(self, name: str, *, on_step: bool, reduce_fx: Any) -> None:
        if name == "loss":
            why = "the run reports the mean of training_step's losses by that name"
            raise TaskError("self.log('loss', …)", why=why, do="self.log('train_loss', …), or leave it out")
        if on_step:
            why = "an evaluation has one number of each name"
            raise TaskError(f"self.log({name!r}, …, on_step=True) in an evaluation", why=why, do="leave on_step out")
        is_mean = reduce_fx in ("mean", "avg", torch.mean)
        if not is_mean:
            why = "what is logged is averaged, by the samples of its batch"
            do = "log a mean, or a torchmetrics.Metric, which adds up as it likes"
            raise TaskError(f"self.log({name!r}, …, reduce_fx={reduce_fx!r})", why=why, do=do)

    def _log_metric(
        self, name: str, value: Any, module: nn.Module, stage: str, *, is_both: bool, on_epoch: bool
    ) -> None:
        if not on_epoch:
            return
        path = next((path for path, part in module.named_modules() if part is value), None)
        if path is None:
            raise TaskError(
                f"self.log({name!r}, …) got a {type(value).__name__} that is no part of the module",
                why="its value is computed at the end of the epoch, on all ranks",
                do="keep it as an attribute of the module",
            )
        self._metrics.setdefault(stage, {})[f"{name}_epoch" if is_both else name] = path

    def _add(self, name: str, value: Any, weight: float) -> None:
        before = self._here.get(name, MetricSum(0.0, 0.0))
        total = value * weight if weight else 0.0  # the mean over nothing is NaN
        self._here[name] = MetricSum(before.total + total, before.weight + weight)

    # ---- what the run reads

    def begin_epoch(self) -> None:
        self._here, self._before = {}, {}

    def fold(self, names: MetricNames, session: Session) -> dict[str, MetricSum]:
        """The sums over all ranks of what this epoch has logged so far; every rank calls it."""
        here, self._here = self._here, {}
        for name, (total, weight) in _summed(here, names, session).items():
            before = self._before.get(name, MetricSum(0.0, 0.0))
            self._before[name] = MetricSum(before.total + total, before.weight + weight)
        return self._before

    def means(self, names: MetricNames, session: Session) -> dict[str, float]:
        """Of the whole epoch, over all ranks."""
        return {name: float(total / weight) for name, (total, weight) in self.fold(names, session).items() if weight}

    def state(self) -> dict[str, list[float]]:
        """After `fold`, the same on every rank."""
        return {name: [float(total), float(weight)] for name, (total, weight) in self._before.items()}

    def load_state(self, state: Mapping[str, list[float]]) -> None:
        self._before = {name: MetricSum(total, weight) for name, (total, weight) in state.items()}

    @property
    def is_used(self) -> bool:
        """Whether this epoch of the training has logged something to be averaged or computed over all of it."""
        return bool(self._here or self._before or self._metrics["training"])

    def _paths_of(self, stage: str, session: Session) -> dict[str, str]:
        """Of the torchmetrics that any rank has logged in a stage, by name; every rank calls it."""
        mine, paths = self._metrics.get(stage, {}), dict[str, str]()
        texts = session.gather_texts("names of torchmetrics", "\n".join(f"{name}\t{mine[name]}" for name in mine))
        for line in (line for text in texts for line in text.splitlines()):
            name, _, path = line.partition("\t")
            paths[name] = path
        return paths

    def state_of_metrics(self, module: nn.Module, session: Session) -> dict[str, Any]:
        """What the torchmetrics of the training have added on all ranks; every rank calls it."""
        paths, states = self._paths_of("training", session), dict[str, Any]()
        for path in sorted(set(paths.values())):
            metric = MergedMetric(module.get_submodule(path))
            if found := states_of_ranks("a torchmetrics metric", metric.state(), session, on_all=True):
                states[path] = metric.as_one(found)
        return {"paths": paths, "states": states}

    def load_metrics(self, module: nn.Module, state: Mapping[str, Any], *, is_main: bool) -> list[str]:
        """Go on from `state_of_metrics`, of which one rank has all; the paths of those that cannot."""
        self._metrics["training"] = dict(state["paths"])
        for path, found in state["states"].items():
            MergedMetric(module.get_submodule(path)).go_on(found if is_main else None)
        return [path for path, found in state["states"].items() if found is None]

    def compute_metrics(self, module: nn.Module, stage: str, session: Session) -> dict[str, float]:
        """The values of the torchmetrics that were logged in this stage, which begin again; every rank calls it."""
        paths, found = self._paths_of(stage, session), dict[str, float]()
        for name, path in sorted(paths.items()):
            metric: Any = module.get_submodule(path)
            with session.reported(f"metric {name}"):
                found[name] = float(metric.compute())
        for path in set(paths.values()):
            metric = module.get_submodule(path)
            metric.reset()
        self._metrics[stage] = {}
        return found


def _summed(here: Mapping[str, MetricSum], names: MetricNames, session: Session) -> dict[str, MetricSum]:
    names.add(here)
    pairs = [here.get(name, MetricSum(0.0, 0.0)) for name in names.known]
    numbers = [float(part) for pair in pairs for part in pair]
    sums = session.sum("logged in an epoch", torch.tensor(numbers, dtype=torch.float64, device=session.device)).tolist()
    session.check()
    return {name: MetricSum(*sums[2 * at : 2 * at + 2]) for at, name in enumerate(names.known)}
