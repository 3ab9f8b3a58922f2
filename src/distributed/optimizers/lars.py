"""LARS: SGD with momentum, each parameter at a rate of its own by its norms (You et al., 2017, arXiv:1708.03888)."""

from __future__ import annotations

import torch
from torch.optim.optimizer import ParamsT

from distributed.optimizers.layerwise import LayerwiseOptimizer, Stepped, check_options, ratio_or_one
from distributed.runtime.tensor_shard import local


class LARS(LayerwiseOptimizer):
    """SGD by d = λ · (g + weight_decay · w), where λ = trust · ‖w‖ / (‖g‖ + weight_decay · ‖w‖ + eps).

    The momentum is torch's: v ← momentum · v + d, w ← w − lr · v. `skip_vectors`: parameters of one dimension take
    SGD's step, without λ and decay. The norms are those of whole parameters, also where a Trainer shards them.

    >>> weight = torch.nn.Parameter(torch.tensor([[3.0, 4.0]]))
    >>> weight.grad = torch.tensor([[0.0, 2.0]])
    >>> LARS([weight], lr=1.0, trust=0.1).step()  # by 0.1 of the weight's length, along the gradient
    >>> weight
    Parameter containing:
    tensor([[3.0000, 3.5000]], requires_grad=True)
    """

    _options: tuple[list[tuple[float, float, float]], torch.Tensor] | None = None  # of the last step, on the device

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        trust: float = 0.001,
        eps: float = 1e-8,
        nesterov: bool = False,
        skip_vectors: bool = True,
    ) -> None:
        check_options("LARS", lr=lr, weight_decay=weight_decay, eps=eps)
        if not 0 <= momentum < 1 or trust <= 0:
            raise ValueError(f"LARS: momentum={momentum} should be in [0, 1), and trust={trust} greater than 0")
        options = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust": trust,
            "eps": eps,
            "nesterov": nesterov,
            "skip_vectors": skip_vectors,
        }
        super().__init__(params, options)

    def _take(self, trained: list[Stepped]) -> None:
        weights = [local(one.parameter) for one in trained]
        updates = self._scaled(trained, weights)
        for weight, update, one in zip(weights, updates, trained, strict=True):
            moving = self._with_momentum(one, update) if one.group["momentum"] else update
            weight.add_(moving, alpha=-float(one.group["lr"]))

    def _scaled(self, trained: list[Stepped], weights: list[torch.Tensor]) -> list[torch.Tensor]:
        """The gradients with decay, each at its own rate, as new tensors."""
        gradients = [local(one.gradient) for one in trained]
        of_weights, of_gradients = self.whole_norms(trained, weights, gradients)
        decay, trust, eps = self._columns_of(trained, of_weights)
        divisor = of_gradients + decay * of_weights + eps
        is_defined = (of_weights > 0) & (of_gradients > 0)
        rates = torch.where(is_defined, ratio_or_one(trust * of_weights, divisor), 1.0)
        found = []
        for one, weight, gradient, rate in zip(trained, weights, gradients, rates, strict=True):
            update = gradient.add(weight, alpha=one.decay) if one.decay else gradient.clone()
            found.append(update.mul_(rate.to(update)) if one.is_adapted else update)
        return found

    def _columns_of(self, trained: list[Stepped], like: torch.Tensor) -> torch.Tensor:
        """Decay, trust and eps of each, on the device; made when they change, because a copy to it may wait."""
        values = [(one.decay, float(one.group["trust"]), float(one.group["eps"])) for one in trained]
        if self._options is None or self._options[0] != values or self._options[1].device != like.device:
            self._options = values, like.new_tensor(values).T
        return self._options[1]

    def _with_momentum(self, one: Stepped, update: torch.Tensor) -> torch.Tensor:
        momentum, state = one.group["momentum"], self.state[one.parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(one.parameter, memory_format=torch.preserve_format)
        held = local(state["momentum_buffer"])
        held.mul_(momentum).add_(update)
        return update.add_(held, alpha=momentum) if one.group["nesterov"] else held
