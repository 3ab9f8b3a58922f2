"""Settings of a run: where it trains, on what data, for how long, what it survives, saves and shows."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from distributed.core.engines.engine import ENGINES
from distributed.core.registry import nearest_hint
from distributed.core.settings.section import SettingsSection
from distributed.core.values import (
    CHANGES,
    parse_best,
    parse_changes,
    parse_duration,
    parse_frequency,
    parse_interval,
)


class ResourceSettings(SettingsSection):
    """Which devices and machines. "GPU" means device: without CUDA, that many CPU processes."""

    num_gpus: int | None = Field(None, ge=1, description="devices in all; by default every GPU, or one CPU process")
    num_nodes: int = Field(1, ge=1, description="machines")
    gpus_per_node: int | None = Field(None, ge=1, description="devices on each machine")
    node_rank: int | None = Field(None, ge=0, description="which machine this is; by default agreed at the rendezvous")
    master_addr: str | None = Field(None, description="host of the rendezvous: the address of node 0")
    master_port: int | None = Field(
        None, ge=1, le=65535, description="port of the rendezvous of nodes or ranks; by default a free one"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="what to train on")
    share_gpus: bool = Field(
        False, description="let several ranks share a GPU, to try a run of many GPUs on few; not for speed"
    )


class BackendSettings(SettingsSection):
    """The engine that trains, and where it runs."""

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

    @field_validator("backend")
    @classmethod
    def _known_backend(cls, name: str) -> str:
        if name != "auto" and name not in ENGINES.entries:
            raise ValueError(
                f"{name!r} is not a backend of this version; {nearest_hint(name, ['auto', *ENGINES.entries])}"
            )
        return name


class TrainingSettings(SettingsSection):
    """Batches, the learning rate and its schedule, and what a run repeats exactly."""

    batch_size: int | None = Field(
        None, ge=1, description="samples a device and micro-batch; by default the data loader's"
    )
    epochs: int = Field(1, ge=1, description="passes over the training data")
    max_steps: int | None = Field(None, ge=1, description="stop after that many optimizer steps")
    max_time: str | None = Field(
        None,
        description="stop after that much time, like '2h30m'; a resumed run has what is left of it",
    )
    fast_dev_run: bool | Annotated[int, Field(ge=1)] = Field(
        False,
        description="try everything with one step and one validation batch, or that many: no checkpoint is kept, and "
        "TensorBoard and MLflow get nothing",
    )
    learning_rate: float = Field(0.001, gt=0, description="peak learning rate, before any scaling rule")
    optimizer: Literal["adamw", "adam", "sgd", "lars", "lamb"] = Field(
        "adamw", description="used when no optimizer is passed to the trainer; lars and lamb: for large batches"
    )
    weight_decay: float | None = Field(
        None, ge=0, description="for the optimizer named here; by default that optimizer's own"
    )
    momentum: float | None = Field(None, ge=0, lt=1, description="for sgd and lars")
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
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="where the decay ends, as a fraction of the peak rate")
    scheduler_interval: Literal["epoch", "step"] = Field(
        "epoch", description="when a scheduler passed to the trainer steps"
    )
    scheduler_metric: str | None = Field(
        None, description="for ReduceLROnPlateau: its metric; by default val_loss, or loss where nothing is validated"
    )
    seed: int = Field(0, ge=0, lt=2**63, description="of the data order and of dropout")
    reproducible: Literal["off", "bitwise"] = Field(
        "off", description="bitwise: the same bytes at any number of ranks that divides virtual_ranks; slower"
    )
    virtual_ranks: int = Field(
        8, ge=1, description="for bitwise: parts of a global batch, each on one rank; a power of two"
    )
    val_check_interval: int | float | str | None = Field(
        None,
        description="when the validation data is evaluated: after that many steps, 0.25 of an epoch, '10 minutes' or "
        "'2 epochs'; by default after each epoch. The end of a run is always evaluated",
    )
    sanity_val_steps: int = Field(
        2, ge=0, description="batches of the validation data that a new run tries before its first step; 0: none"
    )
    loss_weighting: Literal["auto", "samples", "targets"] = Field(
        "auto", description="what the loss is a mean over; auto: it is found out, and refused where it is neither"
    )
    on_nan: Literal["stop", "continue"] = Field("stop", description="what to do when the loss is not finite")
    detect_anomaly: bool = Field(
        False, description="name the operation that first made NaN or infinity, in forward and backward; slow"
    )

    @field_validator("val_check_interval")
    @classmethod
    def _known_interval(cls, value: int | float | str | None) -> int | float | str | None:
        if value is not None:
            parse_interval(value)
        return value

    @field_validator("max_time")
    @classmethod
    def _known_time(cls, value: str | None) -> str | None:
        if value is not None:
            parse_duration(value)
        return value

    @field_validator("virtual_ranks")
    @classmethod
    def _power_of_two(cls, count: int) -> int:
        if count & (count - 1):
            below = 2 ** (count.bit_length() - 1)
            raise ValueError(f"must be a power of two, {below} or {2 * below}")
        return count


class SurvivalSettings(SettingsSection):
    """How a run continues after faults, and with other numbers of ranks."""

    max_restarts: int | None = Field(
        None,
        ge=0,
        description="faults in a row without a new step before the run is given up; by default 10, "
        "and 0 for a script that does not use the Trainer",
    )
    min_nodes: int | None = Field(None, ge=1, description="fewest machines to continue with; by default num_nodes")
    max_nodes: int | None = Field(None, ge=1, description="most machines to grow to; by default num_nodes")
    min_gpus: int | None = Field(
        None, ge=1, description="ranks of a machine to continue with when one cannot be replaced; by default all"
    )
    hang_timeout_s: float | None = Field(
        None, gt=0, description="seconds without a step after which a rank is stuck; by default from its own steps"
    )
    slow_rank: Literal["report", "replace"] = Field(
        "report",
        description="what to do with a rank that stays slower than its peers; replace: start a new process in its "
        "place, once for each place",
    )
    slow_rank_wait_s: float = Field(
        30.0, gt=0, description="for replace: seconds that the others have waited for the rank before it is replaced"
    )
    warm_start: bool = Field(True, description="fork the ranks of a machine from one process that has imported torch")
    requeue_exit_code: int = Field(
        143, ge=1, le=255, description="exit code after SIGTERM or SIGUSR1: what Slurm or Kubernetes starts again"
    )


class DataSettings(SettingsSection):
    """How batches are read."""

    drop_last: bool | None = Field(
        None, description="drop the last incomplete batch; by default as the data loader says"
    )
    iterable_split: Literal["share", "dataset"] = Field(
        "share", description="streams: every rank reads all and keeps its shard, or the dataset shards itself"
    )
    bucket_by_length: bool | str = Field(
        False,
        description="put samples of similar length into a batch, for less padding: true: by what a sample looks like; "
        "or the name of its entry whose length counts",
    )
    limit_train_batches: Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="steps of an epoch at most, or a part of them as 0.1; each epoch takes the first of its order"
    )
    limit_val_batches: Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="batches of an evaluation at most, over all ranks, or a part of them as 0.1; 0: none"
    )
    overfit_batches: Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, le=1)] | None = Field(
        None,
        description="train on the first steps of the dataset's order alone, or a part of them, in every epoch, and "
        "evaluate with the same samples",
    )


class CheckpointSettings(SettingsSection):
    """What is saved and kept, and what a resumed run may change."""

    checkpoint_dir: str | None = Field(None, description="by default in the run directory")
    checkpoint_frequency: int | str | None = Field(
        None,
        description="epochs between checkpoints, or '500 steps', '10 minutes', '1 validation'; the last state is "
        "always saved",
    )
    checkpoint_async: bool = Field(True, description="keep training while a checkpoint is written")
    keep_last: int | None = Field(
        None, ge=1, description="of this run's checkpoints, those to keep: the last written; by default all"
    )
    keep_every: int | None = Field(None, ge=1, description="keep those whose step is a multiple of this besides")
    keep_best: str | None = Field(
        None, description="which is the best, and is kept besides: 'val_loss', 'val_accuracy', 'min:val_mae' …"
    )
    keep_best_k: int = Field(1, ge=1, description="for keep_best: how many of them")
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
        description="whose learning rate, weight decay and the like a resumed run uses; config: its own",
    )
    allow_change: str | list[str] | None = Field(
        None,
        description="what a resumed run may have changed since its checkpoint, though it is then another run: "
        + ", ".join(CHANGES),
    )

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


class MonitoringSettings(SettingsSection):
    """Where a run writes, and what it shows."""

    run_dir: str | None = Field(None, description="where this run writes; by default runs/<time>")
    tensorboard: bool = Field(False, description="write TensorBoard files")
    tensorboard_dir: str | None = Field(None, description="where; implies tensorboard")
    csv: bool = Field(False, description="write metrics.csv, with a row for each step that is logged or evaluated")
    mlflow_tracking: bool = Field(False, description="log to MLflow")
    mlflow_experiment: str | None = Field(None, description="its experiment; implies mlflow_tracking")
    mlflow_tracking_uri: str | None = Field(
        None, description="its server; by default MLflow's own setting, else sqlite:///mlflow.db"
    )
    log_every_n_steps: int = Field(
        50, ge=1, description="steps between log lines; losses stay on the device in between"
    )
    progress: bool = Field(True, description="show progress on the console")
    model_summary: bool | Annotated[int, Field(ge=1)] = Field(
        False, description="print the model's layers before training, with shapes, FLOPs and memory; or down to a depth"
    )
