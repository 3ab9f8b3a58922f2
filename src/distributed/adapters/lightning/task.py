"""lightning_task: a LightningModule as the task of a Trainer, with the means and weights of its steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from distributed.adapters.lightning.data import loaders_of, set_up
from distributed.adapters.lightning.hooks import check_data, check_module, refuse_in_tests
from distributed.adapters.lightning.module_callback import ModuleCallback
from distributed.adapters.lightning.module_calls import ModuleCalls
from distributed.adapters.lightning.module_log import ModuleLog
from distributed.adapters.lightning.optimizers import Configured, ConfiguredSchedule, read_optimizers
from distributed.adapters.lightning.stand_in import ModuleTrainer
from distributed.core.errors import Problem, TaskError
from distributed.core.plan import Plan
from distributed.core.protocol.failure import is_collateral
from distributed.strategies.model.buffer_snapshot import kept_buffers
from distributed.train.callbacks.callback import Callback
from distributed.train.task import Task

_TRAINED_BY = ("pytorch-ddp", "fsdp")
_MOVING = "on_after_batch_transfer"


def lightning_task(module: Any, datamodule: Any = None) -> LightningTask:
    """A LightningModule, and perhaps its LightningDataModule, for `Trainer(lightning_task(module), …)`.

    Their `prepare_data`, `setup("fit")` and `configure_model` are called here.
    """
    check_module(module)
    if datamodule is not None:
        check_data(datamodule)
    return LightningTask(module, datamodule)


class LightningTask(Task):
    """The steps of a module; its hooks are those of `callbacks`."""

    def __init__(self, module: Any, datamodule: Any = None) -> None:
        self._trainer, self._log = ModuleTrainer(datamodule), ModuleLog()
        self._hooks = ModuleCalls(module, self._trainer, self._log)
        self._callback = ModuleCallback(self._hooks, self._log, datamodule)
        self._data = datamodule
        self._configured: Configured | None = None
        set_up(self._hooks, datamodule)
        super().__init__(module, optimizer=self._configure, scheduler=self._schedule)

    @property
    def callbacks(self) -> tuple[Callback, ...]:
        return (self._callback,)

    @property
    def has_own_step(self) -> bool:
        return True

    @property
    def why_not_captured(self) -> str:
        return "a LightningModule's hooks and self.log run in Python in each step"

    def loaders(self) -> tuple[Any, Any]:
        """The training and validation data of the data module, or of the module: `trainer.fit(*task.loaders())`."""
        return loaders_of(self._hooks, self._data)

    def own_attributes(self) -> dict[str, Any]:
        """Nothing: what is kept beside the module is its view of the run, and its hooks save what they keep."""
        return {}

    @contextmanager
    def unchanged(self) -> Iterator[bool]:
        """No: what a module collects in its steps, its hooks around an evaluation take away, and no other."""
        yield False

    def begin_run(self, plan: Plan, samples: int | None) -> None:
        super().begin_run(plan, samples)
        self._trainer.begin_run(plan, samples)
        self._callback.begin_run()
        self._configured = None
        if problems := list(self._problems(plan)):
            raise TaskError(problems)

    def _problems(self, plan: Plan) -> Iterator[Problem]:
        mesh, why = plan.mesh, "training_step is called once for each micro-batch, with the whole module"
        for what, is_so in (
            (f"backend={plan.strategy!r}", plan.strategy not in _TRAINED_BY),
            (f"pipeline_parallel={mesh.pp}", mesh.pp > 1),
            (f"context_parallel={mesh.cp}", mesh.cp > 1),
            ("reproducible='bitwise'", plan.is_bitwise),
        ):
            if is_so:
                yield Problem(f"{what} with a LightningModule", why=why, do="leave it out")
        if plan.optimizer.lr_factor != 1.0:
            yield Problem(
                "lr_scaling with a LightningModule",
                why="configure_optimizers sets the learning rates, and its schedulers have read them",
                do="leave it out, and scale the rate there by self.trainer.world_size",
            )
        before_step = [hook for hook in ("on_before_optimizer_step", "on_after_backward") if self._hooks.has(hook)]
        if before_step and plan.optimizer.clip_norm is not None:
            why = "Lightning calls it before gradients are clipped, and here it would be called after that"
            yield Problem(f"{before_step[0]} with gradient_clipping", why=why, do="leave one of them out")
        if self._hooks.has("on_after_backward") and plan.batch.most_accumulated > 1:
            why = "Lightning calls it after each micro-batch, and here it is called after the last one of a step"
            yield Problem("on_after_backward with gradient_accumulation_steps", why=why, do="on_before_optimizer_step")

    # ---- optimizers

    def _configure(self, parameters: list[nn.Parameter]) -> Optimizer:
        found = self._hooks.call("configure_optimizers", stage="training")
        self._configured = read_optimizers(found, type(self.model).__name__)
        self._trainer.schedulers = [rate.scheduler for rate in self._configured.rates]
        optimizer = self._configured.optimizer
        if self._hooks.has("on_before_optimizer_step") or self._hooks.has("on_after_backward"):
            optimizer.register_step_pre_hook(self._before_step)
        return optimizer

    def _before_step(self, optimizer: Optimizer, given: Any, named: Any) -> None:
        self._hooks.hook("on_after_backward", stage="training")
        self._hooks.hook("on_before_optimizer_step", optimizer, stage="training")

    def _schedule(self, optimizer: Optimizer) -> ConfiguredSchedule:
        trainer = self._trainer
        assert self._configured is not None, "the optimizer is made first"
        return ConfiguredSchedule(
            self._configured.rates,
            lambda scheduler, metric: self._hooks.call("lr_scheduler_step", scheduler, metric),
            lambda: trainer.batch_idx,
            lambda: trainer.current_epoch,
        )

    # ---- steps

    def training_step(self, model: nn.Module, batch: Any) -> Any:
        calls, trainer = self._hooks, self._trainer
        if not torch.is_grad_enabled():
            return self._tried(model, batch)
        if trainer.run is None:
            raise TaskError(
                "a step of a LightningModule outside of fit",
                why="its hooks are called at the points of a training",
                do="trainer.fit(…)",
            )
        self._callback.end_batch()
        calls.samples = self.samples
        if not self.samples:
            with calls.checked("training_step"):
                found = self._read(self._run("training_step", model, self._moved(batch), "training"))
            trainer.batch_idx += 1
            return found
        batch = self._moved(batch)
        if calls.hook("on_train_batch_start", batch, trainer.batch_idx, stage="training") == -1:
            raise TaskError(
                "on_train_batch_start returned -1",
                why="it would end the epoch on this rank, while the others continue",
                do="self.trainer.should_stop = True ends the run, on all ranks",
            )
        found = self._read(self._run("training_step", model, batch, "training"))
        loss = found["loss"] / trainer.accumulate_grad_batches
        calls.hook("on_before_backward", loss, stage="training")
        self._take_log()
        self._callback.batch = {"loss": loss.detach()}, batch
        trainer.batch_idx += 1
        return found

    def _tried(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        """In a trial of what the loss is a mean over: where it can be, without a hook that draws random changes."""
        with self._hooks.leaving_no_trace():
            try:
                return self._read(self._run("training_step", model, batch, "training"))
            except Exception as failed:
                if is_collateral(failed) or not self._hooks.has(_MOVING):
                    raise
            return self._read(self._run("training_step", model, self._moved(batch), "training"))

    def validation_step(self, model: nn.Module, batch: Any) -> Any:
        return self._evaluate_by("validation", "validating", model, batch)

    def test_step(self, model: nn.Module, batch: Any) -> Any:
        refuse_in_tests(self.model, "test")
        return self._evaluate_by("test", "testing", model, batch)

    def predict_step(self, model: nn.Module, batch: Any) -> Any:
        refuse_in_tests(self.model, "predict")
        found = self._run("predict_step", model, self._moved(batch), "predicting")
        self._trainer.batch_idx += 1
        return found

    def _evaluate_by(self, what: str, stage: str, model: nn.Module, batch: Any) -> Any:
        calls, trainer, name = self._hooks, self._trainer, f"{what}_step"
        if not calls.has(name):
            raise TaskError(
                f"{type(self.model).__name__} has no {name}", do=f"write it, or pass no data for the {what}"
            )
        calls.samples = self.samples
        if not self.samples:
            with kept_buffers(self.model), calls.checked(name):
                return self._loss_of(self._run(name, model, self._moved(batch), stage))
        batch = self._moved(batch)
        calls.hook(f"on_{what}_batch_start", batch, trainer.batch_idx, stage=stage)
        found = self._run(name, model, batch, stage)
        calls.hook(f"on_{what}_batch_end", found, batch, trainer.batch_idx, stage=stage)
        trainer.batch_idx += 1
        self._take_log()
        return self._loss_of(found)

    def _moved(self, batch: Any) -> Any:
        return self._hooks.call(_MOVING, batch, 0) if self._hooks.has(_MOVING) else batch

    def _run(self, name: str, model: nn.Module, batch: Any, stage: str) -> Any:
        """By the call of a model that is sharded, whose forward gathers its parameters."""
        plan = self._trainer.plan
        if plan is None or not plan.shard.is_fsdp:
            return self._hooks.step(name, batch, stage)
        with _forward_is(self.model, lambda: self._hooks.step(name, batch, stage)):
            return model()

    def _take_log(self) -> None:
        self._logged.update(self._log.of_step)
        self._log.of_step.clear()

    def _read(self, found: Any) -> dict[str, Any]:
        """The loss, and its weight, of what training_step has returned; other entries are for hooks alone."""
        if found is None:
            raise TaskError(
                f"{type(self.model).__name__}.training_step returned None",
                why="Lightning then skips the batch and its step, and here every rank takes part in every step",
                do='leave such samples out of the data, or return {"loss": …, "weight": …} for each batch, with the '
                "weight 0 for one of a step's that does not count",
            )
        parts = {"loss": found} if isinstance(found, torch.Tensor) else found
        if not isinstance(parts, Mapping) or not isinstance(parts.get("loss"), torch.Tensor):
            raise TaskError(
                f"{type(self.model).__name__}.training_step returned {type(found).__name__}",
                why="every rank takes part in every step, with the gradients of a loss",
                do='return the loss, or {"loss": …}',
            )
        return {name: parts[name] for name in ("loss", "weight") if name in parts}

    def _loss_of(self, found: Any) -> Any:
        """The loss of an evaluation, if it returns one; what is logged as val_loss comes before it."""
        loss = found.get("loss") if isinstance(found, Mapping) else found
        is_loss = isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.is_floating_point()
        return loss if is_loss else None


@contextmanager
def _forward_is(module: nn.Module, run: Any) -> Iterator[None]:
    """Within it, the next call of the module runs a step, in which it is itself again."""
    before = vars(module).get("forward")

    def forward() -> Any:
        put_back()
        return run()

    def put_back() -> None:
        vars(module).pop("forward", None)
        if before is not None:
            vars(module)["forward"] = before

    vars(module)["forward"] = forward
    try:
        yield
    finally:
        put_back()
