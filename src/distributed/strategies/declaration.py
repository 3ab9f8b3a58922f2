"""The declarations of pytorch-ddp and fsdp, and the features that engines on torch's steps have too."""

from __future__ import annotations

from distributed.core.engines.engine import Engine, Support
from distributed.core.engines.features import EngineRequest

TORCH_MESH = "distributed.strategies.torch_mesh:TorchMesh"
BITWISE = "distributed.strategies.bitwise:BitwiseReplicas"
OFFLOADS = ("grad_op", "full", "hybrid")

REPLICAS = {
    "bf16": Support(),
    "fp16": Support(),
    "accumulation": Support(),
    "clipping": Support(),
    "clip_value": Support(),
    "anomaly": Support(),
    "layerwise": Support(),
    "buckets": Support(),
    "targets": Support(),
    "own_step": Support(),
    "stream": Support(),
    "batchnorm": Support(),
    "save": Support(),
    "load": Support(),
    "restart": Support(),
}
MESH = REPLICAS | {
    "several_optimizers": Support("replicated, or with ZeRO-2, ZeRO-3 or hybrid"),
    "zero1": Support(),
    "zero2": Support(),
    "zero3": Support(),
    "hybrid": Support(),
    "cpu_offload": Support("with ZeRO-2, ZeRO-3 or hybrid"),
    "tensor": Support(),
    "pipeline": Support(),
    "context": Support(),
    "recompute": Support(),
    "compile": Support(),
    "lora": Support(),
    "unused": Support(),
    "static_graph": Support(),
    "meta": Support(),
    "dry_run": Support(),
    "fp8": Support("on Ada, Hopper and later, where layers are not cut", device="cuda"),
    "bf16_parameters": Support("replicated, or with ZeRO-2, ZeRO-3 or hybrid"),
}
OWN_LOOP = {"own_loop": Support("without pipelines and context parallelism")}
# Features of engines whose ranks may each hold the whole model.
WHOLE = {
    "manual": Support("without sharding"),
    "closure": Support("without sharding"),
    "bitwise": Support(),
    "compression": Support("without sharding"),
    "feedback": Support("without sharding"),
    "local_steps": Support("without sharding"),
    "asynchronous": Support("without sharding"),
    "capture": Support("without sharding", device="cuda"),
}


def _why_fsdp(wanted: EngineRequest) -> str:
    return "it shards the state of a model" if wanted.sharding in ("grad_op", "full", "hybrid") else ""


PYTORCH_DDP = Engine(
    TORCH_MESH,
    does="PyTorch's own, with a replica of the model on every rank unless a setting shards it",
    can=MESH | WHOLE | OWN_LOOP | {"regroup": Support("without sharding, on gloo")},
    offloads=OFFLOADS,
    bitwise=BITWISE,
    claims=lambda wanted: "" if _why_fsdp(wanted) else "data-parallel ranks hold the same parameters",
)
FSDP = Engine(
    TORCH_MESH,
    does="PyTorch's own, with all state sharded unless a setting says otherwise",
    can=MESH | OWN_LOOP,
    shards="full",
    offloads=OFFLOADS,
    claims=_why_fsdp,
)
