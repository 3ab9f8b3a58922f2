"""ManualSteps: what a manual step's calls do: backward on this rank, and a step by the mean gradient of all ranks.

Each call that meets the other ranks first compares what they call, so that ranks which go different ways end with an
error that says so. Gradients do not outlive a step of the run: no checkpoint would hold them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from distributed.core.errors import TaskError
from distributed.core.plan import Plan
from distributed.data.loading.loader import Microbatch
from distributed.runtime.session import Session
from distributed.runtime.torch_compat import foreach_norm
from distributed.strategies.base import NonFiniteLoss
from distributed.strategies.data_parallel.clip_values import clip_values
from distributed.strategies.data_parallel.gradient_buckets import GradientBuckets
from distributed.strategies.joint_optimizer import JointOptimizer

_END = "the end of its training_step"


class ManualSteps:
    """Of one rank; `begin` and `end` are around each training step of the user's. Implements OptimizerCalls."""

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, session: Session, *, checks_loss: bool
    ) -> None:
        self._optimizer, self._session, self._checks_loss = optimizer, session, checks_loss
        self._ranks, self._clip_norm = session.world_size, plan.optimizer.clip_norm
        self._clip_value = plan.optimizer.clip_value
        self._waits = session.device.type != "cpu"  # whether reading a value would
        setups = optimizer.setups if isinstance(optimizer, JointOptimizer) else {}
        groups = {name: setup.optimizer.param_groups for name, setup in setups.items()}
        self._clips = {name: setup.gradient_clipping or self._clip_norm for name, setup in setups.items()}
        self._parameters = {
            name: [p for group in held for p in group["params"] if p.requires_grad]
            for name, held in (groups or {"": optimizer.param_groups}).items()
        }
        self._frozen = {  # when the run began
            name: [p for group in held for p in group["params"] if not p.requires_grad]
            for name, held in (groups or {"": optimizer.param_groups}).items()
        }
        self._exactly = torch.autocast(session.device.type, enabled=False)  # a step's forward may be within another
        self._trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._finds_unused = plan.replicate.find_unused_parameters
        self._buckets: Mapping[str, GradientBuckets] = {}
        if session.world_size > 1:
            self._buckets = {
                name: GradientBuckets(
                    module,
                    plan.replicate,
                    session,
                    sends_buffers=False,
                    of=held,
                    name=f"gradients of {name or 'the step'}",
                )
                for name, held in self._parameters.items()
            }
        self.has_stepped = False  # whether parameters were changed in the training step that runs
        self._begins_anew = False  # whether the next backward pass is the first of a batch, or after a step
        self._kept: set[str] = set()  # optimizers with gradients of the batch before, which are gone
        self._differs: torch.Tensor | None = None  # on a device: whether ranks have called different things
        self._micro: Microbatch | None = None
        self.measures = False  # whether the norms of gradients are wanted
        self.losses: list[torch.Tensor] = []  # this rank's parts, such that their mean over ranks is the loss
        self.norms: list[torch.Tensor] = []

    def begin(self, micro: Microbatch) -> None:
        self._micro = micro
        self.losses, self.norms, self.has_stepped = [], [], False
        self._begins_anew = True

    def end(self, *, drops: bool = True) -> None:
        """The training step has returned; every rank comes here. `drops` gradients; else they are refused later."""
        self._agree(_END)
        self._micro = None
        if not drops:
            return
        for name, held in self._parameters.items():
            if any(parameter.grad is not None for parameter in held):
                self._kept.add(name)
        for parameter in self._trained:
            parameter.grad = None

    def refuse_leftovers(self) -> None:
        """Raise if gradients of an earlier batch or step are still there, to which those of the next were added."""
        if not self._begins_anew:
            return
        self._begins_anew = False
        held = [name for name, owned in self._parameters.items() if any(p.grad is not None for p in owned)]
        if held:
            raise TaskError(
                f"run.backward, and {held[0]} still has gradients of an earlier pass",
                why="the gradients of both would be added up, over a step or the end of a batch",
                do="call its zero_grad() first, as a loop of one process does",
            )

    def norm(self) -> torch.Tensor | None:
        """Of all gradients of the step's calls together."""
        return torch.linalg.vector_norm(torch.stack([*self.norms])) if self.norms else None

    def check(self) -> None:
        """Raise where ranks have called different things on a device; waits for it."""
        if self._differs is not None and bool(self._differs):
            raise _differing([])

    def backward(self, loss: torch.Tensor, weight: Any, *, retain_graph: bool) -> None:
        micro = self._now("backward")
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            kind = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            has = " that requires no gradient" if isinstance(loss, torch.Tensor) and not loss.requires_grad else ""
            raise TaskError(
                f"self.backward got {kind}{has}",
                why="a backward pass begins at one number that was computed with the model's parameters",
                do="pass the mean loss: loss.mean()",
            )
        if weight is None:
            part = loss * (micro.weight if micro.size else 0.0)
        else:
            part = self._weighted(loss, torch.as_tensor(weight, device=loss.device), micro)
        part = part if micro.size else part.nan_to_num(0.0)  # a stand-in's loss counts nothing, even if it is NaN
        if self._checks_loss and not torch.isfinite(part.detach()).all():
            raise NonFiniteLoss(float(part.detach()))
        self.losses.append(part.detach().reshape(()))
        with self._exactly:
            part.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]

    def step(self, name: str) -> None:
        self._now("step")
        held = self._parameters_of(name, "step")
        if name in self._kept:
            raise TaskError(
                f"self.step({name!r}) without self.zero_grad({name!r}) in this batch",
                why="gradients of the batch before are not kept for it: no checkpoint would hold them",
                do="call self.zero_grad before self.backward, in each training_step",
            )
        if not self._finds_unused and all(parameter.grad is None for parameter in held):
            raise TaskError(
                f"self.step({name!r}), and none of its parameters has a gradient",
                why="no call of self.backward in this training_step has reached them",
                do="call self.backward with a loss that is computed with them, before self.step",
            )
        if any(parameter.grad is not None for parameter in self._frozen[name]):
            raise TaskError(
                f"parameters of the optimizer {name!r} were unfrozen after the run had begun",
                why="a step reduces over the ranks what required a gradient then, and drops it afterwards",
                do="leave requires_grad=True until the run has begun, and freeze them then",
            )
        self._agree(f"step({name!r})")
        with self._exactly:
            if name in self._buckets:
                self._reduce(name, held)
            self._measure_and_clip(name, held)
            self.has_stepped = self._begins_anew = True
            self._step(name)

    def zero_grad(self, name: str) -> None:
        self._now("zero_grad")
        names = [name] if name else [*self._parameters]
        for one in names:
            for parameter in self._parameters_of(one, "zero_grad"):
                parameter.grad = None
        self._kept.difference_update(names)
        if not name:
            for parameter in self._trained:
                parameter.grad = None

    def _now(self, call: str) -> Microbatch:
        if self._micro is None:
            raise TaskError(
                f"self.{call} outside of training_step",
                why="gradients and steps belong to a batch, which all ranks have at the same time",
                do=f"call self.{call} in training_step",
            )
        return self._micro

    def _parameters_of(self, name: str, call: str) -> list[nn.Parameter]:
        found = self._parameters.get(name)
        if found is None:
            is_single = "" in self._parameters
            first, known = next(iter(self._parameters)), ", ".join(map(repr, self._parameters))
            raise TaskError(
                f"self.{call}({name!r}), and there is no optimizer of this name",
                why="there is only one, without a name" if is_single else f"configure_optimizers returned {known}",
                do=f"self.{call}()" if is_single else f"self.{call}({first!r})",
            )
        return found

    def _weighted(self, loss: torch.Tensor, weight: torch.Tensor, micro: Microbatch) -> torch.Tensor:
        """The part of a loss that is a mean over `weight`, of which all ranks have theirs."""
        self._agree("backward with a weight")
        own = (weight if micro.size else weight * 0).detach().double().reshape(())
        total = self._session.sum("loss weight", own.clone())
        factor = (own * self._ranks / total).to(loss.dtype)
        return torch.where(own > 0, loss, loss.nan_to_num(0.0)) * torch.where(own > 0, factor, torch.zeros_like(factor))

    def _step(self, name: str) -> None:
        joint = self._optimizer
        if not isinstance(joint, JointOptimizer):
            joint.step()
            return
        joint.due = (name,)
        try:
            joint.step()
        finally:
            joint.due = tuple(joint.setups)

    def _reduce(self, name: str, held: list[nn.Parameter]) -> None:
        unused = self._fill(held) if self._finds_unused else []
        self._buckets[name].reduce()
        for parameter in unused:
            parameter.grad = None

    def _fill(self, held: list[nn.Parameter]) -> list[nn.Parameter]:
        """Zeros for what this rank has left out; returns what all have left out, which is to have no gradient."""
        used = torch.tensor([int(parameter.grad is not None) for parameter in held], device=self._session.device)
        by_any = self._session.max("parameters that a step uses", used).tolist()
        for parameter in held:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [parameter for parameter, is_used in zip(held, by_any, strict=True) if not is_used]

    def _measure_and_clip(self, name: str, held: list[nn.Parameter]) -> None:
        limit = self._clips.get(name, self._clip_norm)
        if limit is not None:
            self.norms.append(nn.utils.clip_grad_norm_(held, limit))
        elif self.measures:
            self.norms += foreach_norm([parameter.grad for parameter in held if parameter.grad is not None])
        if self._clip_value is not None:
            clip_values(held, self._clip_value)

    def _agree(self, call: str) -> None:
        """Compare this call with those of the other ranks, each of which makes one."""
        if self._session.world_size == 1:
            return
        digest = int.from_bytes(hashlib.blake2b(call.encode(), digest_size=6).digest(), "big")
        found = torch.tensor([digest, -digest], dtype=torch.int64, device=self._session.device)
        self._session.max("what ranks call in a manual step", found)
        if self._waits:
            differs = found[0] != -found[1]
            self._differs = differs if self._differs is None else self._differs.logical_or_(differs)
        elif int(found[0]) != -int(found[1]):
            raise _differing(self._session.gather_texts("what ranks call in a manual step", call))


def _differing(calls: list[str]) -> TaskError:
    said = "; ".join(f"rank {rank}: {call}" for rank, call in enumerate(calls))
    return TaskError(
        "ranks make different calls in a manual step" + (f": {said}" if said else ""),
        why="self.step and self.backward(loss, weight) meet the other ranks, which must make the same ones",
        do="let nothing that a rank's own samples decide change which of them are called",
    )
