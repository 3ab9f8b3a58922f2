"""Settings of a step: how ranks share it, what it keeps in memory, how fast and how precise it is, what it sends."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from distributed.core.choices import Compression, Synchronization
from distributed.core.settings.section import SettingsSection
from distributed.core.values import parse_start


class ParallelismSettings(SettingsSection):
    """How ranks share the work. What is not said here is replicated over all ranks that are left."""

    sharding: Literal["none", "grad_op", "full", "hybrid"] | None = Field(
        None,
        description="what is sharded over data-parallel ranks: full: all state; grad_op: gradients and optimizer "
        "state; hybrid: full within a group, replicated over groups; by default full for backend=fsdp, else none",
    )
    zero_stage: Literal[0, 1, 2, 3] | None = Field(
        None, description="the same by ZeRO's numbers: 1 shards the optimizer state, 2 is grad_op, 3 is full"
    )
    shard_groups: int | None = Field(
        None, ge=1, description="for sharding=hybrid: groups that hold all state each; by default one a node"
    )
    wrap_blocks: list[str] | None = Field(
        None, description="classes or paths of the model's blocks ('Block', 'layers.*'); by default found"
    )
    cpu_offload: bool = Field(False, description="keep sharded parameters and optimizer state in host memory")
    offload_optimizer: Literal["cpu", "nvme"] | None = Field(
        None, description="for deepspeed: keep the optimizer state in host memory, or in files under offload_dir"
    )
    offload_parameters: Literal["cpu", "nvme"] | None = Field(
        None, description="the same for the parameters, which zero_stage=3 shards"
    )
    offload_dir: str | None = Field(None, description="a folder on a fast local disk, for nvme")
    deepspeed_config: str | dict[str, Any] | None = Field(
        None, description="DeepSpeed's own configuration: a JSON file or its content; what it says counts as set here"
    )
    tensor_parallel: int = Field(1, ge=1, description="ranks that each layer is sharded over")
    tensor_parallel_plan: dict[str, str] | None = Field(
        None, description="path pattern to style ('*.fc1': 'column', '*.fc2': 'row'); by default found"
    )
    sequence_parallel: bool = Field(
        False, description="for tensor_parallel: norms and residuals on parts of the sequence"
    )
    pipeline_parallel: int = Field(1, ge=1, description="stages that the model's blocks are split into")
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] | None = Field(
        None, description="the order of forward and backward passes of the stages; by default 1f1b"
    )
    pipeline_microbatches: int | None = Field(
        None, ge=1, description="micro-batches that a batch is split into for the pipeline; by default found"
    )
    context_parallel: int = Field(1, ge=1, description="ranks that each sequence is sharded over")
    whole_model_on: Literal["rank0", "all"] = Field(
        "rank0", description="which ranks of a launcher have the whole model after fit, where it was sharded"
    )

    @field_validator("deepspeed_config", mode="before")
    @classmethod
    def _plain_config(cls, value: Any) -> Any:
        """Also DeepSpeed's own object, and a path."""
        content = getattr(value, "_param_dict", value)
        return os.fspath(content) if isinstance(content, os.PathLike) else content


class MemorySettings(SettingsSection):
    """What is computed again, or not trained at all."""

    activation_checkpointing: bool | int | Literal["full", "selective"] = Field(
        False, description="compute blocks again in backward: True or full, selective (all but matmuls), n: each n-th"
    )
    lora: bool | int | dict[str, Any] = Field(
        False, description="train adapters of low rank: True, their rank, or {rank, alpha, dropout, targets}"
    )
    save_adapters_only: bool = Field(False, description="for lora: checkpoints hold the adapters without the model")


class SpeedSettings(SettingsSection):
    """What makes a step faster. What "auto" came to is among the run's decisions, each with its reason."""

    capture: bool | Literal["auto"] = Field(
        "auto",
        description="the whole step as one CUDA graph; auto: where launching it takes longer than computing it, and "
        "its first steps come to the same",
    )
    compile: bool | Literal["auto", "whole", "default", "reduce-overhead", "max-autotune"] = Field(
        False,
        description="torch.compile each block, or in that mode; whole: the model at once, which takes longer and gives "
        "faster steps; auto: on a GPU, whole where each rank holds all of it",
    )
    compile_cache: str | None = Field(
        None, description="where compiled code is kept for later runs and restarts; by default in the user's cache"
    )
    num_workers: Annotated[int, Field(ge=0)] | Literal["auto"] | None = Field(
        None, description="processes that read data; auto: measured; by default as the data loader says"
    )
    data_on_device: bool | Literal["auto"] = Field(
        "auto",
        description="data that is tensors in memory is copied to the GPU once, and batches are gathered there; auto: "
        "where it takes at most a tenth of the memory that is free",
    )
    fused_optimizer: bool | Literal["auto"] = Field(
        "auto", description="one kernel for the optimizer's step; auto: on a GPU, where torch has it"
    )
    bf16_parameters: bool | Literal["compensated", "stochastic"] = Field(
        False,
        description="parameters and gradients in bf16: True or compensated: with the rest of their digits kept aside; "
        "stochastic: without, rounded at random",
    )
    channels_last: bool | Literal["auto"] = Field(
        "auto", description="memory format of convolutions; auto: on a GPU in mixed precision"
    )
    tf32: bool | Literal["auto"] = Field(
        "auto", description="what is left of fp32 products in TF32; auto: in mixed precision, which has fewer digits"
    )
    expandable_segments: bool | Literal["auto"] = Field(
        "auto",
        description="let torch's allocator grow its segments; auto: on a GPU, unless PYTORCH_ALLOC_CONF says otherwise",
    )
    keep_freed_memory: bool | Literal["auto"] = Field(
        "auto",
        description="memory that a step frees stays with the process for the next one; auto: on a CPU with glibc, "
        "unless MALLOC_…, GLIBC_TUNABLES or LD_PRELOAD is set",
    )


class OptimizationSettings(SettingsSection):
    """Precision, gradients, and what replicas compare."""

    mixed_precision: bool | Literal["fp16", "bf16", "fp8"] = Field(
        False,
        description="True: bf16 where the device has it, else fp16, and fp16 with settings of a gradient scaler; "
        "fp8: bf16 with linear layers in 8 bits",
    )
    gradient_accumulation_steps: Annotated[int, Field(ge=1)] | dict[int, int] = Field(
        1, description="micro-batches a step; by epoch: {0: 1, 4: 2} has two of them from the fifth epoch on"
    )
    gradient_clipping: float | None = Field(None, gt=0, description="largest norm of the whole gradient")
    gradient_clip_value: float | None = Field(None, gt=0, description="largest value of each number of the gradient")
    scaler_init_scale: float | None = Field(None, gt=0, description="first loss scale under fp16; by default 65536")
    scaler_growth_interval: int | None = Field(None, ge=1, description="good steps before it doubles; by default 2000")
    sync_batchnorm: bool = Field(True, description="BatchNorm statistics over the micro-batch of all ranks")

    @field_validator("gradient_accumulation_steps")
    @classmethod
    def _from_the_first_epoch(cls, value: int | dict[int, int]) -> int | dict[int, int]:
        if isinstance(value, int):
            return value
        if 0 not in value or min(value) < 0 or min(value.values()) < 1:
            raise ValueError("should be a number, or say from epoch 0 on how many: {0: 1, 4: 2}")
        return value if len(set(value.values())) > 1 else value[0]

    check_replicas: bool | Literal["parameters"] = Field(
        True,
        description="compare what ranks should hold alike at the first steps, saves and ends of epochs, and stop where "
        "it differs; parameters: buffers may differ, and rank 0's count",
    )


class CommunicationSettings(SettingsSection):
    """What ranks send each other, and how long they wait."""

    communication_backend: Literal["auto", "nccl", "gloo", "mpi"] = Field("auto", description="library for collectives")
    compression: Compression = Field(
        "none",
        description="what ranks send of their gradients: fp16, bf16: in that precision; topk, randomk: "
        "compression_ratio of the numbers; powersgd: factors of compression_rank; int8, onebit: so many bits of each",
    )
    compression_ratio: float = Field(
        0.01, gt=0, lt=1, description="for compression=topk and randomk: the part of a tensor's numbers that is sent"
    )
    compression_rank: int = Field(4, ge=1, description="for compression=powersgd: rank of what stands for a matrix")
    compression_min_size: int = Field(
        4096, ge=1, description="for all but fp16 and bf16: smaller tensors are sent whole, in numbers"
    )
    synchronization: Synchronization = Field(
        "every_step",
        description="when replicas meet: every_step: with the gradients of each; local_sgd: they step alone, and their "
        "weights are averaged every sync_every_n_steps; post_local_sgd: so from local_sgd_start on; diloco: an outer "
        "optimizer steps by what that average has changed; asynchronous: rank 0 steps by the gradients of all, and no "
        "other rank waits for that within max_staleness",
    )
    sync_every_n_steps: int | None = Field(
        None, ge=1, description="steps that each replica takes alone between two averages; by default 16, diloco: 100"
    )
    local_sgd_start: int | str | None = Field(
        None, description="for post_local_sgd: steps before it, in which gradients are averaged, or '2 epochs'"
    )
    outer_learning_rate: float = Field(0.7, gt=0, description="for diloco: of its outer steps")
    outer_momentum: float = Field(0.9, ge=0, lt=1, description="for diloco: Nesterov's, of its outer steps")
    max_staleness: int = Field(
        1, ge=0, description="for asynchronous: updates that a rank's parameters may lack; 0: every rank waits for each"
    )
    gradient_reduction: Literal["average", "adasum"] = Field(
        "average", description="how the gradients of the ranks become one"
    )
    fusion_threshold_mb: float | None = Field(
        None,
        ge=0,
        le=4096,
        description="for horovod: gradients are sent together up to this, 0: each by itself; by default 25",
    )
    cycle_time_ms: float | None = Field(
        None, gt=0, description="for horovod: how often it looks for gradients to send; by default its own, 1"
    )
    timeline: str | None = Field(None, description="for horovod: a file for the timeline of its collectives")
    find_unused_parameters: bool = Field(False, description="for models that leave parameters out in some steps")
    static_graph: bool = Field(False, description="DDP: every step uses the same parameters")
    bucket_cap_mb: float = Field(25, gt=0, description="size of DDP's gradient buckets")
    collective_timeout_s: float = Field(
        600, gt=0, description="after which a collective that a rank does not join is an error"
    )

    @field_validator("local_sgd_start")
    @classmethod
    def _readable_start(cls, value: int | str | None) -> int | str | None:
        if value is not None:
            parse_start(value)
        return value

    @field_validator("compression", mode="before")
    @classmethod
    def _named_compression(cls, value: Any) -> Any:
        """Also as Horovod names it: hvd.Compression.fp16."""
        known = {"NoneCompressor": "none", "FP16Compressor": "fp16"}
        return known.get(getattr(value, "__name__", ""), value)
