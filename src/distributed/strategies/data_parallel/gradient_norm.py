"""The norm of a sharded gradient, and clipping by it: one number is all-reduced, and no host synchronizes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

import torch
from torch import nn

from distributed.runtime.session import Session
from distributed.runtime.torch_compat import foreach_mul_, foreach_norm
from distributed.strategies.placement import Layout, local

_KEPT = 16  # sets of parameters with a gradient: the phases of a step, say


class GradientNorm:
    """The gradient norm of these parameters over all ranks of `session`; None: of this rank only.

    `copies` returns how many ranks hold the same elements of a parameter, so that each counts once.

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> layer.weight.grad = torch.tensor([[3.0, 4.0]])
    >>> gradient = GradientNorm(dict(layer.named_parameters()), Layout(layer), lambda name: 1, None)
    >>> gradient.clip(1.0), layer.weight.grad
    (tensor(5.), tensor([[0.6000, 0.8000]]))
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        layout: Layout,
        copies: Callable[[str], int],
        session: Session | None,
    ) -> None:
        here = {name: p for name, p in parameters.items() if p.requires_grad and layout.is_here(name)}
        self._parameters = list(here.values())
        self._copies = [copies(name) for name in here]
        self._session = session
        self._device = next((local(p).device for p in self._parameters), torch.device("cpu"))
        self._weights: dict[tuple[bool, ...], torch.Tensor] = {}

    @torch.no_grad()
    def norm(self) -> torch.Tensor:
        """The square root of the sum of squares, in fp32 (fp64 for gradients in fp64); every rank must call it."""
        has_gradient = tuple(p.grad is not None for p in self._parameters)
        gradients = self._gradients()
        squares = torch.zeros((), dtype=torch.float64, device=self._device)
        dtype = torch.float64 if any(g.dtype == torch.float64 for g in gradients) else torch.float32
        if gradients:
            norms = foreach_norm(gradients, 2, dtype=dtype)
            stacked = torch.stack([each.to(self._device, non_blocking=True) for each in norms]).double()
            squares = (stacked.square() * self._weight(has_gradient)).sum()
        if self._session is not None:
            self._session.sum("gradient norm", squares)
        return squares.sqrt().to(dtype)

    @torch.no_grad()
    def clip(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients down to this norm, as `nn.utils.clip_grad_norm_` does; returns the norm before."""
        norm = self.norm()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        by_device = defaultdict(list)
        for gradient in self._gradients():
            by_device[gradient.device].append(gradient)
        for device, gradients in by_device.items():
            foreach_mul_(gradients, factor.to(device))
        return norm

    def _gradients(self) -> list[torch.Tensor]:
        """Gradients with complex numbers as pairs of real ones, which have the same norm."""
        found = (local(p.grad) for p in self._parameters if p.grad is not None)
        return [torch.view_as_real(gradient) if gradient.is_complex() else gradient for gradient in found]

    def _weight(self, has_gradient: tuple[bool, ...]) -> torch.Tensor:
        """One over the number of copies, on the device; made once, because a copy to it would synchronize."""
        if has_gradient not in self._weights:
            if len(self._weights) >= _KEPT:
                self._weights.clear()
            shares = [1.0 / copies for copies, has in zip(self._copies, has_gradient, strict=True) if has]
            self._weights[has_gradient] = torch.tensor(shares, dtype=torch.float64, device=self._device)
        return self._weights[has_gradient]
