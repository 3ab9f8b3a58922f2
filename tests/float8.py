"""8-bit products that a CPU computes quickly: torch's own take ten seconds for the sizes at which a layer gains."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch

from distributed.strategies.speed import float8


def quick_products() -> AbstractContextManager[Any]:
    """Torch's product is replaced by the same one in fp32; tests of single layers use torch's."""
    return patch.object(float8, "scaled_mm", _product)


def _product(
    left: torch.Tensor, right: torch.Tensor, scale_left: torch.Tensor, scale_right: torch.Tensor, **how: Any
) -> torch.Tensor:
    whole = (left.float() @ right.float()) * (scale_left * scale_right)
    return (whole if how["bias"] is None else whole + how["bias"]).to(how["out_dtype"])
