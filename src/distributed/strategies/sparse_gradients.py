"""Sparse gradients, of embeddings with sparse=True: where they can be trained, and what torch cannot do with them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
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


def refuse_sparse(module: nn.Module, setting: str, why: str) -> None:
    layers = sparse_layers(module)
    if layers:
        raise TaskError(
            f"{layers[0] or 'the model'} has sparse gradients, and {setting}",
            why=why,
            do=f"make {layers[0] or 'it'} with sparse=False, or use backend='pytorch-ddp' and share nothing out",
        )


def norm_of(gradients: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The norm of gradients of which some are sparse: of those, the sum where several rows are one."""
    numbers = [each.coalesce().values() if each.is_sparse else each for each in gradients]
    norms = [torch.linalg.vector_norm(each) for each in numbers]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else None


def clip(gradients: Sequence[torch.Tensor], max_norm: float) -> torch.Tensor | None:
    """As `nn.utils.clip_grad_norm_`, which knows dense ones only; returns the norm before."""
    norm = norm_of(gradients)
    if norm is not None:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factor)
    return norm
