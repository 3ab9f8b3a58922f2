"""Embeddings with sparse=True, whose gradients are sparse: how to find and where to refuse them."""

from __future__ import annotations

from torch import nn

from distributed.core.errors import TaskError


def sparse_layers(module: nn.Module) -> list[str]:
    """The paths of the layers whose gradients are sparse.

    >>> sparse_layers(nn.ModuleDict({"words": nn.Embedding(4, 2, sparse=True), "places": nn.Embedding(4, 2)}))
    ['words']
    """
    return [
        name for name, m in module.named_modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and bool(m.sparse)
    ]


def sparse_parameters(module: nn.Module) -> set[nn.Parameter]:
    return {module.get_submodule(path).weight for path in sparse_layers(module)}  # type: ignore[misc]


def refuse_sparse(
    module: nn.Module, setting: str, why: str, instead: str = "use backend='pytorch-ddp' without sharding"
) -> None:
    """`instead`: what else may be done than to make its layers dense."""
    layers = sparse_layers(module)
    if layers:
        raise TaskError(
            f"{layers[0] or 'the model'} has sparse gradients, and {setting}",
            why=why,
            do=f"make {layers[0] or 'it'} with sparse=False, or {instead}",
        )
