"""ModuleCallback: the hooks of a LightningModule at the points of a training, and the state that they keep."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, cast

from distributed.adapters.lightning.hooks import overrides
from distributed.adapters.lightning.module_calls import ModuleCalls
from distributed.adapters.lightning.module_log import ModuleLog
from distributed.core.errors import TaskError
from distributed.train.callbacks.callback import Callback, TrainingControl
from distributed.train.callbacks.calls import Control
from distributed.train.metrics import MetricNames


class ModuleCallback(Callback):
    """Of one rank. `batch` is the last one that was trained on, until its step has ended."""

    def __init__(self, calls: ModuleCalls, log: ModuleLog, datamodule: Any) -> None:
        self._calls, self._log, self._data = calls, log, datamodule
        self._names: MetricNames | None = None
        self.batch: tuple[Any, Any] | None = None  # (outputs, batch), for on_train_batch_end
        self._saved: dict[str, Any] | None = None  # what on_save_checkpoint has written
        self._trained = 0  # batches of this epoch, while another stage counts its own
        self._metrics: tuple[int, dict[str, Any]] | None = None  # the step of a save, and the torchmetrics' state at it
        self._resumed: dict[str, Any] | None = None  # that of the checkpoint

    def begin_run(self) -> None:
        """Nothing of a run before is left, so that it can be sent to ranks."""
        self._names = self.batch = self._saved = self._metrics = self._resumed = None

    def on_load(self, run: TrainingControl) -> None:
        """Only a save has what all ranks have added; where a world breaks, that of a lost rank since then is gone."""
        resumed, self._resumed, lost = self._resumed, None, list[str]()
        if resumed is not None:
            lost = self._log.load_metrics(self._calls.module, resumed, is_main=not run.rank)
        elif self._log.is_used and cast(Control, run).progress.steps_in_epoch:
            lost = ["what self.log averages over the epoch"]
        if lost:
            warnings.warn(
                f"epoch {run.epoch + 1}: {', '.join(lost)} lacks samples of ranks that are gone", stacklevel=2
            )

    def on_fit_start(self, run: TrainingControl) -> None:
        control = cast(Control, run)
        calls, module, device = self._calls, self._calls.module, control.session.device
        calls.trainer.run, self._names = control, MetricNames((), control.session)
        if module.device != device and not any(tensor.is_meta for tensor in module.parameters()):
            module.to(device)  # by which it knows its device
        calls.trainer.batch_idx = control.progress.steps_in_epoch * calls.trainer.accumulate_grad_batches
        calls.hook("on_fit_start", stage="training")
        calls.hook("on_train_start", stage="training")

    def on_epoch_start(self, run: TrainingControl) -> None:
        progress = cast(Control, run).progress
        self._calls.trainer.batch_idx = progress.steps_in_epoch * self._calls.trainer.accumulate_grad_batches
        if not progress.steps_in_epoch:
            self._log.begin_epoch()
        self._calls.hook("on_train_epoch_start", stage="training")

    def on_step_end(self, run: TrainingControl) -> None:
        self.end_batch()

    def end_batch(self) -> None:
        """The batch that was trained on last, unless that was reported already."""
        if self.batch is not None:
            outputs, batch = self.batch
            self.batch = None
            self._calls.trainer.batch_idx -= 1
            self._calls.hook("on_train_batch_end", outputs, batch, self._calls.trainer.batch_idx, stage="training")
            self._calls.trainer.batch_idx += 1

    def on_validation_start(self, run: TrainingControl) -> None:
        self._trained, self._calls.trainer.batch_idx = self._calls.trainer.batch_idx, 0
        self._calls.hook("on_validation_start", stage="validating")
        self._calls.hook("on_validation_epoch_start", stage="validating")

    def on_validation_end(self, run: TrainingControl, metrics: Mapping[str, float]) -> None:
        self._calls.hook("on_validation_epoch_end", stage="validating")
        self._report_metrics(cast(Control, run), "validating")
        self._calls.hook("on_validation_end", stage="validating")
        self._calls.trainer.batch_idx = self._trained

    def on_epoch_end(self, run: TrainingControl, metrics: Mapping[str, float]) -> None:
        control = cast(Control, run)
        self._calls.hook("on_train_epoch_end", stage="training")
        assert self._names is not None
        for name, value in self._log.means(self._names, control.session).items():
            control.log(name, value)
        self._report_metrics(control, "training")

    def _report_metrics(self, control: Control, stage: str) -> None:
        for name, value in self._log.compute_metrics(self._calls.module, stage, control.session).items():
            control.log(name, value)

    def on_fit_end(self, run: TrainingControl) -> None:
        self._calls.hook("on_train_end", stage="training")
        self._calls.hook("on_fit_end", stage="training")
        self._calls.hook("teardown", "fit")
        if self._data is not None:
            self._data.teardown("fit")

    def on_exception(self, run: TrainingControl, error: BaseException) -> None:
        self._calls.trainer.run = None
        if self._data is not None and isinstance(error, Exception):
            self._data.on_exception(error)

    def on_save(self, run: TrainingControl) -> None:
        assert self._names is not None
        session = cast(Control, run).session
        self._log.fold(self._names, session)
        self._metrics = run.step, self._log.state_of_metrics(self._calls.module, session)
        if self._calls.has("on_save_checkpoint"):
            self._saved = _ModuleCheckpoint(run.epoch, run.step)
            self._calls.call("on_save_checkpoint", self._saved)

    def state(self) -> dict[str, Any]:
        """The sums of the epoch, and what the module and its data save themselves."""
        found: dict[str, Any] = {"epoch_sums": self._log.state()}
        run = self._calls.trainer.run
        if self._metrics is not None and run is not None and self._metrics[0] == run.step:
            found["torchmetrics"] = self._metrics[1]
        if self._saved is not None:
            found["module"] = dict(self._saved)
        hyperparameters = {name: value for name, value in self._calls.module.hparams.items() if _is_plain(value)}
        if hyperparameters:
            found["hyper_parameters"] = hyperparameters
        if self._data is not None and overrides(self._data, "state_dict", "LightningDataModule"):
            found["datamodule"] = self._data.state_dict()
        return found

    def load_state(self, state: dict[str, Any]) -> None:
        self._log.load_state(state.get("epoch_sums", {}))
        self._resumed = state.get("torchmetrics")
        if "module" in state:
            saved = _ModuleCheckpoint(state["module"]["epoch"], state["module"]["global_step"])
            saved.update(state["module"])
            self._calls.hook("on_load_checkpoint", saved)
        if "datamodule" in state and self._data is not None:
            self._data.load_state_dict(state["datamodule"])


class _ModuleCheckpoint(dict[str, Any]):
    """What a module writes into a checkpoint and reads of it; the run keeps the rest."""

    def __init__(self, epoch: int, step: int) -> None:
        super().__init__({"epoch": epoch, "global_step": step})

    def __missing__(self, key: str) -> Any:
        raise TaskError(
            f"checkpoint[{key!r}] in on_save_checkpoint or on_load_checkpoint",
            why="the run saves weights, optimizer and schedulers itself; there is what the module has written",
            do="leave it out, or override state_dict and load_state_dict of the part",
        )


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)
