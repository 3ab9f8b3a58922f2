"""Accelerator: the calls of Accelerate's over a run of ours, so that a script changes one import."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from safetensors.torch import save_model as save_safetensors
from torch import nn

from distributed.adapters.accelerate.arguments import accumulation_of, read_arguments
from distributed.adapters.accelerate.preparation import Preparation
from distributed.adapters.accelerate.saved_state import newest_folder, next_folder
from distributed.adapters.unmapped import UnmappedError
from distributed.core.errors import TaskError
from distributed.core.plan import Decision
from distributed.trainers.own_loop.start import begin


class Accelerator(Preparation):
    """In place of `accelerate.Accelerator`. Settings of ours come beside its arguments: `Accelerator(num_gpus=2)`.

    The first DataLoader that is prepared is trained on. What a run cannot do is refused by name.
    """

    def __init__(
        self,
        *,
        device_placement: bool = True,
        split_batches: bool = False,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: Any = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: Any = None,
        gradient_accumulation_plugin: Any = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: list[Any] | None = None,
        dynamo_backend: Any = None,
        deepspeed_plugin: Any = None,
        deepspeed_plugins: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        parallelism_config: Any = None,
        dynamo_plugin: Any = None,
        rng_types: Any = None,
        **settings: Any,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "settings", "__class__")}
        if not device_placement:
            raise TaskError("device_placement=False", why="a run moves batches to its ranks", do="leave it out")
        self.project_configuration = project_config or _project(project_dir)
        given["logging_dir"] = self.logging_dir
        found, options = read_arguments(given, settings)
        config, world, run_dir = begin(None, found)
        super().__init__(config, world, run_dir, options)
        self._is_accumulating = False
        self._trigger = False

    # ---- steps

    def backward(self, loss: torch.Tensor, **named: Any) -> None:
        """The backward pass of a loss that is a mean over the samples of its batch."""
        if named:
            raise TaskError(f"backward({', '.join(named)}=…)", why="a pass keeps no graph", do="leave it out")
        self.run.backward(loss)

    def take_step(self, optimizer: torch.optim.Optimizer) -> None:
        """What `step` of a prepared optimizer does."""
        steps = self.gradient_accumulation_steps
        if steps > 1 and not self._is_accumulating:
            raise TaskError(
                f"optimizer.step() outside of accelerator.accumulate, with gradient_accumulation_steps={steps}",
                why="the run would accumulate, and the script steps with each batch",
                do="with accelerator.accumulate(model): …",
            )
        self.run.step(optimizer)

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Around a batch of an accumulation."""
        before, self._is_accumulating = self._is_accumulating, True
        try:
            yield
        finally:
            self._is_accumulating = before

    @property
    def gradient_accumulation_steps(self) -> int:
        return accumulation_of(self.run.config)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Clip the gradients of a step; returns their norm, which a sharded model knows once the step is taken."""
        given = {id(one) for one in ([parameters] if isinstance(parameters, torch.Tensor) else parameters)}
        assert self._model is not None
        trained = {id(one) for one in self._model.parameters() if one.requires_grad}
        if norm_type != 2 or not trained <= given:
            what = f"norm_type={norm_type}" if norm_type != 2 else "some of the parameters"
            why = "a run clips the whole gradient by its 2-norm"
            raise TaskError(f"clip_grad_norm_ with {what}", why=why, do="pass model.parameters()")
        return self.run.clip(max_norm)

    def autocast(self, autocast_handler: Any = None) -> Any:
        """The precision of the run, which its batches have in any case."""
        return self.run.autocast() if self.run.is_open else nullcontext()

    @property
    def mixed_precision(self) -> str:
        kind = self.run.plan.precision.kind if self.run.is_open else self.run.config.mixed_precision
        return "no" if kind in (False, "fp32") else str(kind)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        if self.mixed_precision == "fp16":
            raise UnmappedError("optimizer_step_was_skipped", why="the run scales the loss", do="leave it out")
        return False

    # ---- data

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """The rows of all ranks for the samples of this batch, each sample once."""
        if use_gather_object or _has_objects(input_data):
            items = [] if self.run.is_at_stand_in else list(input_data)
            return [one for part in self.gather_object(items) for one in part]
        return self._gathered(input_data, is_empty=self.run.is_at_stand_in)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """The rest of the epoch at which a state was taken; a run stands there by itself."""
        self.loaders_of_run()
        done = self.run.batches_done
        is_training = getattr(dataloader, "source", None) is self._loaders[0]
        if num_batches and (not is_training or num_batches != done):
            raise TaskError(
                f"skip_first_batches(…, {num_batches}), and the run stands after {done} batches of this epoch",
                why="a run continues where the state was saved that it has loaded",
                do="accelerator.load_state(…) of a state that was saved after as many batches",
            )
        return dataloader

    # ---- states

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save these objects with the state, and give them back theirs with it."""
        if self.run.is_open:
            raise TaskError("register_for_checkpointing after the training has begun", do="call it before")
        self._objects += objects

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True) -> str:
        """Save the state of the run to a folder: after this step, or now; returns the folder."""
        self.loaders_of_run()
        folder = next_folder(self.project_configuration, output_dir, removes=self.is_main_process)
        self.wait_for_everyone()
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.run.save_to(folder)
        self.project_configuration.iteration += 1
        return folder

    def load_state(self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None) -> None:
        """Continue from a state: weights, optimizer, schedulers, registered objects and the position in the data."""
        self.loaders_of_run()
        self.run.load_from(newest_folder(self.project_configuration, input_dir))

    @property
    def save_iteration(self) -> int:
        return int(self.project_configuration.iteration)

    @property
    def project_dir(self) -> str | None:
        return _text(self.project_configuration.project_dir)

    @property
    def logging_dir(self) -> str | None:
        return _text(self.project_configuration.logging_dir)

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """The model itself, which is never wrapped."""
        return model

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """The weights, where each rank has all of them."""
        if self.run.is_open and not self.run.plan.is_replicated:
            raise TaskError(
                "the weights of a sharded model",
                why="no rank has all of them during a training",
                do="accelerator.save_state(…), then: distributed checkpoint export FOLDER --to model.safetensors",
            )
        return model.state_dict()

    def save_model(self, model: nn.Module, save_directory: str, max_shard_size: Any = None) -> None:
        """Write model.safetensors; the main process does so."""
        self.get_state_dict(model)
        if self.is_main_process:
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            save_safetensors(model, str(Path(save_directory, "model.safetensors")), metadata={"format": "pt"})

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """torch.save, by the main process."""
        if not self.is_main_process:
            return
        if safe_serialization:
            save_file(obj, os.fspath(f), metadata={"format": "pt"})
        else:
            torch.save(obj, f)

    # ---- numbers

    def init_trackers(self, project_name: str, config: dict[str, Any] | None = None, init_kwargs: Any = None) -> None:
        """Name the project of this run; `config` is among the decisions of its plan."""
        if init_kwargs:
            raise TaskError("init_trackers(init_kwargs=…)", why="a run makes its own trackers", do="leave it out")
        if self.run.config.mlflow_tracking and not self.run.is_open:
            self.run.config = self.run.config.merged({"mlflow_experiment": project_name}, "init_trackers")
        given = [
            Decision(f"{name}={value}", f"the configuration of {project_name}")
            for name, value in (config or {}).items()
        ]
        self.run.notes += tuple(given)

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: Any = None) -> None:
        """Report numbers of this batch or epoch: means over the ranks, at the run's own step."""
        self.loaders_of_run()
        self.run.note(values)

    def end_training(self) -> None:
        """Save the last state, and end the run."""
        self.run.end()

    # ---- the rest

    def set_trigger(self) -> None:
        self._trigger = True

    def check_trigger(self) -> bool:
        """Whether a rank has set the trigger since the last check."""
        mine = torch.tensor([int(self._trigger)], device=self.device)
        found = bool(self.session.max("trigger", mine).item())
        self._trigger = self._trigger and not found
        return found

    def free_memory(self, *objects: Any) -> list[None]:
        """Let go of memory that is not used; the run keeps what it needs."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return [None] * len(objects)

    clear = free_memory

    @property
    def state(self) -> Accelerator:
        return self

    def __repr__(self) -> str:
        facts = self.distributed_type, f"{self.num_processes} processes", self.device, self.mixed_precision
        return f"Accelerator({', '.join(map(str, facts))})"

    def __getattr__(self, name: str) -> Any:
        raise UnmappedError(
            f"accelerator.{name}",
            why="a run has nothing of this name",
            do="docs/switching.md says what there is in its place",
        )


def _has_objects(data: Any) -> bool:
    if isinstance(data, torch.Tensor):
        return False
    if isinstance(data, dict):
        return any(map(_has_objects, data.values()))
    return not isinstance(data, list | tuple) or any(map(_has_objects, data))


def _project(folder: str | os.PathLike[str] | None) -> Any:
    text = _text(folder)
    return SimpleNamespace(
        project_dir=text, logging_dir=text, automatic_checkpoint_naming=False, total_limit=None, iteration=0
    )


def _text(path: Any) -> str | None:
    return None if path is None else os.fspath(path)
