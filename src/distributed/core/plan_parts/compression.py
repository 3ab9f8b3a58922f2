"""CompressionPlan: what ranks send in place of their gradients."""

from __future__ import annotations

from dataclasses import dataclass

from distributed.core.choices import Compression


@dataclass(frozen=True)
class CompressionPlan:
    """What ranks send in place of their gradients."""

    kind: Compression = "none"
    ratio: float = 0.01  # of a tensor's numbers, for topk and randomk
    rank: int = 4  # of the factors, for powersgd
    min_size: int = 4096  # numbers of a tensor below which it is sent whole

    @property
    def keeps(self) -> bool:
        """Whether each rank keeps what it has not sent for the next step."""
        return self.kind not in ("none", "fp16", "bf16")
