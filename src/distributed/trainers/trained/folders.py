"""A trained model in the forms that other programs load: a folder of Hugging Face, torch.export, ONNX."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distributed.core.errors import ConfigError, TaskError
from distributed.core.registry import import_extra
from distributed.runtime.torch_compat import tree_flatten
from distributed.strategies.model.modes import evaluating
from distributed.train.given.batches import apply
from distributed.train.given.model_outputs import prediction_of

_CLOSE = 1e-3  # of the largest output: what another runtime may round otherwise
_SUFFIXES = {".pt2": "torch.export", ".onnx": "ONNX"}


def write_pretrained(model: nn.Module, weights: Mapping[str, Any] | None, folder: str | Path, *more: Any) -> None:
    """What `from_pretrained(folder)` loads: the model's configuration and weights, and tokenizers and the like.

    `weights`: in place of the model's own, which may be those of one rank.
    """
    for part in (model, *more):
        if not callable(getattr(part, "save_pretrained", None)):
            raise TaskError(
                f"a {type(part).__name__} has no save_pretrained",
                why="models, tokenizers and processors of Hugging Face have it",
                do='trainer.save_model("model.safetensors") writes the weights of any model',
            )
    if any(".base_layer." in name for name in (weights or model.state_dict())):
        raise TaskError(
            "the model has adapters of lora= in it",
            why="from_pretrained of the base model does not know them",
            do="distributed checkpoint export RUN --to adapter/ --format peft, for PeftModel.from_pretrained",
        )
    given = {} if weights is None else {"state_dict": dict(weights)}
    model.save_pretrained(os.fspath(folder), **given)  # type: ignore[operator]
    for part in more:
        part.save_pretrained(os.fspath(folder))


def _predicting(model: nn.Module, given: tuple[Any, ...], named: Mapping[str, Any]) -> nn.Module:
    """The model without its loss; torch.export takes the names of its arguments from a signature."""

    def forward(self: Any, *values: Any, **by_name: Any) -> Any:
        return prediction_of(self.model(*values, **by_name))

    known = [p.name for p in inspect.signature(model.forward).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    names = [known[place] if place < len(known) else f"input_{place}" for place in range(len(given))]
    parameters = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in ("self", *names, *named)]
    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    made: nn.Module = type("Predicting", (nn.Module,), {"forward": forward})()
    made.model = model
    return made.eval()


def write_program(model: nn.Module, path: str | Path, batch: Any) -> None:
    """The model as a program that needs no code of ours or the user's: `.pt2` of torch.export, or `.onnx`.

    Any number of samples may be passed to it, unless the example has one. Its outputs for the example are compared
    with those of the model.
    """
    target = Path(path)
    kind = _SUFFIXES.get(target.suffix)
    if kind is None:
        known = " or ".join(f"{suffix} ({name})" for suffix, name in _SUFFIXES.items())
        raise ConfigError(f"{target} does not say in which form the model is written", do=f"end it with {known}")
    _, (given, named), _ = apply(lambda *given, **named: (given, named), batch, takes_target=True)
    with evaluating(model), torch.no_grad():
        outputs = model(*given, **named)
        expected = prediction_of(outputs)
        program = _export(_predicting(model, given, named), given, named, type(model).__name__)
        _compare(program.module()(*given, **named), expected, kind)
        target.parent.mkdir(parents=True, exist_ok=True)
        if kind == "torch.export":
            torch.export.save(program, target)
        else:
            _write_onnx(program, target, given, named, expected)


def _export(predicts: nn.Module, given: tuple[Any, ...], named: Mapping[str, Any], name: str) -> Any:
    samples = next((len(leaf) for leaf in tree_flatten((given, named))[0] if isinstance(leaf, torch.Tensor)), 1)
    batch = torch.export.Dim("batch")

    def sizes(leaf: Any) -> Any:
        varies = isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and len(leaf) == samples and samples > 1
        return {0: batch} if varies else None

    by_place, by_name = tuple(map(sizes, given)), {key: sizes(leaf) for key, leaf in named.items()}
    try:
        return torch.export.export(predicts, given, dict(named), dynamic_shapes=by_place or by_name)
    except Exception as failed:
        raise TaskError(
            f"{name} cannot be exported: {type(failed).__name__}: {str(failed).splitlines()[0]}",
            why="torch.export follows one path through forward, which must not depend on the values of tensors",
            do="see https://docs.pytorch.org/docs/stable/export.html, or write the weights with trainer.save_model",
        ) from failed


def _write_onnx(program: Any, target: Path, given: tuple[Any, ...], named: Mapping[str, Any], expected: Any) -> None:
    import_extra("onnxscript", "onnx", "export to ONNX")
    made = torch.onnx.export(program, dynamo=True, verbose=False)
    assert made is not None
    _compare(list(made(*given, **named)), expected, "ONNX")  # by onnxruntime, which returns all tensors in a row
    made.save(os.fspath(target))


def _compare(found: Any, expected: Any, kind: str) -> None:
    """Raise where the program does not compute what the model does."""
    pairs = zip(tree_flatten(found)[0], tree_flatten(expected)[0], strict=True)
    for mine, theirs in pairs:
        if not isinstance(theirs, torch.Tensor):
            continue
        scale = float(theirs.abs().max()) if theirs.numel() else 0.0
        if mine.shape != theirs.shape or not torch.allclose(mine, theirs, rtol=_CLOSE, atol=_CLOSE * max(scale, 1e-6)):
            raise TaskError(
                f"the program of {kind} does not compute what the model does",
                why="its outputs for the example batch are others",
                do="look for what forward does by the values of tensors or by the number of samples",
            )
