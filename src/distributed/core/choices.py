"""What settings, plans and reports choose among, as types: mypy refuses comparisons with values that none has."""

from __future__ import annotations

from typing import Literal

Device = Literal["cpu", "cuda"]
Collectives = Literal["gloo", "nccl"]
Precision = Literal["fp32", "bf16", "fp16", "fp8"]  # fp8: bf16 but for linear layers
Parameters = Literal["fp32", "compensated", "stochastic"]  # the last two are in bf16
OptimizerName = Literal["adamw", "adam", "sgd", "lars", "lamb"]
Schedule = Literal["constant", "cosine", "linear"]
Interval = Literal["epoch", "step"]
OnNan = Literal["stop", "continue"]
SlowRank = Literal["report", "replace"]
LossWeighting = Literal["auto", "samples", "targets"]
IterableSplit = Literal["share", "dataset"]
Compression = Literal["none", "fp16", "bf16", "topk", "randomk", "powersgd", "int8", "onebit"]  # of gradients sent
Synchronization = Literal["every_step", "local_sgd", "post_local_sgd", "diloco", "asynchronous"]  # when replicas meet
ReplicaCheck = Literal["all", "parameters", "nothing"]  # parameters: with the optimizer
Shard = Literal["none", "optimizer", "grad_op", "full"]  # ZeRO 0, 1, 2 and 3
Sharding = Shard | Literal["hybrid"]  # hybrid: full, within groups of the data ranks
PipelineSchedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
Recompute = Literal["", "full", "selective"]
CompileMode = Literal["", "auto", "default", "reduce-overhead", "max-autotune"]  # "": torch's own
Switch = Literal["off", "auto", "on"]  # auto: decided, and reported, when the run has begun
FrequencyUnit = Literal["epochs", "steps", "minutes", "validations"]
ModelKind = Literal["torch", "keras"]  # whose models an engine trains
ReplicaStrategy = Literal["mirrored", "multi_worker", "parameter_server", "tpu"]  # TensorFlow's
NodeNews = Literal["failed", "stopping", "regroup", "lost", "cut off", "done"]  # of another node; see News
Activity = Literal["compiling", "collective", "data", "user code", "stopped", "unknown"]  # of a rank
RunStatus = Literal["done", "interrupted"]  # a failed run ends with RankFailed
FindingState = Literal["ok", "missing", "broken"]  # missing: something optional; broken: nothing can be trained
ChaosKind = Literal["kill", "hang", "slow", "partition", "corrupt", "diskfull"]  # of a fault on purpose
