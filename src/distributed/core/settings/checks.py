"""What no single setting shows: settings that deny each other, or that nothing would read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distributed.core.errors import Problem
from distributed.core.values import parse_best, parse_frequency, parse_interval

if TYPE_CHECKING:
    from distributed.core.config import DistributedConfig


def contradictions(config: DistributedConfig) -> list[Problem]:
    """What no single value shows: settings that deny each other."""
    found: list[Problem] = []
    nodes, per_node, total = config.num_nodes, config.gpus_per_node, config.num_gpus
    if total is not None and per_node is not None and nodes * per_node != total:
        found.append(
            Problem(
                f"num_gpus={total}, but num_nodes={nodes} × gpus_per_node={per_node} is {nodes * per_node}",
                why="num_gpus counts the devices of all nodes",
                do=f"set num_gpus={nodes * per_node}, or leave it out",
            )
        )
    elif total is not None and per_node is None and total % nodes:
        fewer, more = total // nodes * nodes or nodes, (total // nodes + 1) * nodes
        found.append(
            Problem(
                f"num_gpus={total} cannot be split over num_nodes={nodes}",
                why="each node runs the same number of ranks",
                do=f"set num_gpus={' or '.join(str(n) for n in sorted({fewer, more}))}",
            )
        )
    if config.node_rank is not None and config.node_rank >= nodes:
        found.append(
            Problem(
                f"node_rank={config.node_rank}, but there are num_nodes={nodes}",
                why=f"nodes are numbered from 0 to {nodes - 1}",
                do=f"set node_rank={nodes - 1} on the last node",
            )
        )
    found += _node_contradictions(config)
    found += _best_contradictions(config)
    return [*found, *_denied_pairs(config), *_without_effect(config), *_anomaly_contradictions(config)]


def _denied_pairs(config: DistributedConfig) -> list[Problem]:
    """Two settings of which only one can be followed."""
    found: list[Problem] = []
    if config.warmup_steps and config.warmup_epochs:
        found.append(
            Problem(
                "both warmup_steps and warmup_epochs are set",
                why="both set the length of the warm-up",
                do="leave warmup_epochs out",
            )
        )
    if config.gradient_clipping and config.gradient_clip_value:
        found.append(
            Problem(
                f"both gradient_clipping={config.gradient_clipping:g} and "
                f"gradient_clip_value={config.gradient_clip_value:g} are set",
                why="one bounds the norm of the whole gradient, the other each of its numbers, and the result would "
                "depend on which is first",
                do="leave one of them out",
            )
        )
    for name in ("limit_train_batches", "limit_val_batches"):
        if config.overfit_batches is not None and getattr(config, name) is not None:
            why = "overfit_batches says which samples are trained on, and evaluates with the same"
            found.append(Problem(f"both overfit_batches and {name} are set", why=why, do=f"leave {name} out"))
    if config.overfit_batches is not None and config.bucket_by_length:
        why = "overfit_batches takes the samples in the dataset's order"
        found.append(Problem("both overfit_batches and bucket_by_length are set", why=why, do="leave one of them out"))
    return found


def _without_effect(config: DistributedConfig) -> list[Problem]:
    """Settings that need another one, which is not set."""
    found: list[Problem] = []
    for name, needs, useless, do in (
        ("scaler_init_scale", "mixed_precision", config.mixed_precision in (False, "bf16"), "mixed_precision='fp16'"),
        (
            "scaler_growth_interval",
            "mixed_precision",
            config.mixed_precision in (False, "bf16"),
            "mixed_precision='fp16'",
        ),
        ("base_batch_size", "lr_scaling", config.lr_scaling == "none", "lr_scaling='linear' or 'sqrt'"),
        ("momentum", "optimizer", config.optimizer not in ("sgd", "lars"), "optimizer='sgd' or 'lars'"),
        ("keep_best_k", "keep_best", config.keep_best is None and config.keep_best_k != 1, "keep_best='val_loss'"),
        ("min_lr_ratio", "lr_schedule", config.lr_schedule == "constant", "lr_schedule='cosine' or 'linear'"),
    ):
        # An engine's own configuration may still say what this one needs: the planner reads it, and looks again.
        is_open = config.deepspeed_config is not None and needs not in config.model_fields_set
        if useless and getattr(config, name) != type(config).model_fields[name].default and not is_open:
            found.append(Problem(f"{name} is set, but would have no effect", do=f"set {do}, or leave {name} out"))
    if config.allow_change is not None and config.resume_from_checkpoint is False:
        do = "set resume_from_checkpoint=true, or leave allow_change out"
        found.append(
            Problem("allow_change is set, but nothing is resumed", why="the setting would have no effect", do=do)
        )
    for name, is_set in (("keep_every", config.keep_every is not None), ("keep_best_k", config.keep_best_k != 1)):
        if is_set and config.keep_last is None:
            what = f"{name} is set without keep_last, and would have no effect"
            do = f"set keep_last=1, or leave {name} out"
            found.append(Problem(what, why="all checkpoints are kept without keep_last", do=do))
    bitwise, kind, meets = config.reproducible == "bitwise", config.compression, config.synchronization
    for name, useless, do in (
        ("slow_rank_wait_s", config.slow_rank != "replace", "slow_rank='replace'"),
        ("virtual_ranks", not bitwise, "reproducible='bitwise'"),
        ("sync_batchnorm", bitwise and config.sync_batchnorm, "reproducible='off'"),
        ("find_unused_parameters", bitwise and config.find_unused_parameters, "reproducible='off'"),
        ("static_graph", bitwise and config.static_graph, "reproducible='off'"),
        ("bucket_cap_mb", bitwise, "reproducible='off'"),
        ("compression_ratio", kind not in ("topk", "randomk"), "compression='topk'"),
        ("compression_rank", kind != "powersgd", "compression='powersgd'"),
        ("compression_min_size", kind in ("none", "fp16", "bf16"), "compression='topk'"),
        ("sync_every_n_steps", meets in ("every_step", "asynchronous"), "synchronization='local_sgd'"),
        ("local_sgd_start", meets != "post_local_sgd", "synchronization='post_local_sgd'"),
        ("outer_learning_rate", meets != "diloco", "synchronization='diloco'"),
        ("outer_momentum", meets != "diloco", "synchronization='diloco'"),
        ("max_staleness", meets != "asynchronous", "synchronization='asynchronous'"),
    ):
        if useless and name in config.model_fields_set:
            found.append(Problem(f"{name} is set, but would have no effect", do=f"set {do}, or leave {name} out"))
    return found


def _best_contradictions(config: DistributedConfig) -> list[Problem]:
    """The best checkpoint needs checkpoints that have its metric."""
    if not config.keep_best:
        return []
    every, unit = parse_frequency(config.checkpoint_frequency or 1)
    interval, of = parse_interval(config.val_check_interval or 1.0)
    if not parse_best(config.keep_best)[1].startswith("val_"):
        has_metric, when, do = unit == "epochs", "at the end of an epoch", "a number of epochs"
    else:
        is_multiple = unit == of and (interval <= 1 or every % interval == 0) and unit != "minutes"
        has_metric, do = unit == "validations" or is_multiple, "'1 validation'"
        when = f"where it is validated, after every {interval:g} {of if interval != 1 else of[:-1]}"
    if has_metric:
        return []
    return [
        Problem(
            f"keep_best={config.keep_best!r}, but checkpoint_frequency={config.checkpoint_frequency or 1!r}",
            why=f"that metric is known {when}, and most of these checkpoints would have none",
            do=f"set checkpoint_frequency to {do}, or leave keep_best out",
        )
    ]


def _anomaly_contradictions(config: DistributedConfig) -> list[Problem]:
    """What looks at each operation of a step needs steps that run operation by operation, and ends at the first NaN."""
    against = {
        "on_nan='continue'": (config.on_nan == "continue", "detect_anomaly ends the run where it finds something"),
        "capture=True": (config.capture is True, "a captured step repeats kernels without the operations around them"),
        f"compile={config.compile!r}": (
            config.compile not in (False, "auto"),
            "compiled code fuses operations, and none of them could be named",
        ),
    }
    return [
        Problem(f"detect_anomaly with {other}", why=why, do="leave one of them out")
        for other, (is_asked, why) in against.items()
        if config.detect_anomaly and is_asked
    ]


def _node_contradictions(config: DistributedConfig) -> list[Problem]:
    least, nodes, most = config.min_nodes, config.num_nodes, config.max_nodes
    found = []
    if least is not None and least > nodes:
        found.append(Problem(f"min_nodes={least}, but num_nodes={nodes}", do=f"set min_nodes to 1..{nodes}"))
    if most is not None and most < nodes:
        found.append(Problem(f"max_nodes={most}, but num_nodes={nodes}", do=f"set max_nodes to {nodes} or more"))
    if config.min_gpus and config.gpus_per_node and config.min_gpus > config.gpus_per_node:
        do = f"set min_gpus to 1..{config.gpus_per_node}"
        found.append(Problem(f"min_gpus={config.min_gpus}, but gpus_per_node={config.gpus_per_node}", do=do))
    return found
