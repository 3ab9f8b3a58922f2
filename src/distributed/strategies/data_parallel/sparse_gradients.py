"""Norm and clipping of gradients of which some are sparse; torch's functions take dense ones only."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def norm_of(gradients: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The norm of dense and sparse gradients; repeated rows of a sparse one are added first."""
    numbers = [each.coalesce().values() if each.is_sparse else each for each in gradients]
    norms = [torch.linalg.vector_norm(each) for each in numbers]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else None


def clip(gradients: Sequence[torch.Tensor], max_norm: float) -> torch.Tensor | None:
    """Clip as `nn.utils.clip_grad_norm_` does for dense gradients; returns the norm before."""
    norm = norm_of(gradients)
    if norm is not None:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factor)
    return norm
