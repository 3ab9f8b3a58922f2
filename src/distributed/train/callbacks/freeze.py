"""Freeze: parameters that are not trained at first, or at all; several of them unfreeze a model step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from distributed.core.engines.engine import ENGINES
from distributed.core.errors import Problem, TaskError
from distributed.core.plan import Plan
from distributed.core.registry import nearest
from distributed.strategies.base import StepTask
from distributed.train.callbacks.callback import Callback, TrainingControl


@dataclass(eq=False)
class Freeze(Callback):
    """Keeps parameters from being trained: those whose names match, `*` standing for anything.

    Until an epoch begins, the first being 0, or for a number of steps; else for the whole run. Several unfreeze a model
    step by step. BatchNorm's statistics of a frozen layer are still updated.

    >>> import torch
    >>> from distributed import Trainer
    >>> from torch import nn
    >>> from torch.utils.data import TensorDataset
    >>> data = TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
    >>> net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    >>> gradual = [Freeze("0.*", until_epoch=2), Freeze("1.*", until_epoch=1)]
    >>> trainer = Trainer(net, callbacks=gradual, batch_size=16, epochs=3, progress=False, run_dir=tmp / "run")
    >>> trainer.fit(data).steps
    12
    """

    patterns: str | Sequence[str]
    until_epoch: int | None = None
    until_step: int | None = None

    def __post_init__(self) -> None:
        if self.until_epoch is not None and self.until_step is not None:
            raise TaskError(
                f"Freeze(until_epoch={self.until_epoch}, until_step={self.until_step})",
                why="parameters are unfrozen once",
                do="leave one of the two out",
            )
        until = self.until_epoch if self.until_epoch is not None else self.until_step
        if until is not None and until < 1:
            what = "until_epoch" if self.until_step is None else "until_step"
            raise TaskError(
                f"Freeze({what}={until})",
                why="epochs and steps count from 0, so no parameter would be frozen",
                do=f"{what}=1 or more",
            )

    def check(self, plan: Plan, task: StepTask, evaluates: bool) -> list[Problem]:
        found = []
        if ENGINES.entries[plan.strategy].owns_state:
            what = f"Freeze({self.patterns!r}), with backend={plan.strategy!r}"
            why = "this engine lays out the parameters that are trained when it begins"
            found.append(Problem(what, why=why, do="backend='pytorch-ddp' or 'fsdp'"))
        if task.has_phases or task.is_manual:
            how = "several optimizers" if task.has_phases else "manual_optimization"
            why = "its training step says which parameters are trained"
            do = "leave parameters out of what configure_optimizers returns, or let the step leave them out"
            found.append(Problem(f"Freeze({self.patterns!r}) in a run with {how}", why=why, do=do))
        names = [name for name, parameter in task.model.named_parameters() if parameter.requires_grad]
        frozen = self._matching(names)
        for pattern in self._patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                hint = f"did you mean {' or '.join(near)}?" if (near := nearest(pattern, names)) else ""
                what = f"Freeze({pattern!r}) matches no parameter that is trained"
                found.append(
                    Problem(what, why=f"there are {', '.join(names[:5])} …", do=hint or f"Freeze({names[0]!r}), say")
                )
        if len(frozen) == len(names):
            what = f"Freeze({self.patterns!r}) leaves nothing to train"
            found.append(Problem(what, why="every parameter of the model matches", do="leave some out of the patterns"))
        return found

    def on_fit_start(self, run: TrainingControl) -> None:
        self._apply(run)

    def on_epoch_start(self, run: TrainingControl) -> None:
        self._apply(run)

    def on_step_end(self, run: TrainingControl) -> None:
        if run.step == self.until_step:
            self._apply(run)

    def meets_after(self, step: int) -> bool:
        return step == self.until_step

    def _apply(self, run: TrainingControl) -> None:
        is_over = self.until_epoch is not None and run.epoch >= self.until_epoch
        is_over = is_over or (self.until_step is not None and run.step >= self.until_step)
        run.freeze(self, [] if is_over else self._matching([name for name, _ in run.model.named_parameters()]))

    @property
    def _patterns(self) -> Sequence[str]:
        return [self.patterns] if isinstance(self.patterns, str) else self.patterns

    def _matching(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if any(fnmatchcase(name, pattern) for pattern in self._patterns)]
