"""DeepSpeed as an engine: what it can, and where its parts are."""

from __future__ import annotations

from collections.abc import Mapping

from distributed.core.engines.engine import Engine, LauncherTraits, Support
from distributed.core.engines.features import EngineRequest, Feature, by_setting


def _announces(environ: Mapping[str, str]) -> bool:
    """Its launcher sets torch's variables, but has words of its own for nodes."""
    return {"RANK", "WORLD_SIZE", "CROSS_SIZE"} <= environ.keys() and "GROUP_WORLD_SIZE" not in environ


def _claims(wanted: EngineRequest) -> str:
    if wanted.stages:
        return "the model is a PipelineModule of DeepSpeed"
    return "a DeepSpeed configuration is given" * (wanted.config.deepspeed_config is not None)


DEEPSPEED = Engine(
    "distributed.engines.deepspeed.pipeline.strategy:strategy_of",
    needs="deepspeed",
    extra="deepspeed",
    does="DeepSpeed's ZeRO, with state in host memory or on a disk",
    can={
        "bf16": Support("parameters in bf16 beside a master in fp32"),
        "fp16": Support("the same, with a scaled loss", device="cuda"),
        "accumulation": Support(),
        "clipping": Support(),
        "anomaly": Support(),
        "buckets": Support(),
        "targets": Support(),
        "own_step": Support(),
        "stream": Support(),
        "batchnorm": Support("in fp32"),
        "recompute": Support(),
        "lora": Support(),
        "zero1": Support(),
        "zero2": Support(),
        "zero3": Support(),
        "cpu_offload": Support("parameters with ZeRO-3"),
        "offload_optimizer": Support("on a disk with ZeRO-3"),
        "offload_parameters": Support("with ZeRO-3"),
        "config_file": Support(),
        "pipeline_module": Support("in fp32, without ZeRO, tied layers or adapters"),
        "save": Support(),
        "load": Support(),
        "restart": Support(),
    },
    features={
        "config_file": Feature("a DeepSpeed configuration", by_setting("deepspeed_config")),
        "pipeline_module": Feature(
            "a model that is cut by DeepSpeed's PipelineModule", lambda wanted: "a PipelineModule" * (wanted.stages > 0)
        ),
    },
    claims=_claims,
    shards="grad_op",
    offloads=("optimizer", "grad_op", "full"),
    owns_state=True,
    divides="distributed.engines.deepspeed.pipeline.plan:stages_of",
    adopts="distributed.engines.deepspeed.config_adoption:adopt",
    plans="distributed.engines.deepspeed.plan:plan_engine",
    launcher=LauncherTraits(
        "deepspeed", announces=_announces, reads_env="distributed.engines.deepspeed.launcher_env:read_env"
    ),
)
