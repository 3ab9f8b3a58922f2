"""Which settings an evaluation has: those that say where and how a model computes; what trains is left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distributed.core.config import DistributedConfig, build_config
from distributed.core.engines.engine import ENGINES
from distributed.core.errors import ConfigError, Problem
from distributed.core.settings.run import ResourceSettings
from distributed.planner.adoption import adopt
from distributed.trainers.settings import plain, with_launch_settings

_KEPT = frozenset(
    [
        *ResourceSettings.model_fields,
        *("backend", "address", "batch_size", "seed", "loss_weighting", "iterable_split", "sample_check"),
        *("num_workers", "data_on_device", "communication_backend", "collective_timeout_s", "max_restarts"),
        *("warm_start", "progress", "run_dir", "mixed_precision", "scaler_init_scale", "scaler_growth_interval"),
        *("bf16_parameters", "channels_last", "tf32", "sharding", "zero_stage", "shard_groups", "wrap_blocks"),
        *("cpu_offload", "tensor_parallel", "tensor_parallel_plan", "sequence_parallel", "pipeline_parallel"),
        *("context_parallel", "expandable_segments", "keep_freed_memory"),
    ]
)


def build_evaluation_config(config: DistributedConfig, settings: Mapping[str, Any], call: str) -> DistributedConfig:
    """A trainer's settings, and over them those of the call and of the launch, as far as an evaluation reads them."""
    given = plain(settings)
    idle = [name for name in given if name not in _KEPT and name in DistributedConfig.model_fields]
    if idle:
        why = "nothing is trained, saved or logged in it"
        raise ConfigError(
            [Problem(f"{name} has no effect in {call}(…)", why=why, do=f"leave {name} out") for name in idle]
        )
    merged = with_launch_settings(config.merged(given, f"{call}(…)"))
    return _without_engines(_narrowed(adopt(merged, [], None), _KEPT))


def _narrowed(config: DistributedConfig, names: frozenset[str]) -> DistributedConfig:
    values = {name: value for name, value in config.given_values().items() if name in names}
    return build_config([(values, "", {name: config.source(name) for name in values})])


def _without_engines(config: DistributedConfig) -> DistributedConfig:
    """PyTorch's own strategies, where another engine's state is for training alone: a forward pass is the same."""
    values, stage = config.given_values(), config.zero_stage
    sources = {name: config.source(name) for name in values}
    engine = ENGINES.entries.get(config.backend)
    if engine is not None and (engine.owns_state or engine.owns_reduction):
        values["backend"] = "fsdp" if stage == 3 or config.sharding == "full" else "pytorch-ddp"
        stage = 3 if values["backend"] == "fsdp" else 0
    if stage is not None:
        values["zero_stage"] = 0 if stage == 1 else stage  # there is no optimizer's state to be sharded
    return build_config([(values, "", sources | {name: "evaluation" for name in values if name not in sources})])
