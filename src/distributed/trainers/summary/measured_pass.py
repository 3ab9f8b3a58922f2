"""One pass of a model whose tensors hold nothing: shapes, FLOPs, what is kept for backward, gradients, state.

The copy of the model shares no memory with it and takes none. Two such passes are made: on the meta device, where
attention and recurrent layers are made of the products that are counted, and with fake tensors that pass for a CPU's,
whose kernels keep for backward what a GPU's do.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from distributed.core.plan import Plan
from distributed.runtime.torch_compat import FakeTensorMode, storage_id, tree_leaves, tree_map_only
from distributed.strategies.base import LOW_PRECISION
from distributed.train.task import Task

Fake = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class PassFindings:
    """What a pass came to, by the path of each module; what is missing was not found out."""

    shapes: dict[str, str] = field(default_factory=dict)
    flops: dict[str, int] = field(default_factory=dict)
    backward_flops: int | None = None
    kept_bytes: dict[str, int] = field(default_factory=dict)  # by the innermost module
    gradient_bytes: int | None = None
    state_bytes: int | None = None
    failed: str = ""  # why it went no further


def meta_pass(task: Task, plan: Plan, batch: Any) -> PassFindings:
    """Shapes and FLOPs."""
    return _pass(task, plan, batch, lambda tensor: torch.empty_like(tensor, device="meta"), torch.device("meta"))


def fake_pass(task: Task, plan: Plan, batch: Any) -> PassFindings:
    """All of a step, to the optimizer's."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")

    return _pass(task, plan, batch, fake, mode, steps=True)


def _pass(
    task: Task, plan: Plan, batch: Any, fake: Fake, scope: AbstractContextManager[Any], *, steps: bool = False
) -> PassFindings:
    found = PassFindings()
    gradients = [(parameter, parameter.grad) for parameter in task.model.parameters()]
    try:
        with scope:
            copied = _copy(task, fake)
            moved = tree_map_only(torch.Tensor, fake, batch)
            _take(copied, plan, moved, found, steps=steps)
    except Exception as failed:  # noqa: BLE001 - the user's code, with tensors that it was not written for
        found.failed = f"{type(failed).__name__}: {str(failed).splitlines()[0] if str(failed) else ''}".rstrip(": ")
    finally:
        for parameter, gradient in gradients:  # a loss may reach the user's own parameters past the model
            parameter.grad = gradient
    return found


def _take(task: Task, plan: Plan, batch: Any, found: PassFindings, *, steps: bool) -> None:
    """Forward, backward and the optimizer's step, as far as they go."""
    model = task.model.train()
    dtype = LOW_PRECISION.get(plan.precision.kind)
    low = torch.autocast("cpu", dtype) if dtype is not None and steps else nullcontext()
    with _watched(model, found), FlopCounterMode(display=False) as forward, low:
        outcome = task.run(model, batch)
    root = type(model).__name__
    for name, counts in forward.get_flop_counts().items():
        path = name.removeprefix(root).removeprefix(".")
        if name == "Global":
            found.flops[""] = sum(counts.values())
        elif name.startswith(root) and path:
            found.flops[path] = sum(counts.values())
    with FlopCounterMode(display=False) as backward:
        outcome.loss.backward()
    found.backward_flops = backward.get_total_flops()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found.gradient_bytes = sum(_bytes(p.grad) for p in trained if p.grad is not None)
    if steps:
        optimizer = task.make_optimizer(model, plan)
        optimizer.step()
        held = (value for state in optimizer.state.values() for value in state.values())
        found.state_bytes = sum(_bytes(value) for value in held if isinstance(value, torch.Tensor))


@contextmanager
def _watched(model: nn.Module, found: PassFindings) -> Iterator[None]:
    """Note each module's output, and what the operations in it keep for backward."""
    inside: list[str] = []
    known = {storage_id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[str, int] = defaultdict(int)

    def enter(path: str) -> Callable[..., None]:
        return lambda module, args: inside.append(path)

    def leave(path: str) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            inside.pop()
            found.shapes.setdefault(path, shape_of(output))

        return note

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = storage_id(tensor)
        if storage not in known:
            known.add(storage)
            kept[inside[-1] if inside else ""] += tensor.untyped_storage().nbytes()
        return tensor

    with ExitStack() as hooks:
        for path, module in model.named_modules():
            hooks.callback(module.register_forward_pre_hook(enter(path)).remove)
            hooks.callback(module.register_forward_hook(leave(path)).remove)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            yield
    found.kept_bytes = dict(kept)


def _copy(task: Task, fake: Fake) -> Task:
    """The task with a model and an optimizer of tensors that hold nothing."""
    model, known = task.model, dict[int, Any]()
    optimizer = task.optimizer if isinstance(task.optimizer, torch.optim.Optimizer) else None
    loose = (value for module in model.modules() for value in vars(module).values() if isinstance(value, torch.Tensor))
    state = () if optimizer is None else (value for held in optimizer.state.values() for value in held.values())
    for tensor in (*model.parameters(), *model.buffers(), *loose, *state):
        if not isinstance(tensor, torch.Tensor) or id(tensor) in known:
            continue
        made = fake(tensor.detach())
        is_parameter = isinstance(tensor, nn.Parameter)
        known[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if is_parameter else made
    copied: Task = copy.deepcopy(task, known)
    return copied


def shape_of(output: Any) -> str:
    """The shapes of all tensors of an output.

    >>> shape_of(torch.zeros(2, 3)), shape_of((torch.zeros(2), {"a": torch.zeros(1, 4)})), shape_of(None)
    ('[2, 3]', '[2], [1, 4]', '')
    """
    return ", ".join(str(list(leaf.shape)) for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))


def is_within(name: str, path: str) -> bool:
    """Whether a module is another one, or in it.

    >>> is_within("blocks.0", "blocks"), is_within("blocks", ""), is_within("blocks2", "blocks")
    (True, True, False)
    """
    return not path or name == path or name.startswith(f"{path}.")


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
