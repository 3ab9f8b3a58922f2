"""Drawn strategies: how many ranks train a case, and how they share the work."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Strategy:
    """A number of ranks and the settings by which they share the work."""

    name: str
    ranks: int
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def data_ranks(self) -> int:
        shared = 1
        for name in ("tensor_parallel", "pipeline_parallel", "context_parallel"):
            shared *= self.settings.get(name, 1)
        return self.ranks // shared

    @property
    def world(self) -> str:
        """Which of the worlds that are kept runs it: an engine's library stays in its own."""
        backend = self.settings.get("backend", "")
        return f"{self.ranks}-{backend}" if backend in ("deepspeed", "horovod") else str(self.ranks)

    @property
    def gives_back(self) -> bool:
        """Whether every rank's model is whole after a `fit`."""
        return self.name in ("one", "ddp", "zero1", "bitwise", "horovod")

    @property
    def cuts_models(self) -> bool:
        return any(name in self.settings for name in ("tensor_parallel", "pipeline_parallel", "context_parallel"))


_WEIGHTS = {"ddp": 9, "one": 1, "zero1": 3, "fsdp": 6, "hybrid": 1, "tp": 2, "pp": 2, "cp": 1.2, "bitwise": 2,
            "horovod": 1, "deepspeed": 1.5, "mesh": 0.8}  # fmt: skip


def draw_strategy(rng: random.Random, only: tuple[str, ...] = ()) -> Strategy:
    names = [name for name in _WEIGHTS if not only or name in only]
    name = rng.choices(names, [_WEIGHTS[name] for name in names])[0]
    ranks = rng.choices([2, 3, 4], [6, 2, 1.5])[0]
    match name:
        case "one":
            return Strategy(name, 1)
        case "ddp":
            settings: dict[str, Any] = rng.choices(
                [{}, {"find_unused_parameters": True}, {"static_graph": True}, {"bucket_cap_mb": 0.0001}], [5, 2, 1, 1]
            )[0]
            return Strategy(name, ranks, settings)
        case "zero1":
            return Strategy(name, ranks, {"zero_stage": 1})
        case "fsdp":
            kind = rng.choice([{"backend": "fsdp"}, {"zero_stage": 2}, {"zero_stage": 3}])
            more = {"cpu_offload": True} if rng.random() < 0.1 else {}
            return Strategy(name, ranks, kind | more)
        case "hybrid":
            return Strategy(name, 4, {"sharding": "hybrid", "shard_groups": 2})
        case "tp":
            more = {"sequence_parallel": True} if rng.random() < 0.3 else {}
            return Strategy(name, rng.choice([2, 2, 2, 4]), {"tensor_parallel": 2} | more)
        case "pp":
            schedule = rng.choice([None, "gpipe", "1f1b", "interleaved", "zero_bubble"])
            more = {} if schedule is None else {"pipeline_schedule": schedule}
            return Strategy(name, rng.choice([2, 2, 2, 4]), {"pipeline_parallel": 2} | more)
        case "cp":
            return Strategy(name, rng.choice([2, 2, 2, 4]), {"context_parallel": 2})
        case "mesh":
            settings = rng.choice(
                [{"zero_stage": 1, "tensor_parallel": 2}, {"backend": "fsdp", "tensor_parallel": 2},
                 {"backend": "fsdp", "context_parallel": 2}, {"pipeline_parallel": 2, "tensor_parallel": 2},
                 {"pipeline_parallel": 2, "backend": "fsdp"}]
            )  # fmt: skip
            return Strategy(name, 4, settings)
        case "bitwise":
            return Strategy(name, rng.choice([2, 2, 4]), {"reproducible": "bitwise", "virtual_ranks": 4})
        case "horovod":
            return Strategy(name, rng.choice([2, 2, 3]), {"backend": "horovod"})
        case _:
            return Strategy(name, 2, {"backend": "deepspeed", "zero_stage": rng.choice([1, 2, 3])})
