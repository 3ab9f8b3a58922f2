"""What has changed since a checkpoint: every setting and fact of the run that saved it, against those of this one.

Some changes do not affect what is computed. Some make another run, and are reported. Some would repeat samples or leave
them out, or train them with something else, and are refused unless the user says that he means them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from distributed.core.errors import Problem

Meta = Mapping[str, Any]  # of a manifest: "settings", "plan", "samples", "global_batch", "division", "device", "run"
LENGTH_BUCKETS = "length buckets"  # of "sampler": an order that depends on the size of a global batch
FACTS = ("shuffle", "sampler", "data", "loss", "optimizer", "scheduler")  # of "run"; older checkpoints do not have them


class Effect(Enum):
    BREAKS = "samples would be repeated, left out, or trained with something else"
    DIFFERS = "the run resumes, and is another one"
    KEPT = "the checkpoint's value is used"
    AROUND = "what it runs on: the last digits may differ"


# Of every setting, what a change of it does. Nothing: or what is compared as a fact of the run, or as an option of the
# optimizer's groups, shows it.
_HARMLESS = """
    num_gpus num_nodes gpus_per_node node_rank master_addr master_port device backend address tensorflow_strategy
    parameter_servers batch_size epochs max_steps learning_rate optimizer weight_decay momentum lr_scaling
    base_batch_size seed reproducible on_nan sharding zero_stage shard_groups wrap_blocks cpu_offload offload_optimizer
    offload_parameters offload_dir tensor_parallel tensor_parallel_plan sequence_parallel pipeline_parallel
    pipeline_schedule pipeline_microbatches context_parallel whole_model_on save_adapters_only compile_cache
    data_on_device expandable_segments keep_freed_memory cycle_time_ms timeline find_unused_parameters
    static_graph collective_timeout_s max_restarts min_nodes max_nodes min_gpus hang_timeout_s slow_rank
    slow_rank_wait_s warm_start requeue_exit_code iterable_split checkpoint_dir checkpoint_frequency checkpoint_async
    keep_last keep_every keep_best keep_best_k max_time csv certificate_steps sample_ledger sample_check check_replicas
    sanity_val_steps share_gpus resume_from_checkpoint resume_hyperparameters allow_change run_dir tensorboard
    tensorboard_dir mlflow_tracking mlflow_experiment mlflow_tracking_uri log_every_n_steps progress
    bucket_by_length detect_anomaly fast_dev_run limit_val_batches model_summary
"""
_DIFFERS = """
    virtual_ranks loss_weighting deepspeed_config lora bf16_parameters mixed_precision gradient_accumulation_steps
    gradient_clipping scaler_init_scale scaler_growth_interval sync_batchnorm compression compression_ratio
    compression_rank compression_min_size gradient_reduction drop_last
    lr_schedule warmup_steps warmup_epochs min_lr_ratio scheduler_interval scheduler_metric val_check_interval
    gradient_clip_value limit_train_batches overfit_batches
    synchronization sync_every_n_steps local_sgd_start outer_learning_rate outer_momentum max_staleness
"""
_AROUND = """
    activation_checkpointing capture compile num_workers fused_optimizer channels_last tf32 communication_backend
    bucket_cap_mb fusion_threshold_mb network_profile
"""
SETTINGS: Mapping[str, Effect | None] = {
    name: effect
    for effect, names in ((None, _HARMLESS), (Effect.DIFFERS, _DIFFERS), (Effect.AROUND, _AROUND))
    for name in names.split()
}
_LONGEST = 80  # characters of a value in a message
_REPEATS = "the order of samples would be another one, so some would be repeated and others left out"


@dataclass(frozen=True)
class Change:
    """One thing that is not as it was."""

    name: str  # as in allow_change, or of a setting
    before: Any
    now: Any
    effect: Effect
    problem: Problem | None = None  # in other words than those that follow from the above
    note: str = ""

    def __str__(self) -> str:
        text = f"{self.name} {_say(self.before)} → {_say(self.now)}"
        if self.effect is Effect.KEPT:
            return f"{text}, the checkpoint's is kept (resume_hyperparameters=config takes this run's)"
        return f"{text}, {self.note}" if self.note else text

    def refusal(self, path: str) -> Problem:
        found = self.problem or Problem(
            f"the checkpoint {path} has {self.name} {_say(self.before)}, this run {_say(self.now)}",
            why=_REPEATS,
            do=f"keep {self.name} as it was",
        )
        says_how = "allow_change" in found.do
        return Problem(
            found.what,
            found.why,
            found.do + ("" if says_how else f"; or, to resume nevertheless, allow_change={self.name}"),
        )


def changes(before: Meta, now: Meta, progress: Mapping[str, int], *, path: str) -> list[Change]:
    """In the order of the report. `progress`: where the checkpoint stands; `now`: what this run would save."""
    old, new = _facts(before), _facts(now)
    is_within = bool(progress["steps_in_epoch" if new["samples"] is None else "samples_in_epoch"])
    found = [
        *_of_data(old, new, progress, is_within, path),
        *_of_task(old, new, path),
        *_of_world(old, new),
        *_of_settings(before.get("settings", {}), now["settings"]),
    ]
    is_constant = all(facts.get("constant", True) for facts in (old, new))
    if not is_constant and _differ(old, new, "total_steps"):
        note = "over which the learning rate's schedule goes"
        found.append(Change("steps in all", old["total_steps"], new["total_steps"], Effect.DIFFERS, note=note))
    return found


def unknown(before: Meta) -> list[str]:
    """What a checkpoint does not say of the run that saved it."""
    return [name for name in FACTS if name not in before.get("run", {})]


def _facts(meta: Meta) -> dict[str, Any]:
    """What is known, by name."""
    plan, run = meta.get("plan", {}), meta.get("run", {})
    schedule, batch = plan.get("schedule", {}), plan.get("batch", {})
    found: dict[str, Any] = {name: plan[name] for name in ("seed", "iterable_split", "strategy") if name in plan}
    found |= {name: meta[name] for name in ("samples", "global_batch", "division", "device", "torch") if name in meta}
    found |= {"ranks": batch["ranks"], "leaves": batch.get("leaves", 0)} if "ranks" in batch else {}
    if schedule:
        moves = schedule["kind"] != "constant" or schedule["warmup_steps"] or schedule["warmup_epochs"]
        found["constant"] = not moves
    return found | dict(run)


def _differ(old: Mapping[str, Any], new: Mapping[str, Any], name: str) -> bool:
    """Unknown is not another."""
    return name in old and name in new and _plain(old[name]) != _plain(new[name])


def _of_data(
    old: Mapping[str, Any], new: Mapping[str, Any], progress: Mapping[str, int], is_within: bool, path: str
) -> Iterable[Change]:
    is_stream = new.get("samples") is None
    is_drawn = is_stream or new.get("shuffle") or new.get("sampler") or old.get("shuffle") or old.get("sampler")
    if _differ(old, new, "seed"):
        effect = Effect.BREAKS if is_within and is_drawn else Effect.DIFFERS
        yield Change("seed", old["seed"], new["seed"], effect)
    for name in ("shuffle", "sampler"):
        if _differ(old, new, name):
            yield Change(name, old[name], new[name], Effect.BREAKS if is_within else Effect.DIFFERS)
    if _differ(old, new, "samples"):
        yield Change("data", old["samples"], new["samples"], Effect.BREAKS, _other_count(old, new, path))
        return
    yield from _of_values(old.get("data", {}), new.get("data", {}), path)
    batch, position = new["global_batch"], progress["samples_in_epoch"]
    is_by_batch = is_stream or new.get("sampler") == LENGTH_BUCKETS
    is_over = position == new["samples"]  # of an epoch whose evaluation is still due, nothing is left to cut
    is_cut = bool(position % batch) and not is_over
    cuts_elsewhere = is_within and _differ(old, new, "global_batch") if is_by_batch else is_cut
    if cuts_elsewhere:
        problem = _other_batch(old.get("global_batch"), batch, progress, is_stream, path)
        yield Change("batch", old.get("global_batch"), batch, Effect.BREAKS, problem)
    elif _differ(old, new, "global_batch"):
        yield Change("batch", old["global_batch"], batch, Effect.DIFFERS)
    if is_stream and _differ(old, new, "iterable_split"):
        effect = Effect.BREAKS if is_within else Effect.DIFFERS
        yield Change("iterable_split", old["iterable_split"], new["iterable_split"], effect)
    elif is_stream and is_within and new.get("iterable_split") == "dataset" and _differ(old, new, "ranks"):
        yield Change("ranks", old["ranks"], new["ranks"], Effect.BREAKS)


def _of_values(old: Meta, new: Meta, path: str) -> Iterable[Change]:
    """Of as many samples: the parts of a dataset that both runs could fingerprint (`data/checks/fingerprint.py`)."""
    others = [name for name in old if name in new and old[name] != new[name]]
    if others:
        part = others[0]
        problem = Problem(
            f"the checkpoint {path} was trained on other data: {part} is {new[part]}, and was {old[part]}",
            why="the samples to come would be of other data than those before",
            do="pass the same dataset, and where it is drawn call torch.manual_seed(…) before; to train on with new "
            "data, load the weights and begin a new checkpoint_dir",
        )
        yield Change("data", f"{part} {old[part]}", new[part], Effect.BREAKS, problem)


def _other_count(old: Mapping[str, Any], new: Mapping[str, Any], path: str) -> Problem:
    return Problem(
        f"the checkpoint {path} has {_samples(old)} an epoch, this data has {new['samples'] or _samples(new)}",
        why=_REPEATS,
        do="pass the same dataset; to train on with new data, load the weights and begin a new checkpoint_dir",
    )


def _samples(facts: Mapping[str, Any]) -> str:
    return "a stream, and no number of samples" if facts["samples"] is None else f"{facts['samples']} samples"


def _other_batch(before: int | None, batch: int, progress: Mapping[str, int], is_stream: bool, path: str) -> Problem:
    place = f"{progress['samples_in_epoch']} samples"
    if is_stream:
        place = f"{progress['steps_in_epoch']} batches of {before}"
    return Problem(
        f"the checkpoint {path} stands {place} into an epoch, and batches are of {batch}",
        why="samples would be repeated or left out",
        do=f"keep batch_size × ranks × gradient_accumulation_steps as it was in the first run, {before}",
    )


def _of_task(old: Mapping[str, Any], new: Mapping[str, Any], path: str) -> Iterable[Change]:
    yield from _of_loss(old.get("loss"), new.get("loss"), path)
    yield from _of_callbacks(old.get("callbacks"), new.get("callbacks"))
    if _differ(old, new, "optimizer"):
        problem = Problem(
            f"the checkpoint {path} was trained with {old['optimizer']}, and this run has {new['optimizer']}",
            why="the state of one optimizer cannot be loaded into another",
            do=f"pass {old['optimizer']}",
        )
        yield Change("optimizer", old["optimizer"], new["optimizer"], Effect.BREAKS, problem)
    if _differ(old, new, "scheduler"):
        was, now = (str(facts["scheduler"] or "none") for facts in (old, new))
        problem = Problem(
            f"the checkpoint {path} was trained with the scheduler {was}, and this run has {now}",
            why="the state of one scheduler cannot be loaded into another",
            do="pass the scheduler that was trained with" if old["scheduler"] else "pass no scheduler",
        )
        yield Change("scheduler", was, now, Effect.BREAKS, problem)


def _of_loss(was: Meta | None, now: Meta | None, path: str) -> Iterable[Change]:
    """Another one is refused; one made with other values is reported. What it has changed is the checkpoint's."""
    if was is None or now is None:
        return
    if (was["name"], was["state"].get("")) != (now["name"], now["state"].get("")):
        problem = Problem(
            f"the checkpoint {path} was trained with {_loss(was)}, and this run has {_loss(now)}",
            why="the samples to come would be trained with another loss than those before",
            do="pass the loss that was trained with",
        )
        yield Change("loss", _loss(was), _loss(now), Effect.BREAKS, problem)
        return
    for name in sorted(was["options"].keys() | now["options"].keys()):
        if was["options"].get(name) != now["options"].get(name):
            yield Change(f"{name} of the loss", was["options"].get(name), now["options"].get(name), Effect.DIFFERS)
    for name in sorted(was["state"].keys() & now["state"].keys()):
        if was["state"][name] != now["state"][name]:
            yield Change(f"{name} of the loss", "other values", "those of this run", Effect.DIFFERS)


def _of_callbacks(was: Meta | None, now: Meta | None) -> Iterable[Change]:
    """Of those that say with what they were made."""
    if was is None or now is None:
        return
    for name in sorted(was.keys() | now.keys()):
        before, after = was.get(name) or {}, now.get(name) or {}
        if before != after:
            yield Change(f"the callback {name}", _made_with(before), _made_with(after), Effect.DIFFERS)


def _made_with(options: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items()) or "none"


def _of_world(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterable[Change]:
    is_bitwise = bool(old.get("leaves")) and bool(new.get("leaves"))
    if bool(old.get("leaves")) != bool(new.get("leaves")) and "leaves" in old:
        before, now = ("bitwise" if facts.get("leaves") else "off" for facts in (old, new))
        yield Change("reproducible", before, now, Effect.DIFFERS)
    if _differ(old, new, "division") and not is_bitwise:
        yield Change("mesh", _mesh(old["division"]), _mesh(new["division"]), Effect.DIFFERS)
    for name, label in (("strategy", "backend"), ("device", "device"), ("torch", "torch")):
        if _differ(old, new, name):
            yield Change(label, old[name], new[name], Effect.AROUND)


def _of_settings(old: Meta, new: Meta) -> Iterable[Change]:
    for name in new:
        effect = SETTINGS.get(name, Effect.DIFFERS)
        if effect is not None and _differ(old, new, name):
            yield Change(name, old[name], new[name], effect)


def _loss(loss: Meta) -> str:
    named = sorted(name for name in loss["state"] if name)
    name = f"the loss {loss['name']}" if loss["name"] else "no loss_fn"
    return f"{name} ({', '.join(named[:3])})" if named else name


def _mesh(division: Mapping[str, Any]) -> str:
    named = [f"{name}={size}" for name, size in division.items() if size not in (1, "none")]
    return " × ".join(named) or "one rank"


def _say(value: Any) -> str:
    if value is None or value == "":
        return "none"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _plain(value: Any) -> Any:
    """As JSON has it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, Sequence) and not isinstance(value, str) else value
