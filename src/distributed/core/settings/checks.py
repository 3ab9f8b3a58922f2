"""What no single setting shows: settings that deny each other, or that nothing would read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distributed.core.errors import Problem
from distributed.core.values import parse_frequency

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
    if config.keep_best and config.checkpoint_frequency and parse_frequency(config.checkpoint_frequency)[1] != "epochs":
        found.append(
            Problem(
                f"keep_best={config.keep_best!r}, but checkpoint_frequency={config.checkpoint_frequency!r}",
                why="metrics are known at the end of an epoch, and most of these checkpoints would have none",
                do="set checkpoint_frequency to a number of epochs, or leave keep_best out",
            )
        )
    if config.warmup_steps and config.warmup_epochs:
        found.append(
            Problem(
                "both warmup_steps and warmup_epochs are set",
                why="both set the length of the warm-up",
                do="leave warmup_epochs out",
            )
        )
    for name, needs, useless, do in (
        ("scaler_init_scale", "mixed_precision", config.mixed_precision in (False, "bf16"), "mixed_precision='fp16'"),
        (
            "scaler_growth_interval",
            "mixed_precision",
            config.mixed_precision in (False, "bf16"),
            "mixed_precision='fp16'",
        ),
        ("base_batch_size", "lr_scaling", config.lr_scaling == "none", "lr_scaling='linear' or 'sqrt'"),
        ("momentum", "optimizer", config.optimizer != "sgd", "optimizer='sgd'"),
        ("min_lr_ratio", "lr_schedule", config.lr_schedule == "constant", "lr_schedule='cosine' or 'linear'"),
    ):
        # An engine's own configuration may still say what this one needs: the planner reads it, and looks again.
        is_open = config.deepspeed_config is not None and needs not in config.model_fields_set
        if useless and getattr(config, name) and not is_open:
            found.append(Problem(f"{name} is set, but would have no effect", do=f"set {do}, or leave {name} out"))
    if config.allow_change is not None and config.resume_from_checkpoint is False:
        do = "set resume_from_checkpoint=true, or leave allow_change out"
        found.append(
            Problem("allow_change is set, but nothing is resumed", why="the setting would have no effect", do=do)
        )
    bitwise = config.reproducible == "bitwise"
    for name, useless, do in (
        ("virtual_ranks", not bitwise, "reproducible='bitwise'"),
        ("sync_batchnorm", bitwise and config.sync_batchnorm, "reproducible='off'"),
        ("find_unused_parameters", bitwise and config.find_unused_parameters, "reproducible='off'"),
        ("static_graph", bitwise and config.static_graph, "reproducible='off'"),
        ("bucket_cap_mb", bitwise, "reproducible='off'"),
    ):
        if useless and name in config.model_fields_set:
            found.append(Problem(f"{name} is set, but would have no effect", do=f"set {do}, or leave {name} out"))
    return found


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
