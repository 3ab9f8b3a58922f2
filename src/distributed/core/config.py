"""DistributedConfig: what the user asked for. Values are checked here; whether they can run is the planner's word."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, field_validator

from distributed.core.contradictions import contradictions
from distributed.core.engines import ENGINES
from distributed.core.errors import ConfigError, Problem
from distributed.core.registry import nearest_hint
from distributed.core.values import CHANGES, parse_best, parse_changes, parse_frequency

Sources = dict[str, str]


class DistributedConfig(BaseModel):
    """All settings of a run, checked together; every wrong one is reported at once.

    >>> config = DistributedConfig(num_gpus=8, num_nodes=2, gpus_per_node=4, batch_size=32)
    >>> config.epochs, config.source("batch_size"), config.source("epochs")
    (1, 'argument', 'default')
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=False, protected_namespaces=())

    # Resources. "GPU" means device: without CUDA, that many CPU processes.
    num_gpus: int | None = Field(None, ge=1, description="devices in all; by default every GPU, or one CPU process")
    num_nodes: int = Field(1, ge=1, description="machines")
    gpus_per_node: int | None = Field(None, ge=1, description="devices on each machine")
    node_rank: int | None = Field(None, ge=0, description="which machine this is; by default agreed at the rendezvous")
    master_addr: str | None = Field(None, description="host where the nodes meet")
    master_port: int | None = Field(
        None, ge=1, le=65535, description="port where the nodes or ranks meet; by default a free one"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="what to train on")
    share_gpus: bool = Field(
        False, description="let several ranks share a GPU, to try a run of many GPUs on few; not for speed"
    )

    backend: str = Field("auto", description="the engine that trains: " + ", ".join(["auto", *ENGINES.entries]))
    address: str | None = Field(
        None,
        description="for ray: its cluster, as auto, ray://host:port or host:port; by default one on this machine alone",
    )
    tensorflow_strategy: Literal["auto", "mirrored", "multi_worker", "parameter_server", "tpu"] = Field(
        "auto",
        description="for tensorflow: how replicas are kept alike; auto: mirrored in one process on one machine, "
        "multi_worker over several",
    )
    parameter_servers: int = Field(
        1, ge=1, description="for tensorflow_strategy=parameter_server: processes that hold the parameters"
    )

    # Training
    batch_size: int | None = Field(
        None, ge=1, description="samples a device and micro-batch; by default the data loader's"
    )
    epochs: int = Field(1, ge=1, description="passes over the training data")
    max_steps: int | None = Field(None, ge=1, description="stop after that many optimizer steps")
    learning_rate: float = Field(0.001, gt=0, description="peak learning rate, before any scaling rule")
    optimizer: Literal["adamw", "adam", "sgd"] = Field(
        "adamw", description="used when no optimizer is passed to the trainer"
    )
    weight_decay: float | None = Field(
        None, ge=0, description="for the optimizer named here; by default that optimizer's own"
    )
    momentum: float | None = Field(None, ge=0, lt=1, description="for sgd")
    lr_scaling: Literal["none", "linear", "sqrt"] = Field(
        "none", description="scale the rate by global batch / base_batch_size"
    )
    base_batch_size: int | None = Field(
        None, ge=1, description="the batch that learning_rate was tuned for; by default batch_size"
    )
    lr_schedule: Literal["constant", "cosine", "linear"] = Field(
        "constant", description="after the warm-up, over the whole run"
    )
    warmup_steps: int = Field(0, ge=0, description="optimizer steps of linear warm-up")
    warmup_epochs: float = Field(0, ge=0, description="the same in epochs")
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="where the decay ends, as a part of the peak rate")
    scheduler_interval: Literal["epoch", "step"] = Field(
        "epoch", description="when a scheduler passed to the trainer steps"
    )
    seed: int = Field(0, ge=0, lt=2**63, description="of the data order and of dropout")
    reproducible: Literal["off", "bitwise"] = Field(
        "off", description="bitwise: the same bytes at any number of ranks that divides virtual_ranks; slower"
    )
    virtual_ranks: int = Field(
        8, ge=1, description="for bitwise: parts of a global batch, each on one rank; a power of two"
    )
    loss_weighting: Literal["auto", "samples", "targets"] = Field(
        "auto", description="what the loss is a mean over; auto: it is found out, and refused where it is neither"
    )
    on_nan: Literal["stop", "continue"] = Field("stop", description="what to do when the loss is not finite")

    # Parallelism: what is not said here is replicated over all ranks that are left
    sharding: Literal["none", "grad_op", "full", "hybrid"] | None = Field(
        None,
        description="what data-parallel ranks share out: full: all state; grad_op: gradients and optimizer state; "
        "hybrid: full within a group, replicated over groups; by default full for backend=fsdp, else none",
    )
    zero_stage: Literal[0, 1, 2, 3] | None = Field(
        None, description="the same by ZeRO's numbers: 1 shares out the optimizer state, 2 is grad_op, 3 is full"
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
        None, description="the same for the parameters, which zero_stage=3 shares out"
    )
    offload_dir: str | None = Field(None, description="a folder on a fast local disk, for nvme")
    deepspeed_config: str | dict[str, Any] | None = Field(
        None, description="DeepSpeed's own configuration: a JSON file or its content; what it says counts as set here"
    )
    tensor_parallel: int = Field(1, ge=1, description="ranks that share each layer")
    tensor_parallel_plan: dict[str, str] | None = Field(
        None, description="path pattern to style ('*.fc1': 'column', '*.fc2': 'row'); by default found"
    )
    sequence_parallel: bool = Field(
        False, description="for tensor_parallel: norms and residuals on parts of the sequence"
    )
    pipeline_parallel: int = Field(1, ge=1, description="stages that the model's blocks are cut into")
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] | None = Field(
        None, description="the order of forward and backward passes of the stages; by default 1f1b"
    )
    pipeline_microbatches: int | None = Field(
        None, ge=1, description="parts that a batch is cut into for the pipeline; by default found"
    )
    context_parallel: int = Field(1, ge=1, description="ranks that share each sequence")

    # Memory
    activation_checkpointing: bool | int | Literal["full", "selective"] = Field(
        False, description="compute blocks again in backward: True or full, selective (all but matmuls), n: each n-th"
    )
    lora: bool | int | dict[str, Any] = Field(
        False, description="train adapters of low rank: True, their rank, or {rank, alpha, dropout, targets}"
    )
    save_adapters_only: bool = Field(False, description="for lora: checkpoints hold the adapters without the model")

    # Speed: what "auto" came to is among the run's decisions, each with its reason
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

    # Optimization
    mixed_precision: bool | Literal["fp16", "bf16", "fp8"] = Field(
        False, description="True: bf16 where the device has it, else fp16; fp8: bf16 with linear layers in 8 bits"
    )
    gradient_accumulation_steps: int = Field(1, ge=1, description="micro-batches a step")
    gradient_clipping: float | None = Field(None, gt=0, description="largest norm of the whole gradient")
    scaler_init_scale: float | None = Field(None, gt=0, description="first loss scale under fp16; by default 65536")
    scaler_growth_interval: int | None = Field(None, ge=1, description="good steps before it doubles; by default 2000")
    sync_batchnorm: bool = Field(True, description="BatchNorm statistics over the micro-batch of all ranks")

    check_replicas: bool | Literal["parameters"] = Field(
        True,
        description="compare what ranks should hold alike at the first steps, saves and ends of epochs, and stop where "
        "it differs; parameters: buffers may differ, and rank 0's count",
    )

    # Communication
    communication_backend: Literal["auto", "nccl", "gloo", "mpi"] = Field("auto", description="library for collectives")
    compression: Literal["none", "fp16"] = Field("none", description="gradients in this precision on the wire")
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
    static_graph: bool = Field(False, description="tell DDP that every step uses the same parameters")
    bucket_cap_mb: float = Field(25, gt=0, description="size of DDP's gradient buckets")
    collective_timeout_s: float = Field(
        600, gt=0, description="after which a collective that nobody answers is an error"
    )

    # Survival
    max_restarts: int | None = Field(
        None,
        ge=0,
        description="faults in a row without a new step before the run is given up; by default 10, "
        "and 0 for a script that does not use the Trainer",
    )
    min_nodes: int | None = Field(None, ge=1, description="go on with so few machines; by default num_nodes")
    max_nodes: int | None = Field(None, ge=1, description="grow to so many machines; by default num_nodes")
    min_gpus: int | None = Field(
        None, ge=1, description="ranks of a machine to go on with when one cannot be replaced; by default all"
    )
    hang_timeout_s: float | None = Field(
        None, gt=0, description="seconds without a step after which a rank is stuck; by default from its own steps"
    )
    warm_start: bool = Field(True, description="fork the ranks of a machine from one process that has imported torch")
    requeue_exit_code: int = Field(
        143, ge=1, le=255, description="exit code after SIGTERM or SIGUSR1: what Slurm or Kubernetes starts again"
    )

    # Data
    drop_last: bool | None = Field(
        None, description="drop the last incomplete batch; by default as the data loader says"
    )
    iterable_split: Literal["share", "dataset"] = Field(
        "share", description="streams: every rank reads all and keeps its share, or the dataset splits itself"
    )

    # Checkpoints
    checkpoint_dir: str | None = Field(None, description="by default in the run directory")
    checkpoint_frequency: int | str | None = Field(
        None, description="epochs between checkpoints, or '500 steps', '10 minutes'; the last state is always saved"
    )
    checkpoint_async: bool = Field(True, description="go on training while a checkpoint is written")
    keep_last: int | None = Field(
        None, ge=1, description="of this run's checkpoints, those to keep: the last written; by default all"
    )
    keep_every: int | None = Field(None, ge=1, description="keep those whose step is a multiple of this besides")
    keep_best: str | None = Field(
        None, description="keep the best by a metric of epochs besides: 'val_loss', 'val_accuracy', 'min:val_mae' …"
    )
    certificate_steps: int = Field(
        3, ge=0, description="steps after each checkpoint that a resumed run is compared with; 0: none"
    )
    sample_ledger: bool = Field(False, description="write down which samples each step used")
    sample_check: bool = Field(
        True, description="compare over the ranks, and after a resume, which samples there are and in which order"
    )
    resume_from_checkpoint: bool | str = Field(
        False, description="True: the last written in checkpoint_dir, if any; or a checkpoint's path"
    )
    resume_hyperparameters: Literal["checkpoint", "config"] = Field(
        "checkpoint",
        description="whose learning rate, weight decay and the like a resumed run goes on with; config: its own",
    )
    allow_change: str | list[str] | None = Field(
        None,
        description="what a resumed run may have changed since its checkpoint, though it is then another run: "
        + ", ".join(CHANGES),
    )

    # Monitoring
    run_dir: str | None = Field(None, description="where this run writes; by default runs/<time>")
    tensorboard: bool = Field(False, description="write TensorBoard files")
    tensorboard_dir: str | None = Field(None, description="where; implies tensorboard")
    mlflow_tracking: bool = Field(False, description="log to MLflow")
    mlflow_experiment: str | None = Field(None, description="its experiment; implies mlflow_tracking")
    mlflow_tracking_uri: str | None = Field(
        None, description="its server; by default MLflow's own setting, else sqlite:///mlflow.db"
    )
    log_every_n_steps: int = Field(
        50, ge=1, description="steps between log lines; losses stay on the device in between"
    )
    progress: bool = Field(True, description="show progress on the console")

    _sources: Sources = PrivateAttr(default_factory=dict)

    def __init__(self, _sources: Mapping[str, str] | None = None, **values: Any) -> None:
        problems: list[Problem] = []
        try:
            super().__init__(**values)
            sound = self
        except ValidationError as invalid:
            problems += _problems(invalid, _sources or {})
            wrong = {str(error["loc"][0]) for error in invalid.errors()}
            sound = type(self).model_construct(**{name: v for name, v in values.items() if name not in wrong})
        problems += contradictions(sound)
        if problems:
            raise ConfigError(problems)
        given = dict.fromkeys(values, "argument") if _sources is None else _sources
        self._sources = {name: source for name, source in given.items() if values[name] is not None}

    @field_validator("backend")
    @classmethod
    def _known_backend(cls, name: str) -> str:
        if name != "auto" and name not in ENGINES.entries:
            raise ValueError(
                f"{name!r} is not a backend of this version; {nearest_hint(name, ['auto', *ENGINES.entries])}"
            )
        return name

    @field_validator("compression", mode="before")
    @classmethod
    def _named_compression(cls, value: Any) -> Any:
        """Also as Horovod names it: hvd.Compression.fp16."""
        known = {"NoneCompressor": "none", "FP16Compressor": "fp16"}
        return known.get(getattr(value, "__name__", ""), value)

    @field_validator("deepspeed_config", mode="before")
    @classmethod
    def _plain_config(cls, value: Any) -> Any:
        """Also DeepSpeed's own object, and a path."""
        content = getattr(value, "_param_dict", value)
        return os.fspath(content) if isinstance(content, os.PathLike) else content

    @field_validator("checkpoint_frequency")
    @classmethod
    def _known_frequency(cls, value: int | str | None) -> int | str | None:
        if value is not None:
            parse_frequency(value)
        return value

    @field_validator("keep_best")
    @classmethod
    def _known_direction(cls, value: str | None) -> str | None:
        if value is not None:
            parse_best(value)
        return value

    @field_validator("allow_change")
    @classmethod
    def _known_changes(cls, value: str | list[str] | None) -> str | list[str] | None:
        if value is not None:
            parse_changes(value)
        return value

    @field_validator("virtual_ranks")
    @classmethod
    def _power_of_two(cls, count: int) -> int:
        if count & (count - 1):
            below = 2 ** (count.bit_length() - 1)
            raise ValueError(f"must be a power of two, {below} or {2 * below}")
        return count

    def source(self, name: str) -> str:
        """Where a value came from: 'default', 'argument', 'run.yaml:3', 'command line' …"""
        return self._sources.get(name, "default")

    def given(self, name: str) -> bool:
        """Whether somebody set it, so that a default may not be blamed or praised."""
        return name in self._sources

    def given_values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._sources}

    def merged(self, values: Mapping[str, Any], source: str) -> DistributedConfig:
        """A config in which `values` win over these, with their source noted; None leaves a value as it is."""
        new = {name: value for name, value in values.items() if value is not None}
        return build_config([(self.given_values(), "", self._sources), (new, source, {})])


Layer = tuple[Mapping[str, Any], str, Mapping[str, str]]


def build_config(layers: list[Layer]) -> DistributedConfig:
    """The config of several layers, later ones winning: (values, their source, a finer source by name)."""
    values: dict[str, Any] = {}
    sources: Sources = {}
    for layer, source, finer in layers:
        values |= layer
        sources |= {name: finer.get(name, source) for name in layer}
    return DistributedConfig(_sources=sources, **values)


def _problems(invalid: ValidationError, sources: Mapping[str, str]) -> list[Problem]:
    """Pydantic's findings in our words, one a setting."""
    problems: dict[str, Problem] = {}
    for error in invalid.errors():
        name = str(error["loc"][0])
        where = f" ({sources[name]})" if name in sources else ""
        if error["type"] == "extra_forbidden":
            hint = nearest_hint(name, DistributedConfig.model_fields)
            problems[name] = Problem(f"there is no setting {name!r}{where}", do=hint)
        else:  # a union reports each of its members: the last is the most telling
            message = re.sub(r"^(Value error, |Input )", "", error["msg"])
            problems[name] = Problem(f"{name}={error['input']!r}{where}: {message}", do=_describe(name))
    return list(problems.values())


def _describe(name: str) -> str:
    field = DistributedConfig.model_fields.get(name)
    return f"{name}: {field.description}" if field is not None and field.description else ""
