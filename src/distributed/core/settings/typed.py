"""The settings as types of keywords, so that an editor completes them and mypy refuses wrong ones.

Made by docs/generate_settings.py from core/settings/; not to be edited.
"""

from __future__ import annotations

from os import PathLike
from typing import Any, Literal, TypedDict


class TrainerSettings(TypedDict, total=False):
    """All settings but the optimizer's name, which trainers take beside optimizers."""

    # Resources
    num_gpus: int | None
    num_nodes: int
    gpus_per_node: int | None
    node_rank: int | None
    master_addr: str | None
    master_port: int | None
    device: Literal["auto", "cpu", "cuda"]
    share_gpus: bool
    # Backend
    backend: str
    address: str | None
    tensorflow_strategy: Literal["auto", "mirrored", "multi_worker", "parameter_server", "tpu"]
    parameter_servers: int
    # Training
    batch_size: int | None
    epochs: int
    max_steps: int | None
    max_time: str | None
    fast_dev_run: bool | int
    learning_rate: float
    weight_decay: float | None
    momentum: float | None
    lr_scaling: Literal["none", "linear", "sqrt"]
    base_batch_size: int | None
    lr_schedule: Literal["constant", "cosine", "linear"]
    warmup_steps: int
    warmup_epochs: float
    min_lr_ratio: float
    scheduler_interval: Literal["epoch", "step"]
    scheduler_metric: str | None
    seed: int
    reproducible: Literal["off", "bitwise"]
    virtual_ranks: int
    val_check_interval: int | float | str | None
    sanity_val_steps: int
    loss_weighting: Literal["auto", "samples", "targets"]
    on_nan: Literal["stop", "continue"]
    detect_anomaly: bool
    # Parallelism
    sharding: Literal["none", "grad_op", "full", "hybrid"] | None
    zero_stage: Literal[0, 1, 2, 3] | None
    shard_groups: int | None
    wrap_blocks: list[str] | None
    cpu_offload: bool
    offload_optimizer: Literal["cpu", "nvme"] | None
    offload_parameters: Literal["cpu", "nvme"] | None
    offload_dir: str | PathLike[str] | None
    deepspeed_config: Any | str | PathLike[str] | dict[str, Any] | None
    tensor_parallel: int
    tensor_parallel_plan: dict[str, str] | None
    sequence_parallel: bool
    pipeline_parallel: int
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] | None
    pipeline_microbatches: int | None
    context_parallel: int
    whole_model_on: Literal["rank0", "all"]
    # Memory
    activation_checkpointing: bool | int | Literal["full", "selective"]
    lora: bool | int | dict[str, Any]
    save_adapters_only: bool
    # Speed
    capture: bool | Literal["auto"]
    compile: bool | Literal["auto", "whole", "default", "reduce-overhead", "max-autotune"]
    compile_cache: str | PathLike[str] | None
    num_workers: int | Literal["auto"] | None
    data_on_device: bool | Literal["auto"]
    fused_optimizer: bool | Literal["auto"]
    bf16_parameters: bool | Literal["compensated", "stochastic"]
    channels_last: bool | Literal["auto"]
    tf32: bool | Literal["auto"]
    expandable_segments: bool | Literal["auto"]
    keep_freed_memory: bool | Literal["auto"]
    # Optimization
    mixed_precision: bool | Literal["fp16", "bf16", "fp8"]
    gradient_accumulation_steps: int | dict[int, int]
    gradient_clipping: float | None
    gradient_clip_value: float | None
    scaler_init_scale: float | None
    scaler_growth_interval: int | None
    sync_batchnorm: bool
    check_replicas: bool | Literal["parameters"]
    # Communication
    communication_backend: Literal["auto", "nccl", "gloo", "mpi"]
    compression: type[Any] | Literal["none", "fp16", "bf16", "topk", "randomk", "powersgd", "int8", "onebit"]
    compression_ratio: float
    compression_rank: int
    compression_min_size: int
    synchronization: Literal["every_step", "local_sgd", "post_local_sgd", "diloco", "asynchronous"]
    sync_every_n_steps: int | None
    local_sgd_start: int | str | None
    outer_learning_rate: float
    outer_momentum: float
    max_staleness: int
    gradient_reduction: Literal["average", "adasum"]
    fusion_threshold_mb: float | None
    cycle_time_ms: float | None
    timeline: str | PathLike[str] | None
    find_unused_parameters: bool
    static_graph: bool
    bucket_cap_mb: float
    collective_timeout_s: float
    # Survival
    max_restarts: int | None
    min_nodes: int | None
    max_nodes: int | None
    min_gpus: int | None
    hang_timeout_s: float | None
    slow_rank: Literal["report", "replace"]
    slow_rank_wait_s: float
    warm_start: bool
    requeue_exit_code: int
    # Data
    drop_last: bool | None
    iterable_split: Literal["share", "dataset"]
    bucket_by_length: bool | str
    limit_train_batches: int | float | None
    limit_val_batches: int | float | None
    overfit_batches: int | float | None
    # Checkpoints
    checkpoint_dir: str | PathLike[str] | None
    checkpoint_frequency: int | str | None
    checkpoint_async: bool
    keep_last: int | None
    keep_every: int | None
    keep_best: str | None
    keep_best_k: int
    certificate_steps: int
    sample_ledger: bool
    sample_check: bool
    resume_from_checkpoint: bool | str | PathLike[str]
    resume_hyperparameters: Literal["checkpoint", "config"]
    allow_change: str | list[str] | None
    # Monitoring
    run_dir: str | PathLike[str] | None
    tensorboard: bool
    tensorboard_dir: str | PathLike[str] | None
    csv: bool
    mlflow_tracking: bool
    mlflow_experiment: str | None
    mlflow_tracking_uri: str | None
    log_every_n_steps: int
    progress: bool
    model_summary: bool | int


class Settings(TrainerSettings, total=False):
    """All settings."""

    optimizer: Literal["adamw", "adam", "sgd", "lars", "lamb"]
