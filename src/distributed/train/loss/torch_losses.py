"""Losses of torch's own: what their mean goes over, whether they come as a module, a function or a partial of one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

_ENTROPIES = (nn.CrossEntropyLoss, nn.NLLLoss)
_ENTROPY_FUNCTIONS = (F.cross_entropy, F.nll_loss)
_ENTROPY_OPTIONS = {"weight", "ignore_index", "reduction", "label_smoothing"}
# Each sample has the same part in their mean. (A subclass may compute anything: it is not among them.)
_EVEN = {
    nn.MSELoss: F.mse_loss,
    nn.L1Loss: F.l1_loss,
    nn.SmoothL1Loss: F.smooth_l1_loss,
    nn.HuberLoss: F.huber_loss,
    nn.BCELoss: F.binary_cross_entropy,
    nn.BCEWithLogitsLoss: F.binary_cross_entropy_with_logits,
    nn.KLDivLoss: F.kl_div,
    nn.PoissonNLLLoss: F.poisson_nll_loss,
    nn.GaussianNLLLoss: F.gaussian_nll_loss,
    nn.HingeEmbeddingLoss: F.hinge_embedding_loss,
    nn.CosineEmbeddingLoss: F.cosine_embedding_loss,
    nn.MarginRankingLoss: F.margin_ranking_loss,
    nn.TripletMarginLoss: F.triplet_margin_loss,
    nn.MultiMarginLoss: F.multi_margin_loss,
    nn.MultiLabelMarginLoss: F.multilabel_margin_loss,
    nn.MultiLabelSoftMarginLoss: F.multilabel_soft_margin_loss,
    nn.SoftMarginLoss: F.soft_margin_loss,
    nn.CTCLoss: F.ctc_loss,
}
_MEANS = ("mean", "batchmean")


class Entropy(NamedTuple):
    """torch's cross entropy, or its part after the logarithm."""

    ignore_index: int
    class_weights: torch.Tensor | None
    reduction: str

    def divisor(self, target: torch.Tensor) -> torch.Tensor:
        """What its mean divides by. Looks at no value.

        >>> target = torch.tensor([0, 1, 255])
        >>> Entropy(255, torch.tensor([1.0, 3.0]), "mean").divisor(target)
        tensor(4.)
        """
        if target.is_floating_point():  # probabilities of classes
            return torch.full(
                (), target.numel() // max(1, target.shape[1] if target.dim() > 1 else 1), device=target.device
            )
        counted = target != self.ignore_index
        if self.class_weights is None:
            return counted.sum()
        return (self.class_weights[torch.where(counted, target, 0)] * counted).sum()


def entropy_of(loss_fn: Any) -> Entropy | None:
    """What a loss is, if it is torch's cross entropy itself."""
    if type(loss_fn) in _ENTROPIES:
        return Entropy(loss_fn.ignore_index, loss_fn._buffers["weight"], loss_fn.reduction)
    function, options = _without_partial(loss_fn)
    if function in _ENTROPY_FUNCTIONS and options is not None and options.keys() <= _ENTROPY_OPTIONS:
        return Entropy(options.get("ignore_index", -100), options.get("weight"), options.get("reduction", "mean"))
    return None


def squared_error(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The default of targets that are no classes."""
    return F.mse_loss(outputs, target.view_as(outputs))


def is_even(loss_fn: Any) -> bool:
    """Whether every sample has the same part in a loss of torch's own, which is a mean."""
    if type(loss_fn) in _EVEN:
        return loss_fn.reduction in _MEANS
    function, options = _without_partial(loss_fn)
    return (
        function in (squared_error, *_EVEN.values())
        and options is not None
        and options.get("reduction", "mean") in _MEANS
    )


def adds_up(loss_fn: Any) -> bool:
    """Whether a loss of torch's own is a sum.

    >>> adds_up(functools.partial(F.mse_loss, reduction="sum")), adds_up(F.mse_loss)
    (True, False)
    """
    if type(loss_fn) in (*_ENTROPIES, *_EVEN):
        return bool(loss_fn.reduction == "sum")
    function, options = _without_partial(loss_fn)
    return function in (*_ENTROPY_FUNCTIONS, *_EVEN.values()) and (options or {}).get("reduction") == "sum"


def _without_partial(loss_fn: Any) -> tuple[Callable[..., Any], dict[str, Any] | None]:
    """A function and the options that partials give it; None in their place where they give more than options."""
    options: dict[str, Any] | None = {}
    while isinstance(loss_fn, functools.partial):
        options = None if loss_fn.args or options is None else loss_fn.keywords | options
        loss_fn = loss_fn.func
    return loss_fn, options
