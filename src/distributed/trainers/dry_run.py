"""A dry run: one step as rank 0 of a world of any size, in one process, without devices and without memory.

The planner, the strategy and torch's sharding do what they would do. Only the collectives do nothing and the tensors
hold nothing: torch's fake process group and fake tensors. The model is cut on the meta device, and becomes fake for the
step: torch cuts each parameter into as many tensors as there are ranks, and fake ones take a hundred times as long.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from distributed.core.config import DistributedConfig
from distributed.core.engines.engine import ENGINES, load_strategy
from distributed.core.env import DRY_RUN, WorkerEnv
from distributed.core.errors import DataError, PlanError
from distributed.core.plan import Plan
from distributed.data.loading.loader import Step, TrainLoader
from distributed.data.loading.stream_loader import StreamLoader
from distributed.data.source import Source
from distributed.planner.hardware import Gpu, Hardware, probe_hardware
from distributed.planner.planning import make_plan
from distributed.runtime.session import Session
from distributed.runtime.torch_compat import FakeTensorMode, fake_store, mark_as_parameter, tree_map_only
from distributed.runtime.torch_module_compat import find_flat_weights, forget_flat_weights
from distributed.strategies.base import Strategy
from distributed.strategies.checks.elementwise import needs_closure
from distributed.strategies.model.lora import add_lora
from distributed.strategies.placement import local
from distributed.trainers.fitting import FitRequest

_CPU = torch.device("cpu")
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


@dataclass(frozen=True)
class Footprint:
    """Bytes of a model's state; None: not known."""

    parameters: int
    gradients: int
    optimizer: int | None


@dataclass(frozen=True)
class DryRun:
    """What a dry run found."""

    plan: Plan
    here: Footprint  # on rank 0
    whole: Footprint
    build_s: float
    step_s: float
    left_out: tuple[str, ...] = ()

    def __str__(self) -> str:
        plan = self.plan
        ranks = f"{plan.world_size:,} rank{'s' * (plan.world_size > 1)}"
        nodes = f" on {plan.num_nodes:,} nodes" if plan.num_nodes > 1 else ""
        lines = [f"dry run as rank 0 of {ranks}{nodes}", *map(str, plan.decisions)]
        if not any(line.startswith("mesh ") for line in lines):
            lines.insert(1, f"mesh {plan.mesh}")
        lines.append(f"{'':16}{'this rank':>12}{'whole model':>14}")
        for name, here, whole in (
            ("parameters", self.here.parameters, self.whole.parameters),
            ("gradients", self.here.gradients, self.whole.gradients),
            ("optimizer state", self.here.optimizer, self.whole.optimizer),
        ):
            lines.append(f"{name:16}{_size(here):>12}{_size(whole):>14}")
        lines += [f"left out: {what}" for what in self.left_out]
        step = f", one step in {self.step_s:.1f} s" if plan.mesh.pp == 1 else ""
        return "\n".join([*lines, f"built in {self.build_s:.1f} s{step}"])


def dry_run(request: FitRequest, ranks: int) -> DryRun:
    """Plan, shard and take one step as rank 0 of that many ranks. Writes nothing; the model is unusable afterwards."""
    config = request.config.merged({"num_gpus": ranks}, DRY_RUN)
    plan, left_out = _plan(request, config, ranks)
    model, step = request.task.model, _first_step(request.train, plan)
    _replace_tensors(model.parameters(), model.buffers(), torch.device("meta"), model)
    whole, trained = _whole(model, plan)
    begun = time.monotonic()
    with _fake_world(ranks):
        strategy: Strategy = load_strategy(plan.strategy)(plan)
        session = Session(_place(plan), _CPU, None, is_dry=True)
        session.take_place(plan.mesh)
        strategy.setup(request.task, session)
        if request.task.is_manual or needs_closure(strategy.optimizer):
            raise PlanError(
                "a dry run of a manual step" if request.task.is_manual else "a dry run of an optimizer with a closure",
                why="what it does next depends on numbers, and the tensors of a dry run have none",
                do="dry-run the model with training_step or optimizer left out",
            )
        built = time.monotonic()
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            parameters = [p for name, p in model.named_parameters() if _is_here(strategy, name, p)]
            buffers = [b for name, b in model.named_buffers() if _is_here(strategy, name, b)]
            _replace_tensors(parameters, buffers, _CPU, model)
            gradients, steps = _do_step(strategy, plan, step, mode, left_out)
        ended = time.monotonic()
    state, per_element = _state_bytes(strategy.optimizer) if steps else (None, None)
    whole_state = None if per_element is None else round(per_element * trained)
    return DryRun(
        plan,
        Footprint(_bytes(parameters), gradients, state),
        replace(whole, optimizer=whole_state),
        built - begun,
        ended - built,
        tuple(left_out),
    )


def _whole(model: nn.Module, plan: Plan) -> tuple[Footprint, int]:
    """Of the model before it is cut, and how many of its elements are trained."""
    if plan.memory.lora is not None:
        model = copy.deepcopy(model)
        add_lora(model, plan.memory.lora, plan.seed)
    trained = [p for p in model.parameters() if p.requires_grad]
    return Footprint(_bytes(model.parameters()), _bytes(trained), None), sum(p.numel() for p in trained)


def _plan(request: FitRequest, config: DistributedConfig, ranks: int) -> tuple[Plan, list[str]]:
    """The plan as a cluster of such machines would have it, and what of it a dry run does not do."""
    nodes = config.num_nodes
    world = WorkerEnv(world_size=ranks, local_world_size=ranks // nodes, num_nodes=nodes)
    config = config.merged({"network_profile": "none"}, "--dry-run")  # which is for the network of those nodes
    plan = make_plan(config, request.profile, _pretended(config, ranks // nodes), run_dir="", world=world)
    if "dry_run" not in ENGINES.entries[plan.strategy].can:
        able = [repr(name) for name, engine in ENGINES.entries.items() if "dry_run" in engine.can]
        raise PlanError(
            f"a dry run with backend={plan.strategy!r}",
            why=f"{plan.strategy} decides how to train while it runs, and a dry run starts no rank",
            do=f"set backend={' or '.join(able)}",
        )
    if plan.is_bitwise:
        raise PlanError(
            "a dry run of reproducible='bitwise'",
            why="bitwise sums look at the numbers themselves, and the tensors of a dry run have none",
            do="leave reproducible out: every rank holds the whole model under it",
        )
    left_out = []
    if plan.memory.compile:
        plan = plan.without_compile()
        left_out.append("compile: blocks run as they are")
    if plan.precision.kind == "fp16":
        left_out.append("the gradient scaler, which looks at gradients")
    if plan.mesh.cp > 1 or plan.mesh.tp > 1:
        left_out.append("the check that parts give what the whole does, which compares values")
    if plan.mesh.dp_replicate > 1 and not plan.shard.is_fsdp and plan.mesh.pp == 1:
        left_out.append("the reduction over replicas, which needs no memory of its own")
    return plan, left_out


def _pretended(config: DistributedConfig, per_node: int) -> Hardware:
    """A node with as many GPUs as it has ranks: of this machine's kind, else of one that has bf16.

    How much memory they have is not known, and what is to be found out.
    """
    found = probe_hardware()
    gpu = replace(found.gpus[0], memory_bytes=0) if found.gpus else Gpu("GPU", compute_capability=8.0)
    return found if config.device == "cpu" else replace(found, gpus=(gpu,) * per_node)


def _place(plan: Plan) -> WorkerEnv:
    return WorkerEnv(world_size=plan.world_size, local_world_size=plan.ranks_per_node, num_nodes=plan.num_nodes)


def _first_step(source: Source, plan: Plan) -> Step:
    """Rank 0's share of the first global batch, read in this process."""
    loader: TrainLoader | StreamLoader
    source = replace(source, num_workers=0)
    if source.is_stream:
        how: dict[str, Any] = {"split": plan.iterable_split, "agree": lambda samples, micros: (samples, micros)}
        loader = StreamLoader(source, plan.batch, 0, seed=plan.seed, **how)
    else:
        loader = TrainLoader(source, plan.batch, 0, seed=plan.seed)
    first = next(loader.epoch(0), None)
    if first is None:
        raise DataError("the training data is empty", do="check the dataset that you pass")
    return first


@contextmanager
def _fake_world(ranks: int) -> Iterator[None]:
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _do_step(strategy: Strategy, plan: Plan, step: Step, mode: FakeTensorMode, left_out: list[str]) -> tuple[int, bool]:
    """One training step: the bytes of the gradients that the optimizer was given, and whether it made a step."""
    found: list[int] = []
    trained = [p for group in strategy.optimizer.param_groups for p in group["params"] if p.requires_grad]

    def look(*_: Any) -> None:
        found.append(_bytes(p.grad for p in trained if p.grad is not None))

    strategy.optimizer.register_step_pre_hook(look)
    if plan.mesh.pp == 1:
        strategy.train(True)
        strategy.train_step(
            [m._replace(batch=tree_map_only(torch.Tensor, mode.from_tensor, m.batch)) for m in step.microbatches]
        )
        return max(found), True  # of several optimizers, each has a phase with its own
    left_out.append("forward and backward of a pipeline, whose stages exchange shapes first")
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter)
    if plan.shard.kind == "optimizer":
        left_out.append("the optimizer's step, which is sharded over the stages' replicas")
        look()
        return found[0], False
    strategy.optimizer.step()
    return found[0], True


def _is_here(strategy: Strategy, name: str, tensor: torch.Tensor) -> bool:
    return strategy.shard_ranges(f"model/{name}", tuple(tensor.shape)) != ()


@torch.no_grad()
def _replace_tensors(
    parameters: Iterable[nn.Parameter], buffers: Iterable[torch.Tensor], device: torch.device, model: nn.Module
) -> None:
    """Let these be empty tensors on a device. They stay the same objects, for the optimizers that hold them."""
    recurrent = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    for module in recurrent:
        forget_flat_weights(module)
    for tensor in [*parameters, *buffers]:
        fresh = _empty(tensor, device)
        if isinstance(tensor, nn.Parameter):
            mark_as_parameter(fresh)
            fresh.requires_grad_(tensor.requires_grad)
        fresh.__dict__.update(tensor.__dict__)
        torch.utils.swap_tensors(tensor, fresh)
    for module in recurrent:
        find_flat_weights(module)
    for holder in (module.__dict__ for module in model.modules()):
        holder.update({name: _empty(held, device) for name, held in holder.items() if isinstance(held, torch.Tensor)})


def _empty(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """An operation on a plain tensor would make a fake one of it, with a weak reference to it."""
    if isinstance(tensor, DTensor):
        return torch.empty_like(tensor, device=device)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _state_bytes(optimizer: torch.optim.Optimizer) -> tuple[int, float]:
    """Of the optimizer's state here, and how many there are for each element of a parameter."""
    elements = sum(local(p).numel() for p in optimizer.state)
    held = [(p, value) for p, values in optimizer.state.items() for value in values.values()]
    tensors = [(p, value) for p, value in held if isinstance(value, torch.Tensor)]
    shaped = _bytes(value for p, value in tensors if value.shape == p.shape)
    return _bytes(value for _, value in tensors), shaped / max(1, elements)


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of what this rank holds of them."""
    return sum(part.numel() * part.element_size() for part in map(local, tensors))


def _size(count: int | None) -> str:
    """
    >>> _size(31_373_312), _size(512), _size(None)
    ('31.4 MB', '512 B', 'not known')
    """
    if count is None:
        return "not known"
    amount, unit = float(count), 0
    while amount >= 1000 and unit < len(_UNITS) - 1:
        amount, unit = amount / 1000, unit + 1
    return f"{amount:.1f} {_UNITS[unit]}" if unit else f"{count} B"
