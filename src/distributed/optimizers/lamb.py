"""LAMB: Adam's update, of each parameter as long as the parameter itself (You et al., 2020, arXiv:1904.00962)."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from distributed.optimizers.layerwise import LayerwiseOptimizer, Stepped, check_options, ratio_or_one
from distributed.runtime.tensor_shard import local
from distributed.runtime.torch_compat import (
    foreach_add_,
    foreach_addcmul_,
    foreach_div_,
    foreach_lerp_,
    foreach_mul_,
    foreach_sqrt,
)


class LAMB(LayerwiseOptimizer):
    """Adam with a trust ratio: w ← w − lr · ‖w‖/‖u‖ · u, where u = m̂ / (√v̂ + eps) + weight_decay · w.

    `skip_vectors`: parameters of one dimension take Adam's step, without ratio and decay. The norms are those of whole
    parameters, also where a Trainer shards them.

    >>> weight = torch.nn.Parameter(torch.tensor([[3.0, 4.0]]))
    >>> weight.grad = torch.tensor([[1.0, 1.0]])
    >>> LAMB([weight], lr=0.1, weight_decay=0.0).step()  # an update as long as the weight, times 0.1
    >>> weight
    Parameter containing:
    tensor([[2.6464, 3.6464]], requires_grad=True)
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        skip_vectors: bool = True,
    ) -> None:
        check_options("LAMB", lr=lr, weight_decay=weight_decay, eps=eps)
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"LAMB: betas={betas} should be 0 or greater, and below 1")
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "skip_vectors": skip_vectors}
        super().__init__(params, options)

    def _take(self, trained: list[Stepped]) -> None:
        weights = [local(one.parameter) for one in trained]
        updates = self._updates(trained)
        for update, weight, one in zip(updates, weights, trained, strict=True):
            if one.decay:
                update.add_(weight, alpha=one.decay)
        of_weights, of_updates = self.whole_norms(trained, weights, updates)
        ratios = ratio_or_one(of_weights, of_updates)
        for weight, update, ratio, one in zip(weights, updates, ratios, trained, strict=True):
            if one.is_adapted:
                update.mul_(ratio.to(update))
            weight.add_(update, alpha=-float(one.group["lr"]))

    def _updates(self, trained: list[Stepped]) -> list[torch.Tensor]:
        """Adam's, as new tensors."""
        states = [self._state_of(one) for one in trained]
        means, squares = ([local(state[name]) for state in states] for name in ("exp_avg", "exp_avg_sq"))
        gradients = [local(one.gradient) for one in trained]
        for state in states:
            state["step"] += 1
        steps = [float(state["step"]) for state in states]
        for group in self.param_groups:
            at = [index for index, one in enumerate(trained) if one.group is group]
            if at:
                beta1, beta2 = group["betas"]
                own = [gradients[index] for index in at]
                foreach_lerp_([means[index] for index in at], own, 1 - beta1)
                second = [squares[index] for index in at]
                foreach_mul_(second, beta2)
                foreach_addcmul_(second, own, own, 1 - beta2)
        divisors = list(foreach_sqrt(squares))
        corrections = [(1 - one.group["betas"][1] ** step) ** 0.5 for one, step in zip(trained, steps, strict=True)]
        foreach_div_(divisors, corrections)
        foreach_add_(divisors, [float(one.group["eps"]) for one in trained])
        updates = [mean / divisor for mean, divisor in zip(means, divisors, strict=True)]
        foreach_div_(updates, [1 - one.group["betas"][0] ** step for one, step in zip(trained, steps, strict=True)])
        return updates

    def _state_of(self, one: Stepped) -> dict[str, Any]:
        state: dict[str, Any] = self.state[one.parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(one.parameter, memory_format=torch.preserve_format)
        return state
