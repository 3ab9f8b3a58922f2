"""What the class of a transformers model says of its labels."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from distributed.core.registry import import_extra


def base_model(model: Any) -> Any:
    """The model inside of adapters of peft, or itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def label_names(args: Any, model: Any) -> list[str]:
    """The entries of a batch that are its targets."""
    if args.label_names is not None:
        return list(args.label_names)
    kind = type(base_model(model))
    positions = ("start_positions", "end_positions") if "QuestionAnswering" in kind.__name__ else ()
    return [name for name in inspect.signature(kind.forward).parameters if "label" in name or name in positions]


def shifts_labels(model: Any) -> bool:
    """Whether each position of a model's logits foretells the next label, as of causal language models."""
    auto = import_extra("transformers.models.auto.modeling_auto", "transformers", "hf_trainer")
    names: Mapping[str, str] = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return type(base_model(model)).__name__ in names.values()
