"""LocalSteps: replicas that step alone, each with its own samples and optimizer, and meet every so many steps.

    every_step (post-local SGD, at first)   gradients are averaged by DDP: `Replicated`
    alone, for a round of H steps           no rank waits for another; weights and optimizer states go apart
    the round's last step                   weights and buffers are averaged; DiLoCo steps its outer optimizer
    leaving the training within a round     an evaluation, a checkpoint's model and the end of a run have the mean of
                                            the replicas; the replicas themselves go on as they were

A checkpoint has the mean, with which any strategy and any number of ranks can go on, and beside it each rank's own
replica, with which as many ranks go on with the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distributed.comm.outer_steps import SYNCHRONIZATION, OuterNesterov, mean_over_ranks
from distributed.core.errors import TaskError
from distributed.core.plan import Plan
from distributed.data.loading.loader import Microbatch
from distributed.runtime.session import Session
from distributed.runtime.tensor_shard import Box
from distributed.runtime.torch_compat import foreach_mul_
from distributed.strategies.base import StateTree, StepOutput, StepTask
from distributed.strategies.checks.forward_changes import ForwardChanges
from distributed.strategies.checks.replica_tensors import Named, model_tensors, optimizer_options
from distributed.strategies.data_parallel.batchnorm import synced_layer
from distributed.strategies.data_parallel.ddp import release
from distributed.strategies.data_parallel.whole_batch import WholeBatch
from distributed.strategies.model.optimizer_state import load_named_state, named_state
from distributed.strategies.replicated import Replicated
from distributed.strategies.speed.memory_format import lay_out_state
from distributed.strategies.steps.mesh_step import MeshStep
from distributed.strategies.steps.microbatches import Passed

_OWN = "replica"  # a component of what each rank saves for itself
_WEIGHTS, _STATES, _SCALER = "mean of the replicas", "mean of the replicas' optimizer states", "least loss scale"
_OF_SCALER = ("scale", "_growth_tracker")


class LocalSteps(Replicated):
    """Local SGD, post-local SGD and DiLoCo, with any optimizer that steps once."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        meets = plan.replicate.synchronization
        self._meets, self._steps, self._is_alone = meets, 0, meets.start == 0
        self._outer: OuterNesterov | None = None
        if meets.kind == "diloco":
            self._outer = OuterNesterov(meets.outer_learning_rate, meets.outer_momentum)
        self._names: set[str] = set()  # of parameters that have been stepped since the ranks met
        self._trained_now: set[str] = set()  # names
        self._weights_differ = self._states_differ = False  # between ranks, on purpose
        self._aside: dict[str, torch.Tensor] | None = None  # this replica, while the model has the mean of all

    def check(self, task: StepTask) -> None:
        super().check(task)
        self._refuse_synced(task.model)

    def _refuse_synced(self, model: nn.Module) -> None:
        synced = synced_layer(model)
        if synced is not None:
            raise TaskError(
                f"{synced} is a SyncBatchNorm, and synchronization={self._meets.kind!r}",
                why="in each forward pass it waits for all ranks, and these step alone",
                do="use nn.BatchNorm…, whose statistics are averaged with the weights, or GroupNorm",
            )

    def setup(self, task: StepTask, session: Session) -> None:
        self._refuse_synced(task.model)
        super().setup(task, session)
        if self._is_alone:
            self._buffers_differ = False  # where they do, they are averaged
        self._follow_trained()

    def _share_gradients(self) -> None:
        if not self._is_alone:
            super()._share_gradients()
            return
        session = self._session
        self._send_model(session.gate is not None and session.begins_alike)

    def _share_batch(self) -> WholeBatch | None:
        return None if self._is_alone else super()._share_batch()

    def _watch_changes(self) -> ForwardChanges | None:  # type: ignore[override]
        return None if self._is_alone else super()._watch_changes()

    def _why_not_captured(self) -> str:
        kind = self._meets.kind
        return super()._why_not_captured() or f"synchronization={kind!r}: not every step ends as the one before it"

    def parameters_changed(self) -> None:
        if self._is_alone:
            MeshStep.parameters_changed(self)  # no gradient is reduced
        else:
            super().parameters_changed()
        self._follow_trained()

    def train_step(self, microbatches: Sequence[Microbatch], *, measure: bool = False) -> StepOutput:
        """One step of this replica; the last of a round also averages all replicas."""
        output = super().train_step(microbatches, measure=measure)
        self._steps += 1
        self._names |= self._trained_now
        if not self._is_alone:
            if self._steps >= self._meets.start:
                self._agree_on_buffers()
                self._go_alone()
            return output
        self._weights_differ = self._states_differ = self._session.world_size > 1
        if self._meets.meets_after(self._steps):
            self._meet()
        return output

    def _go_alone(self) -> None:
        """From here on no gradients are averaged; all ranks hold the same."""
        if isinstance(self._model, DistributedDataParallel):
            release(self._model)
            self.clock.reduction = None  # which asks DDP's timers
        self._model = self.module
        self._check_reduced = self._whole_batch = self._changes = self.clock.reduction = None
        self._is_alone, self._buffers_differ = True, False

    def _finish_passes(self, passed: Passed) -> torch.Tensor | float:
        """The loss and gradients of this rank's own share, where they are a mean over what only it has counted."""
        if not self._is_alone or passed.weight is None:
            return super()._finish_passes(passed)
        counted = passed.weight.detach().double()
        factor = torch.where(counted > 0, 1 / (counted * self._ranks), torch.zeros_like(counted))
        if grads := [p.grad for p in self._parameters if p.grad is not None]:
            foreach_mul_(grads, factor)
        return passed.loss * (factor if self._moves else factor.item())

    @torch.no_grad()
    def _meet(self) -> None:
        """Average the replicas, and begin the next round with that, or with the outer step that it makes."""
        live = self._tracked()
        means = self._mean(live)
        if self._outer is not None:
            self._follow_trained()
            means |= self._outer.step(means)
        for name, tensor in live.items():
            tensor.copy_(means[name])
        self._weights_differ, self._names = False, set()
        self._follow_trained()

    def _follow_trained(self) -> None:
        """Also a parameter that was frozen within a round has to meet: replicas have stepped it apart before."""
        named = {name: p for name, p in self.module.named_parameters() if not p.is_meta}
        self._trained_now = {name for name, p in named.items() if p.requires_grad}
        if self._outer is not None:
            self._outer.follow({name: p for name, p in named.items() if name in self._names | self._trained_now})

    def _tracked(self) -> dict[str, torch.Tensor]:
        """What steps change: parameters that are trained, and buffers."""
        found = {name: p.detach() for name, p in self.module.named_parameters() if name in self._names}
        return found | {name: b for name, b in self.module.named_buffers() if not b.is_meta}

    def _mean(self, live: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if self._session.world_size == 1 or self._session.is_dry:
            return {name: tensor.clone() for name, tensor in live.items()}
        return mean_over_ranks(_WEIGHTS, live, self._session)

    @torch.no_grad()
    def _show_mean(self) -> None:
        """Put the mean of the replicas into the model; every rank calls it."""
        if not self._weights_differ or self._aside is not None:
            return
        live = self._tracked()
        means = self._mean(live)
        self._aside = {name: tensor.clone() for name, tensor in live.items()}
        for name, tensor in live.items():
            tensor.copy_(means[name])

    @torch.no_grad()
    def _return_own(self) -> None:
        aside, self._aside = self._aside, None
        if aside is not None:
            for name, tensor in self._tracked().items():
                if name in aside and aside[name].shape == tensor.shape:  # no buffer that an evaluation has made
                    tensor.copy_(aside[name])

    def train(self, mode: bool) -> None:
        """To evaluate is to evaluate the mean of the replicas."""
        if mode:
            self._return_own()
        else:
            self._show_mean()
        super().train(mode)

    def finish(self) -> None:
        """Leave the mean of the replicas in the user's model."""
        self._show_mean()
        self._aside, self._weights_differ = None, False
        super().finish()

    def state(self) -> StateTree:
        """As a single replica's, with the means of all; every rank calls it."""
        with self._as_mean():
            found = super().state()
            if self._weights_differ:  # of tensors to which the replica's own come back
                kept = found["model"].items()
                found["model"] = {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in kept}
        if self._states_differ and not self._session.is_dry:
            found["optimizer"] = found["optimizer"] | {"state": self._mean_of_states(found["optimizer"]["state"])}
            if self._scaler is not None:
                found["scaler"] = found["scaler"] | self._least_scale()
        return found | self._rounds()

    def _rounds(self) -> StateTree:
        outer = {} if self._outer is None else self._outer.state()
        return {SYNCHRONIZATION: {"steps": self._steps} | outer}

    @contextmanager
    def _as_mean(self) -> Iterator[None]:
        is_shown = self._aside is not None
        self._show_mean()
        try:
            yield
        finally:
            if not is_shown:
                self._return_own()

    def _mean_of_states(self, states: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Of the parameters for which every replica has a state; the others' would begin anew."""
        everywhere = set(states)
        for text in self._session.gather_texts(_STATES, json.dumps(sorted(states))):
            everywhere &= set(json.loads(text))
        flat = {
            json.dumps([name, key]): value
            for name in sorted(everywhere)
            for key, value in sorted(states[name].items())
            if isinstance(value, torch.Tensor)
        }
        means = mean_over_ranks(_STATES, flat, self._session)
        return {
            name: {key: means.get(json.dumps([name, key]), value) for key, value in state.items()}
            for name, state in states.items()
            if name in everywhere
        }

    def _least_scale(self) -> dict[str, Any]:
        assert self._scaler is not None
        held = self._scaler.state_dict()
        own = [-float(held[key]) for key in _OF_SCALER]
        least = self._session.max(_SCALER, torch.tensor(own, dtype=torch.float64, device=self._session.device))
        return {"scale": -float(least[0]), "_growth_tracker": -int(least[1])}

    def own_state(self) -> StateTree:
        """This replica, where it differs from the others."""
        if not self._states_differ:
            return {}
        own: StateTree = {"optimizer": named_state(self.optimizer, self.module)["state"]}
        if self._scaler is not None:
            own["scaler"] = self._scaler.state_dict()
        if self._weights_differ:
            own["weights"] = self._tracked() if self._aside is None else self._aside
        return {_OWN: own}

    def compared(self) -> StateTree:
        """This replica itself: the means of all would be sent for each step that is compared."""
        own = self.own_state().get(_OWN, {})
        found: StateTree = {"model": own.get("weights") or self.module.state_dict()}
        found["optimizer"] = named_state(self.optimizer, self.module)
        return found | self._state_beside() | self._rounds()

    def load_state(self, tree: StateTree) -> None:
        self._aside, self._weights_differ, self._states_differ = None, False, False
        super().load_state(tree)
        saved = tree.get(SYNCHRONIZATION, {})
        self._steps = int(saved.get("steps", tree.get("progress", {}).get("step", 0)))
        self._follow_trained()
        if self._outer is not None:  # what was frozen within the round has its anchor, too
            names = self._trained_now | saved.get("anchors", {}).keys()
            self._outer.load(saved, {name: p for name, p in self.module.named_parameters() if name in names})
        if not self._is_alone and self._steps >= self._meets.start:
            self._go_alone()

    @torch.no_grad()
    def load_own_state(self, own: StateTree) -> None:
        saved = own.get(_OWN)
        if saved is None or not self._is_alone:
            return
        here = named_state(self.optimizer, self.module)  # the means, in the order of the run that saved them
        if here["state"]:  # else there was none, or this run has another optimizer
            states = _in_order_of(here["state"], saved["optimizer"])
            load_named_state(self.optimizer, self.module, here | {"state": states})
            lay_out_state(self.optimizer)
        if self._scaler is not None and "scaler" in saved:
            self._scaler.load_state_dict(saved["scaler"])
        self._states_differ = True
        if "weights" in saved:
            self._names |= {name for name, _ in self.module.named_parameters() if name in saved["weights"]}
            for name, tensor in self._tracked().items():
                if name in saved["weights"]:
                    tensor.copy_(saved["weights"][name])
            self._weights_differ = True

    def shard_ranges(self, name: str, shape: tuple[int, ...]) -> tuple[Box, ...] | None:
        is_outer = self._outer is not None and name.startswith(f"{SYNCHRONIZATION}/")
        return None if is_outer else super().shard_ranges(name, shape)

    def replicated(self) -> Named:
        """What replicas that step alone must hold alike: nothing of a round but its beginning and the rates."""
        if not self._states_differ:
            yield from super().replicated()
        else:
            if not self._weights_differ or self._aside is not None:
                yield from model_tensors(self.module, self._replicas)
            yield from optimizer_options(self.optimizer)
        if self._outer is not None:
            for name, anchor in self._outer.anchors.items():
                yield f"parameter {name} after the last outer step", anchor
                yield f"optimizer outer momentum of {name}", self._outer.momenta[name]

    def held_state(self) -> StateTree | None:
        """None: a lost rank takes its replica along, and all resume from the checkpoint."""
        return None


def _in_order_of(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The second with its keys in the order of the first: what is own is stored by names.

    >>> _in_order_of({"b": {"y": 0, "x": 0}, "a": {}}, {"a": {"z": 1}, "b": {"x": 2, "y": 3}})
    {'b': {'y': 3, 'x': 2}, 'a': {'z': 1}}
    """
    names = [*(name for name in one if name in other), *(name for name in other if name not in one)]
    return {
        name: _in_order_of(one.get(name, {}), other[name]) if isinstance(other[name], Mapping) else other[name]
        for name in names
    }
