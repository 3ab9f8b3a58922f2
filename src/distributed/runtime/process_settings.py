"""ProcessSettings: what a script has set of torch in its process, and ranks that it starts do not have."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ProcessSettings:
    """Settings on which results depend, as code outside of tensors reads them."""

    default_dtype: torch.dtype
    is_deterministic: bool
    warns_only: bool  # where an operation has no deterministic kernel
    cudnn_benchmark: bool
    cudnn_deterministic: bool
    matmul_precision: str  # of fp32; "": it is set for each backend by itself

    @staticmethod
    def of_this_process() -> ProcessSettings:
        return ProcessSettings(
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic,
            _matmul_precision(),
        )

    def apply(self) -> None:
        """Set the same in this process, a rank.

        >>> ProcessSettings.of_this_process().apply()
        """
        torch.set_default_dtype(self.default_dtype)
        torch.use_deterministic_algorithms(self.is_deterministic, warn_only=self.warns_only)
        torch.backends.cudnn.benchmark = self.cudnn_benchmark
        torch.backends.cudnn.deterministic = self.cudnn_deterministic
        if self.matmul_precision not in ("", _matmul_precision()):
            torch.set_float32_matmul_precision(self.matmul_precision)


def _matmul_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # torch refuses to read it where backends have settings of their own
        return ""
