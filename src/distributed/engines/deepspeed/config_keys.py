"""What may stand in a DeepSpeed configuration here: reading one, its known keys, and those that cannot work and why.

DeepSpeed ignores what it does not know at the top, and some of what it knows would steer what is ours.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from distributed.core.errors import Problem
from distributed.core.registry import nearest_hint

Content = dict[str, Any]
AUTO = "auto"  # "what the settings here say"

_BATCH_KEYS = {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}
_PASSTHROUGH = {  # to DeepSpeed, as they stand
    "activation_checkpointing",
    "aio",
    "comms_logger",
    "data_types",
    "disable_python_gc",
    "dump_state",
    "flops_profiler",
    "log_level",
    "memory_breakdown",
    "steps_per_print",
    "timers",
    "vocabulary_size",
    "wall_clock_breakdown",
}
_OURS = _BATCH_KEYS | {
    "bf16",
    "bfloat16",
    "communication_data_type",
    "fp16",
    "gradient_clipping",
    "optimizer",
    "scheduler",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "zero_optimization",
}

_OBSERVED = ("the run's own events are what is shown", "set tensorboard=true or mlflow_tracking=true")
_DATA = ("the order of the samples is this library's, so that a run resumes exactly", "leave it out")
_CHECKPOINTS = ("checkpoints are written in this library's own format", "set checkpoint_dir and checkpoint_frequency")
_GRADIENTS = (
    "gradients are averaged over the samples of the whole batch, for any number of ranks",
    "leave it out",
)
_GONE = ("DeepSpeed itself has removed it", "leave it out")
REFUSED: dict[str, tuple[str, str]] = {  # key: (why, what to do)
    "amp": ("Apex is no longer part of DeepSpeed", "set mixed_precision='bf16' or 'fp16'"),
    "autotuning": ("it starts processes of its own", "leave it out"),
    "comet": _OBSERVED,
    "csv_monitor": _OBSERVED,
    "tensorboard": _OBSERVED,
    "wandb": _OBSERVED,
    "checkpoint": _CHECKPOINTS,
    "datastates_ckpt": _CHECKPOINTS,
    "nebula": _CHECKPOINTS,
    "compile": ("it is not tried with this library's steps", "set backend='fsdp', compile=true"),
    "compression_training": _GONE,
    "curriculum_learning": _DATA,
    "data_efficiency": _DATA,
    "dataloader_drop_last": ("the batches are this library's", "set drop_last=true"),
    "disable_allgather": ("the parameters would no longer be those of the optimizer", "leave it out"),
    "eigenvalue": _GONE,
    "elasticity": ("the number of ranks is the launcher's", "set min_nodes, max_nodes and min_gpus"),
    "expert_parallel": ("ranks share data only", "leave it out"),
    "graph_harvesting": _GONE,
    "gradient_allreduce_op": _GRADIENTS,
    "gradient_predivide_factor": _GRADIENTS,
    "prescale_gradients": _GRADIENTS,
    "hybrid_engine": ("it is for generating while training", "leave it out"),
    "managed_gradient_accumulation": ("the steps are this library's", "set gradient_accumulation_steps"),
    "pipeline": ("it needs a PipelineModule", "set backend='fsdp', pipeline_parallel=2"),
    "progressive_layer_drop": _GONE,
    "quantize_training": _GONE,
    "seq_parallel_communication_data_type": ("ranks share data only", "leave it out"),
    "sequence_parallel_size": ("ranks are data-parallel only", "set backend='fsdp', context_parallel=2"),
    "sparse_attention": _GONE,
    "sparse_gradients": _GONE,
    "tensor_parallel": ("ranks are data-parallel only", "set backend='fsdp', tensor_parallel=2"),
    "torch_autocast": ("precision is set in one place", "set mixed_precision='bf16' or 'fp16'"),
    "use_data_before_expert_parallelism": ("ranks share data only", "leave it out"),
    "weight_quantization": ("it is for inference", "leave it out"),
}
_NEUTRAL = {  # values that say what is so anyway
    "compute_grad_norm": True,
    "ratio": 1.0,
    "gradient_allreduce_op": "mean",
    "gradient_predivide_factor": 1.0,
    "sequence_parallel_size": 1,
}

_STAGE3 = (
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
    "gather_16bit_weights_on_model_save",
    "gather_fp16_weights_on_model_save",
    "module_granularity_threshold",
    "use_all_reduce_for_fetch_params",
    "allgather_sequential",
)
_ZERO = {
    "stage",
    "offload_param",
    "offload_optimizer",
    "cpu_offload",
    "cpu_offload_param",
    "cpu_offload_use_pin_memory",
    "contiguous_gradients",
    "reduce_scatter",
    "reduce_bucket_size",
    "use_multi_rank_bucket_allreduce",
    "allgather_partitions",
    "allgather_bucket_size",
    "overlap_comm",
    "load_from_fp32_weights",
    "sub_group_size",
    "ignore_unused_parameters",
    "round_robin_gradients",
    "parameter_alignment",
    "zero_hpz_partition_size",
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients",
    "memory_efficient_linear",
    "override_module_apply",
    "log_trace_cache_warnings",
    "enable_sanity_checks",
    "leaf_module",
    *_STAGE3,
    *(f"stage3_{name}" for name in _STAGE3),
}
ZERO_PLUS_PLUS = {
    "zero_hpz_partition_size": 1,
    "zero_quantized_weights": False,
    "zero_quantized_nontrainable_weights": False,
    "zero_quantized_gradients": False,
}
_ZERO_REFUSED: dict[str, tuple[str, str]] = {
    "compute_grad_norm": ("the norm is part of what a step reports", "leave it out"),
    "elastic_checkpoint": _CHECKPOINTS,
    "legacy_stage1": _GONE,
    "mics_hierarchical_params_gather": _GONE,
    "mics_shard_size": _GONE,
    "pipeline_loading_checkpoint": _CHECKPOINTS,
    "save_muon_momentum_buffer_in_memory": ("it is for DeepSpeed's Muon", "pass the optimizer to the Trainer"),
    "zenflow": ("it takes optimizer steps outside of the run's", "leave it out"),
    "zeropp_loco_param": _GONE,
}
_OFFLOAD = {"device", "nvme_path", "buffer_count", "pin_memory"}
_SECTIONS: dict[str, set[str]] = {
    "zero_optimization": _ZERO,
    "zero_optimization.offload_param": _OFFLOAD | {"buffer_size", "max_in_cpu"},
    "zero_optimization.offload_optimizer": _OFFLOAD | {"pipeline_read", "pipeline_write", "fast_init"},
    "bf16": {"enabled", "immediate_grad_update", "check_grad_overflow"},
    "fp16": {
        "enabled",
        "auto_cast",
        "loss_scale",
        "initial_scale_power",
        "loss_scale_window",
        "hysteresis",
        "consecutive_hysteresis",
        "min_loss_scale",
    },
    "optimizer": {"type", "params", "legacy_fusion"},
    "optimizer.params": set(),  # all that this optimizer takes
    "scheduler": {"type", "params"},
    "scheduler.params": set(),
}
_SECTIONS["bfloat16"] = _SECTIONS["bf16"]
_TWO_PLACES = ("the optimizer's state would be in two places", "leave it out")
_MASTER = ("checkpoints hold the master in fp32", "leave it out")
_SECTION_REFUSED: dict[str, dict[str, tuple[str, str]]] = {
    "zero_optimization": _ZERO_REFUSED,
    "zero_optimization.offload_optimizer": dict.fromkeys(("ratio", "super_offload", "cpuadam_cores_perc"), _TWO_PLACES),
    "bf16": dict.fromkeys(("bf16_master_weights_and_grads", "bf16_optimizer_states"), _MASTER),
    "fp16": {"fp16_master_weights_and_grads": _MASTER},
}


class _DuplicateKeyError(ValueError):
    pass


def name_of(given: str | Mapping[str, Any]) -> str:
    """How errors and sources call it."""
    return os.path.basename(given) if isinstance(given, str) else "deepspeed_config"


def read_content(given: str | Mapping[str, Any], problems: list[Problem]) -> Content | None:
    """The configuration's content, from a JSON file or as it was passed; None: it cannot be read, and why is noted."""
    do = "give deepspeed_config a JSON file or a dict"
    try:
        content = _read_file(given) if isinstance(given, str) else json.loads(json.dumps(given))
    except OSError as error:
        why = error.strerror or str(error)
        problems.append(Problem(f"the DeepSpeed configuration {given} cannot be read", why=why, do=do))
        return None
    except _DuplicateKeyError as error:
        problems.append(
            Problem(f"{given}: {error}", why="only one of the two values could be used", do="keep one of them")
        )
        return None
    except json.JSONDecodeError as error:
        why = f"line {error.lineno}, column {error.colno}: {error.msg}"
        problems.append(Problem(f"{given} is not valid JSON", why=why, do="correct that line"))
        return None
    except (TypeError, ValueError, RecursionError) as error:
        problems.append(Problem(f"{name_of(given)} is not what JSON can hold", why=str(error), do=do))
        return None
    if not isinstance(content, dict):
        why = f"{name_of(given)} holds a {type(content).__name__}, not an object of JSON"
        problems.append(Problem(f"{given} is no DeepSpeed configuration", why=why, do='write {"bf16": …} or so'))
        return None
    return _without_wrong_sections(_modern(content), name_of(given), problems)


def _read_file(path: str) -> Any:
    with open(path, encoding="utf-8") as stream:
        return json.load(stream, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> Content:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise _DuplicateKeyError(f"{', '.join(twice)} is set twice")
    return found


def _modern(content: Content) -> Content:
    """The same with old spellings in the words of today."""
    zero = content.get("zero_optimization")
    if isinstance(zero, bool):
        zero = {"stage": int(zero)}
    if isinstance(zero, dict):
        zero = dict(zero)
        for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
            if zero.pop(old, None) is True:
                zero.setdefault(new, {"device": "cpu"})
        content = content | {"zero_optimization": zero}
    if "bfloat16" in content and "bf16" not in content:
        content = {("bf16" if key == "bfloat16" else key): value for key, value in content.items()}
    return content


def _without_wrong_sections(content: Content, source: str, problems: list[Problem]) -> Content:
    """Sections that are no objects are noted and left out, so that what reads them need not look."""
    kept = dict(content)
    for path in _SECTIONS:
        outer, _, inner = path.partition(".")
        holder = kept if not inner else kept.get(outer)
        key = inner or outer
        if not isinstance(holder, dict) or key not in holder or isinstance(holder[key], dict):
            continue
        if holder[key] is not None:
            what = f"{source}: {path}={json.dumps(holder[key])}"
            problems.append(
                Problem(what, why=f"the value of {key!r} is an object of settings", do=f'write "{key}": {{…}}')
            )
        rest = {name: value for name, value in holder.items() if name != key}
        kept = rest if not inner else kept | {outer: rest}
    return kept


def section(content: Content, path: str) -> Content:
    """A part of the content by its path, empty where it is not there."""
    found: Any = content
    for key in path.split("."):
        found = found.get(key, {})
    return dict(found)


def check_keys(content: Content, source: str) -> Iterator[Problem]:
    """Everything in it that cannot work here, or that nothing would read."""
    for key, value in content.items():
        if key in REFUSED:
            if not _is_off(key, value):
                why, do = REFUSED[key]
                yield Problem(f"{source}: {key} cannot be used here", why=why, do=do)
        elif key not in _OURS and key not in _PASSTHROUGH:
            yield _unknown(source, key, {*_OURS, *_PASSTHROUGH})
    if content.get("zero_force_ds_cpu_optimizer"):
        why = "the key refuses every optimizer but DeepSpeed's own when state is in host memory"
        yield Problem(f"{source}: zero_force_ds_cpu_optimizer=true", why=why, do="leave it out")
    for path, known in _SECTIONS.items():
        refused = _SECTION_REFUSED.get(path, {})
        for key, value in section(content, path).items():
            if key in refused:
                if not _is_off(key, value):
                    why, do = refused[key]
                    yield Problem(f"{source}: {path}.{key} cannot be used here", why=why, do=do)
            elif known and key not in known:
                yield _unknown(source, key, known, path + ".")


def _unknown(source: str, key: str, known: set[str], path: str = "") -> Problem:
    return Problem(f"{source}: DeepSpeed has no {path}{key}", do=nearest_hint(key, known))


def _is_off(key: str, value: Any) -> bool:
    if isinstance(value, dict):
        return not value or value.get("enabled") is False
    return value is None or value == _NEUTRAL.get(key, False)


def zero_passthrough(content: Content) -> Content:
    """Of the section zero_optimization, what DeepSpeed reads as it stands; "auto" there is its own default."""
    ours = ("stage", "offload_param", "offload_optimizer")
    zero = _without_autos(section(content, "zero_optimization"))
    return {key: value for key, value in zero.items() if key in _ZERO and key not in ours}


def _without_autos(content: Content) -> Content:
    kept = {key: _without_autos(value) if isinstance(value, dict) else value for key, value in content.items()}
    return {key: value for key, value in kept.items() if value != AUTO}


def passthrough(content: Content) -> Content:
    """What DeepSpeed reads as it stands."""
    return {key: value for key, value in content.items() if key in _PASSTHROUGH and value != AUTO}


def find_autos(content: Any, path: str = "") -> Iterator[str]:
    """The paths of everything that is left to the settings here."""
    is_list = isinstance(content, list)
    for key, value in enumerate(content) if is_list else content.items():
        where = f"{path}[{key}]" if is_list else f"{path}.{key}".removeprefix(".")
        if value == AUTO:
            yield where
        elif isinstance(value, (dict, list)):
            yield from find_autos(value, where)
