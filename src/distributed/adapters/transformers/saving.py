"""A trained model as a folder that `from_pretrained` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_model
from torch import nn

from distributed.core.errors import TaskError
from distributed.strategies.checks.sharded_models import is_in_parts


def save_pretrained(model: nn.Module, folder: Path, args: Any, processing_class: Any) -> None:
    """Model, configuration, tokenizer and arguments; of a model of another kind, its weights."""
    if is_in_parts(model):
        raise TaskError(
            f"save_model({str(folder)!r}), but this process has the model in parts",
            why="it was sharded over the ranks, and its memory did not hold the whole",
            do="distributed checkpoint export CHECKPOINT --to model.safetensors",
        )
    folder.mkdir(parents=True, exist_ok=True)
    save: Any = getattr(model, "save_pretrained", None)
    if save is not None:
        save(folder)
    else:
        save_model(model, str(folder / "model.safetensors"), metadata={"format": "pt"})
    if processing_class is not None:
        processing_class.save_pretrained(folder)
    torch.save(args, folder / "training_args.bin")
