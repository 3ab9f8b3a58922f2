"""TrainedWeights: what a trainer does with the weights that it has trained: load, average, save and export them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from distributed.checkpoint.exchange.choosing import WORDS
from distributed.core.config import DistributedConfig
from distributed.core.env import worker_env
from distributed.core.errors import TaskError
from distributed.core.history import History
from distributed.data.loading.transfer import to_device
from distributed.strategies.checks.sharded_models import is_in_parts
from distributed.train.given.tasks import check_model
from distributed.train.task import Task
from distributed.trainers.dev_run import has_only_tried, say_nothing_is_kept, tried_best
from distributed.trainers.evaluation.models import copied
from distributed.trainers.trained.folders import write_pretrained, write_program
from distributed.trainers.trained.loading import checkpoints_of, find_checkpoint, load_weights, read_weights

if TYPE_CHECKING:
    from distributed.checkpoint.exchange.best import BestCheckpoint


class TrainedWeights:
    """The part of a trainer that comes after its `fit`, or after an earlier run."""

    config: DistributedConfig
    model: nn.Module
    history: History | None  # of the last fit
    _task: Task
    _weights: str  # the checkpoint that was loaded since the last fit

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that should print: rank 0, or a script that started the ranks itself."""
        world = worker_env()
        return world is None or world.is_main

    def load_checkpoint(self, checkpoint: str | int | Path = "last") -> None:
        """The weights of a checkpoint into `model`: a path, or "last", "best" or a step of this trainer's last run.

        A new trainer looks in its `checkpoint_dir`, or in its `run_dir`. Nothing else of the run is taken over: to
        train on where it ended, `fit(…, resume_from_checkpoint=path)`.
        """
        check_model(self._task)
        if checkpoint in WORDS and self._has_only_tried("the model stays as it is"):
            return
        opened = find_checkpoint(checkpoint, self._own_checkpoints())
        load_weights(self._task, opened)
        self._weights = opened.path

    def _own_checkpoints(self) -> str:
        if self._known_checkpoint:
            return self._known_checkpoint.rpartition("/")[0]
        run_dir = self.config.run_dir
        return self.config.checkpoint_dir or ("" if run_dir is None else checkpoints_of(run_dir))

    @property
    def _known_checkpoint(self) -> str:
        """That has the weights of the model; "": there is none."""
        return self._weights or ("" if self.history is None else self.history.checkpoint)

    def save_pretrained(self, folder: str | Path, *more: Any) -> None:
        """Write a model of Hugging Face, and a tokenizer or processor that is passed, for `from_pretrained(folder)`.

        Rank 0 does so, and the other ranks pass. Where no rank holds the model whole, its weights come from the last
        checkpoint, for which the memory of this process must do.
        """
        if self.is_main:
            write_pretrained(self.model, self._whole_weights(), folder, *more)

    def export(self, path: str | Path, example: Any) -> None:
        """Write the model as a program for other runtimes: `.pt2` of torch.export, or `.onnx` (extra `onnx`).

        `example` is a batch as the data loader makes it; with two samples or more, any number of them may be passed to
        the program. What it returns is the prediction, without a loss. It is compared with the model's own before
        anything is written. Rank 0 does so, and the other ranks pass.
        """
        if self.is_main:
            model, weights = copied(self.model), self._whole_weights()
            if weights is not None:
                raise TaskError(
                    "no rank holds the model whole, and a program is made of the whole model",
                    why="the memory of rank 0 did not suffice for the whole model after the fit",
                    do="Trainer.from_run(run_dir, model=…).export(…), in a process with more memory",
                )
            write_program(model.cpu(), path, to_device(example, torch.device("cpu")))

    def _whole_weights(self) -> Mapping[str, Any] | None:
        """None: the model itself has them."""
        was = self._task.before_sharding
        if not is_in_parts(self.model) or (was is not None and was.is_whole):
            return None
        return read_weights(self._known_checkpoint)

    def averaged_model(self, of: str = "") -> nn.Module:
        """A copy of the trained model with the weights that a callback has averaged: `EMA`, `SWA` or one of yours.

        `of`: the class of the callback, where several have averaged. Where no process holds the whole model,
        `save_model(path, averaged=True)` writes it.
        """
        from distributed.trainers.trained.averages import averaged_copy  # what training does not need

        if self._has_only_tried("the averaged model is a copy of the model"):
            return copied(self.model)
        return averaged_copy(self.model, self._trained("average"), of)

    def load_best(self, metric: str = "", *, averaged: bool | str = False) -> BestCheckpoint:
        """Put the weights of the run's best checkpoint into `model`, and return which one that is.

        `metric` is one of its epochs: 'val_loss', 'max:val_f1' …; by default that of `keep_best`, which keeps the
        checkpoint. With `averaged`, the weights that a callback has averaged until then. In a world that a launcher
        made, every rank calls it; those that hold a part of the model only keep what they have.

        >>> from torch.utils.data import TensorDataset
        >>> from distributed import Trainer
        >>> data = TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
        >>> kept = {"keep_best": "loss", "keep_last": 1}
        >>> trainer = Trainer(nn.Linear(4, 2), batch_size=16, epochs=2, progress=False, run_dir=tmp / "best", **kept)
        >>> history = trainer.fit(data)
        >>> trainer.load_best().value == min(history["loss"])
        True
        """
        from distributed.trainers.trained.averages import load_best_weights  # what training does not need

        if self.history is not None and self._has_only_tried("the model stays as it is"):
            return tried_best(self.history, metric or self.config.keep_best or "")
        return load_best_weights(self.model, self._trained("load"), metric, averaged, is_main=self.is_main)

    def save_model(self, path: str | Path, *, averaged: bool | str = False) -> None:
        """Write the trained weights to one file: safetensors, or what torch.save writes if its name ends in `.pt`.

        Rank 0 does so, from the last checkpoint, and the other ranks pass: it works for models that no rank holds
        whole. Safetensors need the memory of one tensor, of a large one two runs of 64 MiB at most, and some chunks; a
        `.pt` needs that of the whole model. `fit` itself has put the whole model into `model` before, where the memory
        of rank 0, or of the process that started the ranks, holds it; where it does not, that is said, and this works.

        With `averaged`, it writes the weights that a callback has averaged, whose class it names if there are several.
        """
        if not self.is_main:
            return
        if self._has_only_tried(f"nothing is written to {path}"):
            return
        checkpoint = self._trained("save")
        from distributed.checkpoint.exchange.averages import as_model  # what training does not need
        from distributed.checkpoint.exchange.catalog import open_one
        from distributed.checkpoint.exchange.export import export_checkpoint

        opened = open_one(checkpoint)
        if averaged:
            opened = as_model(opened, averaged if isinstance(averaged, str) else "")
        kind = "pt" if str(path).endswith((".pt", ".pth")) else "safetensors"
        export_checkpoint(opened, str(path), kind, force=True)

    def _has_only_tried(self, what: str) -> bool:
        """Whether there are no checkpoints, because the last fit was a try; says so, with what is done instead."""
        has_tried = not self._weights and has_only_tried(self.history)
        if has_tried and self.is_main:
            say_nothing_is_kept(what)
        return has_tried

    def _trained(self, wanted: str) -> str:
        """The checkpoint with what was trained last."""
        if not self._known_checkpoint:
            raise TaskError(
                f"there is no trained model to {wanted}",
                why="fit has not run in this process, and no checkpoint was loaded",
                do="call trainer.fit(…) or trainer.load_checkpoint(…) first",
            )
        return self._known_checkpoint
