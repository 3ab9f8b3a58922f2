"""Plan: everything decided before a process starts, each automatic choice with its reason and what overrides it.

A Plan is never edited: another size is another plan. What is known later only is added by its methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from distributed.core.batch_plan import BatchPlan
from distributed.core.choices import (
    Collectives,
    CompileMode,
    Compression,
    Device,
    FrequencyUnit,
    Interval,
    IterableSplit,
    LossWeighting,
    OnNan,
    OptimizerName,
    Parameters,
    PipelineSchedule,
    Precision,
    Recompute,
    ReplicaCheck,
    Schedule,
    Shard,
    SlowRank,
    Switch,
)
from distributed.core.documents import typed_json
from distributed.core.errors import PlanError
from distributed.core.mesh import MeshSpec
from distributed.core.plan_parts.synchronization import SynchronizationPlan
from distributed.core.run_dir import RunDir

ENDLESS = 2**31 - 1  # epochs of a run whose script says when it ends
PLAN_VERSION = 5  # of plan.json and of the plan in a manifest: raised with every change of a field


@dataclass(frozen=True)
class Decision:
    """One automatic choice."""

    choice: str
    reason: str
    override: str = ""  # the setting that changes it

    def __str__(self) -> str:
        return f"{self.choice}: {self.reason}" + (f" [{self.override}]" if self.override else "")


@dataclass(frozen=True)
class DataPlan:
    """Which of the data a run uses, where it is not all."""

    evaluation: int | float | None = None  # batches of an evaluation at most, or their part; None: all
    overfits: bool = False  # the first steps of the dataset's order in every epoch, also for the evaluation


@dataclass(frozen=True)
class PrecisionPlan:
    kind: Precision = "fp32"
    scaler_init_scale: float = 65536.0
    scaler_growth_interval: int = 2000


@dataclass(frozen=True)
class OptimizerPlan:
    """The optimizer that we make when the user passes none, and what is done to gradients under any."""

    name: OptimizerName = "adamw"
    learning_rate: float = 0.001  # after the scaling rule
    weight_decay: float | None = None
    momentum: float | None = None
    clip_norm: float | None = None
    clip_value: float | None = None
    lr_factor: float = 1.0  # the scaling rule's factor, for optimizers that were passed in


@dataclass(frozen=True)
class SchedulePlan:
    kind: Schedule = "constant"
    warmup_steps: int = 0
    warmup_epochs: float = 0.0
    min_ratio: float = 0.0
    interval: Interval = "epoch"  # of a scheduler that was passed in
    metric: str = ""  # that it gets, if it wants one; "": the loss of the validation, or of the training without one

    @property
    def is_constant(self) -> bool:
        return self.kind == "constant" and not self.warmup_steps and not self.warmup_epochs


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


@dataclass(frozen=True)
class ReplicatePlan:
    """How replicas are kept alike."""

    find_unused_parameters: bool = False
    static_graph: bool = False
    bucket_cap_mb: float = 25.0
    sync_batchnorm: bool = True
    check: ReplicaCheck = "all"  # what of them is compared
    compression: CompressionPlan = field(default_factory=CompressionPlan)
    synchronization: SynchronizationPlan = field(default_factory=SynchronizationPlan)


@dataclass(frozen=True)
class ShardPlan:
    """What of the model's state each data rank keeps to itself."""

    kind: Shard = "none"
    blocks: tuple[str, ...] = ()  # classes or paths of what is gathered at once; none: found
    cpu_offload: bool = False

    @property
    def is_fsdp(self) -> bool:
        return self.kind in ("grad_op", "full")


@dataclass(frozen=True)
class TensorPlan:
    """How layers are cut over the axis tp."""

    styles: tuple[tuple[str, str], ...] = ()  # (path pattern, style); none: found
    sequence: bool = False  # norms and residuals on parts of the sequence


@dataclass(frozen=True)
class PipelinePlan:
    schedule: PipelineSchedule = "1f1b"


@dataclass(frozen=True)
class LoraPlan:
    """Adapters of low rank are trained in place of the layers themselves."""

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ()  # names of layers; none: found
    saves_alone: bool = False  # checkpoints hold the adapters only


@dataclass(frozen=True)
class MemoryPlan:
    """What is computed again rather than kept, and how blocks run."""

    recompute: Recompute = ""
    recompute_every: int = 1  # of the blocks, each n-th
    compile: bool = False  # each block
    compile_whole: bool = False  # or the model at once
    compile_mode: CompileMode = ""
    compile_cache: str = ""  # a folder; "": the user's
    lora: LoraPlan | None = None


@dataclass(frozen=True)
class SpeedPlan:
    """What makes a step faster and leaves what it computes as it is, or nearly so."""

    capture: Switch = "off"  # auto: where it is worth it and comes to the same
    fused_optimizer: bool = False
    parameters: Parameters = "fp32"
    channels_last: bool = False
    tf32: bool = False
    expandable_segments: bool = False
    keep_freed_memory: bool = False
    data_on_device: Switch = "off"  # auto: where it takes little of the device's memory


@dataclass(frozen=True)
class CheckpointPlan:
    dir: str = ""
    every: float | None = None
    unit: FrequencyUnit = "epochs"  # of `every`
    resume: bool | str = False
    own_rates: bool = False  # a resumed run keeps its own learning rate and the like
    allowed: tuple[str, ...] = ()  # what may have changed since the checkpoint, though the run is then another one
    asynchronous: bool = True
    keep_last: int | None = None
    keep_every: int | None = None
    best: str = ""  # 'min:val_loss': the metric by which the best ones are kept
    best_count: int = 1
    certificate: int = 3  # steps after a checkpoint that a resumed run is compared with
    ledger: bool = False
    saves: bool = True  # False: of a trial before a run, of which nothing is kept


@dataclass(frozen=True)
class ValidationPlan:
    """When the validation data is evaluated."""

    every: float = 1
    unit: FrequencyUnit = "epochs"
    sanity_batches: int = 2  # batches that a new run evaluates before its first step

    @property
    def is_by_epoch(self) -> bool:
        """Whether ends of epochs are evaluated for their own sake, and parts of epochs besides."""
        return self.unit == "epochs"


@dataclass(frozen=True)
class MlflowPlan:
    experiment: str = "Default"
    tracking_uri: str = ""
    run_id: str = ""  # a run that the user has open


@dataclass(frozen=True)
class ObservePlan:
    log_every: int = 50
    progress: bool = True
    csv: bool = False
    tensorboard_dir: str = ""
    mlflow: MlflowPlan | None = None


@dataclass(frozen=True)
class Plan:
    """Everything that a rank needs to know; the config is not read after this."""

    run_dir: str
    batch: BatchPlan
    trains: bool = True  # else nothing is: no gradient is reduced, and there is no optimizer
    strategy: str = "pytorch-ddp"
    mesh: MeshSpec = field(default_factory=MeshSpec)
    num_nodes: int = 1
    device: Device = "cpu"
    shares_gpus: bool = False  # whether several ranks have the same one
    collectives: Collectives = "gloo"
    collective_timeout_s: float = 600.0
    threads_per_rank: int = 1
    seed: int = 0
    epochs: int = 1
    max_steps: int | None = None
    max_time_s: float | None = None  # of the whole run
    on_nan: OnNan = "stop"
    detect_anomaly: bool = False
    slow_rank: SlowRank = "report"
    slow_rank_wait_s: float = 30.0
    loss_weighting: LossWeighting = "auto"
    iterable_split: IterableSplit = "share"
    sample_check: bool = True  # whether the ranks compare their data
    is_dev_run: bool = False  # whether it only tries what a run does
    data: DataPlan = field(default_factory=DataPlan)
    precision: PrecisionPlan = field(default_factory=PrecisionPlan)
    optimizer: OptimizerPlan = field(default_factory=OptimizerPlan)
    schedule: SchedulePlan = field(default_factory=SchedulePlan)
    replicate: ReplicatePlan = field(default_factory=ReplicatePlan)
    shard: ShardPlan = field(default_factory=ShardPlan)
    tensor: TensorPlan = field(default_factory=TensorPlan)
    pipeline: PipelinePlan = field(default_factory=PipelinePlan)
    memory: MemoryPlan = field(default_factory=MemoryPlan)
    speed: SpeedPlan = field(default_factory=SpeedPlan)
    workers: int | Literal["auto"] | None = None  # processes that read data; None: as many as the data loader says
    validation: ValidationPlan = field(default_factory=ValidationPlan)
    checkpoint: CheckpointPlan = field(default_factory=CheckpointPlan)
    observe: ObservePlan = field(default_factory=ObservePlan)
    engine: dict[str, Any] = field(default_factory=dict)  # what only this strategy knows: its `plans` made it
    settings: dict[str, Any] = field(default_factory=dict)  # what the user asked, for the record only
    decisions: tuple[Decision, ...] = ()

    @property
    def world_size(self) -> int:
        return self.mesh.world_size

    @property
    def ranks_per_node(self) -> int:
        return self.world_size // self.num_nodes

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the whole model and its optimizer's state."""
        return self.mesh.is_replicas and self.shard.kind == "none"

    @property
    def is_held_by_each(self) -> bool:
        """Whether what any rank has in memory is all of the run: none keeps gradients or steps of its own."""
        return self.is_replicated and not (self.replicate.compression.keeps or self.replicate.synchronization.is_local)

    @property
    def division(self) -> dict[str, Any]:
        """How the state is sharded over the ranks: where two runs have the same, rank n has the same shard."""
        return {**self.mesh.sizes(), "shard": self.shard.kind}

    @property
    def is_bitwise(self) -> bool:
        """Whether the result has the same bytes at any number of ranks."""
        return self.batch.leaves > 0

    @property
    def legal_sizes(self) -> list[int]:
        """World sizes that this run can continue with; none: any."""
        unit = self.world_size // self.mesh.dp_shard if self.shard.is_fsdp else self.mesh.ranks_per_replica
        if self.batch.of_stream:  # its position is a number of steps, so each must take as many samples as before
            if self.iterable_split == "dataset":
                return [self.world_size]
            sizes = [n for n in range(1, self.batch.global_batch + 1) if self.batch.for_ranks(n).is_even]
        elif unit > 1:
            sizes = list(range(1, self.batch.global_batch + 1))
        else:
            sizes = [n for n in range(1, self.batch.leaves + 1) if self.batch.leaves % n == 0]
        replicas = unit // self.mesh.ranks_per_replica
        return [n * self.mesh.ranks_per_replica for n in sizes if n % replicas == 0]

    def for_world(self, world_size: int, num_nodes: int) -> Plan:
        """The plan of the same run with another number of ranks: the global batch and all that depends on it stay."""
        if (world_size, num_nodes) == (self.world_size, self.num_nodes):
            return self
        data_ranks, rest = divmod(world_size, self.mesh.ranks_per_replica)
        if rest or (self.shard.is_fsdp and data_ranks % self.mesh.dp_replicate):
            raise PlanError(
                f"the run cannot continue with {world_size} ranks",
                why=f"the mesh is {self.mesh}: one copy of the model takes {self.mesh.ranks_per_replica} ranks",
                do=f"continue with {self.mesh.ranks_per_replica} ranks, or a multiple of that",
            )
        if self.shard.is_fsdp:
            mesh = replace(self.mesh, dp_shard=data_ranks // self.mesh.dp_replicate)
        else:
            mesh = replace(self.mesh, dp_replicate=data_ranks)
        return replace(self, mesh=mesh, num_nodes=num_nodes, batch=self.batch.for_ranks(data_ranks))

    def in_dir(self, run_dir: str) -> Plan:
        """The same plan in the run directory that its ranks have agreed on, with the files that go there."""
        before, after, checkpoint, observe = RunDir(self.run_dir), RunDir(run_dir), self.checkpoint, self.observe
        for old, new in ((before.checkpoints, after.checkpoints), (before.passing, after.passing)):
            if checkpoint.dir == str(old):
                checkpoint = replace(checkpoint, dir=str(new))
        if observe.tensorboard_dir == str(before.tensorboard):
            observe = replace(observe, tensorboard_dir=str(after.tensorboard))
        return replace(self, run_dir=run_dir, checkpoint=checkpoint, observe=observe)

    def total_steps(self, steps_per_epoch: int | None, samples: int | None = None) -> int | None:
        """Of the whole run; None where nothing limits a stream of unknown length, or a script that ends it.

        `samples`: of an epoch.
        """
        if steps_per_epoch is None or self.epochs >= ENDLESS:
            return self.max_steps
        total = steps_per_epoch * self.epochs
        if self.batch.by_epoch and samples is not None:
            total = sum(self.batch.at(epoch).steps(samples) for epoch in range(self.epochs))
        return min(self.max_steps or total, total)

    def with_decisions(self, *more: Decision, first: Sequence[Decision] = ()) -> Plan:
        """The same plan with choices that were made before or after it."""
        return replace(self, decisions=(*first, *self.decisions, *more))

    def without_compile(self) -> Plan:
        """The same plan whose model runs as it is."""
        return replace(self, memory=replace(self.memory, compile=False))

    def without_capture(self) -> Plan:
        """The same plan whose steps run eagerly."""
        return replace(self, speed=replace(self.speed, capture="off"))

    def to_plain(self) -> dict[str, Any]:
        """As plan.json and a checkpoint's manifest hold it; secrets are masked."""
        return typed_json.to_plain(self, PLAN_VERSION)

    def to_json(self) -> str:
        """The text of plan.json; secrets are masked."""
        return typed_json.to_json(self, PLAN_VERSION)

    @classmethod
    def read(cls, run_dir: str | Path) -> Plan:
        """The plan of a run, which its directory holds from the start of the training on."""
        path = RunDir(run_dir).plan
        return typed_json.read(cls, path, PLAN_VERSION, why="`fit` writes the plan there before its first step")

    @classmethod
    def from_json(cls, text: str, source: str = "the plan") -> Plan:
        """The plan that `to_json` wrote; one of another version is refused. `source` names the file in errors.

        >>> plan = Plan("runs/a", BatchPlan(per_device=8))
        >>> Plan.from_json(plan.to_json()) == plan
        True
        """
        return typed_json.from_json(cls, text, PLAN_VERSION, source)
