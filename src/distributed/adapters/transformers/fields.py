"""The fields of TrainingArguments: which are settings here, which have no effect by design, which are refused."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from distributed.core.errors import ConfigError, Problem
from distributed.core.run_dir import RunDir

MAPPED = frozenset(
    {
        *("output_dir", "per_device_train_batch_size", "num_train_epochs", "max_steps", "learning_rate"),
        *("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "optim", "optim_args", "optim_target_modules"),
        *("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "gradient_accumulation_steps"),
        *("max_grad_norm", "label_smoothing_factor", "bf16", "fp16", "tf32", "gradient_checkpointing"),
        *("gradient_checkpointing_kwargs", "torch_compile", "torch_compile_mode", "use_cache"),
        *("logging_strategy", "logging_steps", "disable_tqdm", "report_to", "run_name", "eval_strategy"),
        "eval_steps",
        *("per_device_eval_batch_size", "prediction_loss_only", "save_strategy", "save_steps", "save_total_limit"),
        *("load_best_model_at_end", "metric_for_best_model", "greater_is_better", "seed", "data_seed", "use_cpu"),
        *("dataloader_drop_last", "dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor"),
        *("dataloader_persistent_workers", "dataloader_multiprocessing_context", "remove_unused_columns"),
        *("label_names", "train_sampling_strategy", "ddp_find_unused_parameters", "ddp_bucket_cap_mb"),
        *("ddp_static_graph", "ddp_timeout", "resume_from_checkpoint"),
    }
)
IDLE = {  # by name: why it has no effect here
    "do_train": "scripts read it themselves",
    "do_eval": "scripts read it themselves",
    "do_predict": "scripts read it themselves",
    "local_rank": "the launcher says it",
    "log_level": "a run writes to its own console and files",
    "log_level_replica": "a run writes to its own console and files",
    "log_on_each_node": "rank 0 reports",
    "logging_nan_inf_filter": "on_nan says what a loss that is not finite does; by default the run stops",
    "eval_accumulation_steps": "predictions go to the host after each batch",
    "eval_use_gather_object": "predictions of any kind are gathered",
    "save_on_each_node": "all nodes write one checkpoint",
    "skip_memory_metrics": "memory is reported by the run where it runs out",
    "length_column_name": "of a train_sampling_strategy that is refused",
    "liger_kernel_config": "of use_liger_kernel, which is refused",
    "torch_compile_backend": "of torch_compile: 'inductor', or it is refused",
    "project": "of trackio, which report_to refuses",
    "trackio_space_id": "of trackio, which report_to refuses",
    "trackio_bucket_id": "of trackio, which report_to refuses",
    "trackio_static_space_id": "of trackio, which report_to refuses",
    "hub_token": "of push_to_hub, which is refused",
    "hub_private_repo": "of push_to_hub, which is refused",
    "hub_model_id": "of push_to_hub, which is refused",
    "hub_strategy": "of push_to_hub, which is refused",
    "hub_always_push": "of push_to_hub, which is refused",
    "hub_revision": "of push_to_hub, which is refused",
}
REFUSED = {  # by name: what to do where it is set
    "average_tokens_across_devices": "leave it out: the loss is always a mean over the tokens of all ranks",
    "bf16_full_eval": "bf16=True, which evaluates under autocast",
    "fp16_full_eval": "fp16=True, which evaluates under autocast",
    "use_liger_kernel": "apply the kernels to the model before",
    "neftune_noise_alpha": "add the noise in the model's embedding",
    "torch_empty_cache_steps": "leave it out",
    "auto_find_batch_size": "distributed config plan shows what memory a step takes; set the batch size",
    "logging_first_step": "logging_steps=1",
    "include_num_input_tokens_seen": "a distributed.Callback",
    "eval_delay": "leave it out",
    "eval_on_start": "trainer.evaluate() before trainer.train()",
    "eval_do_concat_batches": "leave it out",
    "include_for_metrics": "leave it out: compute_metrics gets predictions and labels",
    "batch_eval_metrics": "leave it out: compute_metrics is called once, with all predictions",
    "save_only_model": "trainer.save_model(folder) after the training",
    "enable_jit_checkpoint": "leave it out: SIGTERM saves in any case",
    "push_to_hub": "trainer.model.push_to_hub(…) after the training",
    "ignore_data_skip": "leave it out: a run resumes at its position in the data",
    "restore_callback_states_from_checkpoint": "leave it out: the state of a distributed.Callback is always restored",
    "full_determinism": "torch.use_deterministic_algorithms(True) in the script",
    "accelerator_config": "the settings of hf_trainer(…): docs/settings.md",
    "parallelism_config": "hf_trainer(…, tensor_parallel=…, context_parallel=…)",
    "dataloader_in_order": "leave it out: batches come in order",
    "ddp_broadcast_buffers": "leave it out: buffers that can differ are sent before each step",
    "ddp_backend": "hf_trainer(…, communication_backend='gloo')",
    "fsdp": "hf_trainer(…, sharding='full')",
    "fsdp_config": "hf_trainer(…, sharding='full', wrap_blocks=[…])",
    "deepspeed": "hf_trainer(…, backend='deepspeed', deepspeed_config=…)",
    "debug": "leave it out",
}
_TRACKERS = {"tensorboard": "tensorboard", "mlflow": "mlflow_tracking"}
_NEVER = 2**31 - 1  # steps


def settings_of(args: Any) -> dict[str, Any]:
    """The settings of a run with these arguments; every problem of them in one error."""
    problems = list(_problems(args))
    if problems:
        raise ConfigError(problems)
    found: dict[str, Any] = {
        "batch_size": args.per_device_train_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "epochs": max(1, math.ceil(args.num_train_epochs)),
        "seed": args.seed,
        "scheduler_interval": "step",
        "log_every_n_steps": int(args.logging_steps) if args.logging_strategy == "steps" else _NEVER,
        "progress": not args.disable_tqdm,
        "checkpoint_dir": str(RunDir(args.output_dir).checkpoints),
        "collective_timeout_s": float(args.ddp_timeout),
    }
    more = {
        "max_steps": args.max_steps if args.max_steps > 0 else None,
        "gradient_clipping": args.max_grad_norm or None,
        "mixed_precision": "bf16" if args.bf16 else "fp16" if args.fp16 else None,
        "tf32": args.tf32,
        "compile": (args.torch_compile_mode or True) if args.torch_compile else None,
        "device": "cpu" if args.use_cpu else None,
        "find_unused_parameters": args.ddp_find_unused_parameters,
        "static_graph": args.ddp_static_graph,
        "bucket_cap_mb": args.ddp_bucket_cap_mb,
        "mlflow_experiment": args.run_name if "mlflow" in args.report_to else None,
    }
    found |= {name: value for name, value in more.items() if value is not None}
    if args.eval_strategy == "steps":
        found["val_check_interval"] = f"{int(args.eval_steps)} steps"
    return found | {_TRACKERS[name]: True for name in args.report_to} | _checkpoints(args)


def best_metric(args: Any) -> str:
    """The metric by which the best model is known, in our words; "": none.

    >>> from types import SimpleNamespace
    >>> best_metric(SimpleNamespace(metric_for_best_model="eval_f1", greater_is_better=True))
    'max:val_f1'
    """
    if args.metric_for_best_model is None:
        return ""
    name = str(args.metric_for_best_model).removeprefix("eval_")
    return f"{'max' if args.greater_is_better else 'min'}:val_{name}"


def _checkpoints(args: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if args.save_strategy == "steps":
        found["checkpoint_frequency"] = f"{int(args.save_steps)} steps"
    elif args.save_strategy == "best" and args.eval_strategy == "steps":
        found["checkpoint_frequency"] = "1 validation"
    elif args.save_strategy in ("epoch", "best"):
        found["checkpoint_frequency"] = 1
    limit = args.save_total_limit or (1 if args.save_strategy == "best" else None)
    if limit:
        found["keep_last"] = limit
    if limit and (args.load_best_model_at_end or args.save_strategy == "best"):
        found["keep_best"] = best_metric(args)  # without a limit, all are kept
    return found


def _problems(args: Any) -> Iterator[Problem]:
    defaults = {field.name: _default(field) for field in dataclasses.fields(args)}
    unknown = defaults.keys() - MAPPED - IDLE.keys() - REFUSED.keys()
    for name in sorted(unknown):
        if getattr(args, name) not in (defaults[name], None, False):
            yield Problem(f"{name} of TrainingArguments", why="this release does not know the field", do="leave it out")
    for name, do in REFUSED.items():
        if name in defaults and _is_set(name, getattr(args, name), defaults[name]):
            yield Problem(f"{name}={getattr(args, name)!r}", why="a run has nothing that does the same", do=do)
    yield from _values(args)


def _values(args: Any) -> Iterator[Problem]:
    """Fields that are mapped, with values that are not."""
    for name in ("save", "logging", "eval"):
        name, strategy = f"{name}_steps", getattr(args, f"{name}_strategy")
        if strategy == "steps" and getattr(args, name) < 1:
            why = "a part of the run is not known in steps before it begins"
            yield Problem(f"{name}={getattr(args, name)}", why=why, do=f"{name}= a number of steps")
    for name in args.report_to:
        if name not in _TRACKERS:
            why = f"a run writes to {' and '.join(_TRACKERS)}"
            yield Problem(f"report_to={name!r}", why=why, do="report_to='tensorboard', or a distributed.Callback")
    if args.torch_compile_backend not in (None, "inductor"):
        why = "a run compiles with inductor"
        yield Problem(f"torch_compile_backend={args.torch_compile_backend!r}", why=why, do="leave it out")
    if args.train_sampling_strategy not in ("random", "sequential"):
        why = "its batches depend on the lengths of their samples and on the number of ranks"
        yield Problem(
            f"train_sampling_strategy={args.train_sampling_strategy!r}", why=why, do="'random' or 'sequential'"
        )
    if args.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy"):
        why = "it follows the metrics of evaluations between two steps"
        yield Problem(f"lr_scheduler_type={str(args.lr_scheduler_type.value)!r}", why=why, do="'linear', 'cosine' …")
    if "lomo" in str(args.optim.value) or "layerwise" in str(args.optim.value):
        why = "it steps each parameter within the backward pass"
        yield Problem(f"optim={str(args.optim.value)!r}", why=why, do="optim='adamw_torch'")
    is_best = args.load_best_model_at_end or args.save_strategy == "best"
    if is_best and args.eval_strategy == "no":
        why = "the best is known by a metric of an evaluation"
        yield Problem("load_best_model_at_end without evaluations", why=why, do="eval_strategy='epoch'")


def _default(field: dataclasses.Field[Any]) -> Any:
    made = field.default_factory
    return made() if made is not dataclasses.MISSING else field.default


def _is_set(name: str, value: Any, default: Any) -> bool:
    """Whether a field says something other than by default; some are completed when the arguments are made."""
    if name == "accelerator_config":
        return value is not None and value != type(value)()
    if name == "include_num_input_tokens_seen":
        return value != "no"
    return value != default and value not in (None, "", [], {}) and not (name == "fsdp_config" and not value)
