"""The methods of a LightningModule: which are called, which have no effect here, and which are refused by name."""

from __future__ import annotations

from typing import Any

from torch import nn

from distributed.core.errors import Problem, TaskError

STEPS = frozenset({"training_step", "validation_step", "test_step", "predict_step", "forward"})
CALLED = frozenset(
    {
        *("on_fit_start", "on_fit_end", "on_train_start", "on_train_end", "on_train_epoch_start", "on_train_epoch_end"),
        *("on_train_batch_start", "on_train_batch_end", "on_before_backward", "on_after_backward"),
        *("on_before_optimizer_step", "on_after_batch_transfer", "on_validation_start", "on_validation_end"),
        *("on_validation_epoch_start", "on_validation_epoch_end", "on_validation_batch_start"),
        *("on_validation_batch_end", "on_save_checkpoint", "on_load_checkpoint", "configure_model"),
        *("configure_optimizers", "lr_scheduler_step", "prepare_data", "setup", "teardown"),
        *("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader", "print"),
    }
)
_TRAINER = "the run does this itself"
REFUSED = {  # by name: what to do in its place
    "optimizer_step": "a scheduler with interval='step' in configure_optimizers, or on_before_optimizer_step",
    "optimizer_zero_grad": "leave it out: gradients are dropped after each step",
    "on_before_zero_grad": "on_train_batch_end, which is called after the optimizer's step",
    "backward": "leave it out, or write a distributed.Task",
    "configure_gradient_clipping": "Trainer(…, gradient_clipping=1.0)",
    "clip_gradients": "Trainer(…, gradient_clipping=1.0)",
    "configure_callbacks": "Trainer(…, callbacks=[…]) with distributed.Callback",
    "configure_sharded_model": "configure_model",
    "transfer_batch_to_device": "a collate_fn that returns tensors in tuples, lists and dicts",
    "on_before_batch_transfer": "on_after_batch_transfer, or the DataLoader's collate_fn",
    "on_validation_model_zero_grad": "leave it out: gradients are dropped after each step",
    "on_validation_model_eval": "on_validation_start",
    "on_validation_model_train": "on_validation_end",
    "log": "call self.log as Lightning has it",
    "log_dict": "call self.log_dict as Lightning has it",
    "all_gather": "self.log averages over the ranks; a torchmetrics.Metric gathers its own state",
    "manual_backward": "leave it as Lightning has it",
    "optimizers": "leave it as Lightning has it",
    "lr_schedulers": "leave it as Lightning has it",
    "toggle_optimizer": "leave it as Lightning has it",
    "untoggle_optimizer": "leave it as Lightning has it",
    "toggled_optimizer": "leave it as Lightning has it",
}
IN_TESTS = frozenset(  # of a test or a prediction alone, where they are refused
    {f"on_{what}_{when}" for what in ("test", "predict") for when in ("start", "end", "epoch_start", "epoch_end")}
    | {f"on_{what}_batch_{when}" for what in ("test", "predict") for when in ("start", "end")}
    | {"on_test_model_eval", "on_test_model_train", "on_predict_model_eval"}
)
IDLE = frozenset(  # of the module alone; nothing of a run calls them
    {"freeze", "unfreeze", "to_onnx", "to_torchscript", "to_tensorrt", "load_from_checkpoint", "save_hyperparameters"}
)
_OF_DATA = ("transfer_batch_to_device", "on_before_batch_transfer")


def base_of(value: Any, name: str = "LightningModule") -> type | None:
    """Lightning's own class that an object is derived from, in either of its packages; None: it is not."""
    packages = ("lightning", "pytorch_lightning")
    kinds = (kind for kind in type(value).__mro__ if kind.__name__ == name)
    return next((kind for kind in kinds if kind.__module__.partition(".")[0] in packages), None)


def overrides(value: Any, hook: str, base: str = "LightningModule") -> bool:
    """Whether a module or data module has a method of its own."""
    own, kind = getattr(type(value), hook, None), base_of(value, base)
    return hook in vars(value) or own is not getattr(kind, hook, None)


def check_module(module: Any) -> None:
    """Kind and methods, before anything starts."""
    if base_of(module) is None or not isinstance(module, nn.Module):
        raise TaskError(
            f"lightning_task got a {type(module).__name__}",
            why="lightning_task makes a task of a LightningModule",
            do="pass the module, or an nn.Module with its loss_fn to Trainer itself",
        )
    kind = type(module).__name__
    problems = [
        Problem(f"{kind}.{hook} would never be called", why=_TRAINER, do=do)
        for hook, do in REFUSED.items()
        if overrides(module, hook)
    ]
    if not module.automatic_optimization:
        why = "it steps its optimizers in training_step, and a step of the run has one optimizer"
        do = "automatic_optimization=True with one optimizer, or distributed.start for a loop of your own"
        problems.append(Problem(f"{kind} has automatic_optimization=False", why=why, do=do))
    if not overrides(module, "training_step"):
        problems.append(Problem(f"{kind} has no training_step", do="write it"))
    if problems:
        raise TaskError(problems)


def check_data(data: Any) -> None:
    """The same for a LightningDataModule."""
    kind = type(data).__name__
    if base_of(data, "LightningDataModule") is None:
        raise TaskError(f"datamodule is a {kind}", why="it must be a LightningDataModule", do="pass loaders to fit")
    hooks = (*_OF_DATA, "on_after_batch_transfer")
    found = [hook for hook in hooks if overrides(data, hook, "LightningDataModule")]
    if found:
        do = REFUSED.get(found[0], "on_after_batch_transfer of the LightningModule")
        raise TaskError(f"{kind}.{found[0]} would never be called", why=_TRAINER, do=do)


def refuse_in_tests(module: Any, what: str) -> None:
    """Hooks of a test or a prediction, where one is made."""
    found = sorted(hook for hook in IN_TESTS if what in hook and overrides(module, hook))
    if found:
        raise TaskError(
            f"{type(module).__name__}.{found[0]} would never be called",
            why=f"a {what} of the trainer has no such hooks",
            do=f"do it in {what}_step, or after the call",
        )
