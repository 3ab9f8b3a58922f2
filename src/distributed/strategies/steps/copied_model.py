"""CopiedModel: the tensors of a rank's model for code outside of a step, and copies of them beside the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property

import torch
from torch import nn

from distributed.core.errors import TaskError
from distributed.data.loading.loader import Microbatch
from distributed.strategies.base import Copies, ModelCopy, StateTree
from distributed.strategies.checks.replica_tensors import Named
from distributed.strategies.model.copies import COPIES, ModelTensors, begun, copied_names, copy_tensors


class CopiedModel:
    """The base of strategies: here each rank has all of the model, and of its copies."""

    is_follower = False  # whether this rank takes its state from another one, which holds all of it
    is_timed = False  # whether a step depends on the timing of the ranks, so that none can be repeated
    _is_cut = False  # whether a rank has parts of tensors
    module: nn.Module
    optimizer: torch.optim.Optimizer
    copies: Copies

    def state(self) -> StateTree:
        """See `Strategy`."""
        raise NotImplementedError

    def own_state(self) -> StateTree:
        """What this rank alone has of a state; {}: `state` is all."""
        return {}

    def load_own_state(self, own: StateTree) -> None:
        """What `own_state` gave on this rank, where as many ranks resume as have saved; after `load_state`."""

    def compared(self) -> StateTree:
        """The state of this rank as a resume certificate compares it."""
        return self.state()

    def _whole(self) -> AbstractContextManager[None]:
        """A scope in which the model has the parameters of the user and the optimizer."""
        raise NotImplementedError

    def keep_copies(self, labels: Iterable[str]) -> None:
        """What copies of the model there may be, before a state is loaded: others are left out of it."""
        self.copies = dict.fromkeys(labels)

    @contextmanager
    def weights(self, *, changes: bool = False) -> Iterator[ModelCopy]:
        """This rank's part of the model's tensors, by name, in which there is no gradient. Every rank enters it."""
        with torch.no_grad(), self._whole():
            yield self._tensors.read()

    def collect_statistics(self, microbatches: Sequence[Microbatch]) -> None:
        """Forward passes in training mode and without gradients, by which BatchNorm collects statistics."""
        raise TaskError(
            f"{type(self).__name__} cannot collect BatchNorm's statistics",
            why="each virtual rank normalizes by its own share of a batch, and no pass sees all of it",
            do="set reproducible='off', or use GroupNorm or LayerNorm",
        )

    @cached_property
    def _tensors(self) -> ModelTensors:
        with self._whole():
            return ModelTensors(self.module, self._copied_names(), is_cut=self._is_cut)

    def _copied_names(self) -> set[str]:
        """The names of a copy's tensors on any rank."""
        stepped = [p for group in self.optimizer.param_groups for p in group["params"]]
        return copied_names(self.module, stepped, self.module.state_dict().keys())

    def _state_of_copies(self) -> StateTree:
        found = {label: self._copy_state(tensors) for label, tensors in begun(self.copies).items()}
        return {COPIES: found} if found else {}

    def _copy_state(self, tensors: ModelCopy) -> StateTree:
        return dict(tensors)

    def _load_copies(self, tree: StateTree) -> None:
        saved = tree.get(COPIES, {})
        self.copies = {label: self._load_copy(saved[label]) if label in saved else None for label in self.copies}

    def _load_copy(self, saved: StateTree) -> ModelCopy:
        made: dict[int, torch.Tensor] = {}
        with self.weights() as live:
            for name, tensor in live.items():
                if id(tensor) not in made and name in saved:
                    made[id(tensor)] = saved[name].to(tensor.device, copy=True)
            return {name: made[id(tensor)] for name, tensor in live.items() if id(tensor) in made}

    def _copied_buffers(self) -> Iterator[torch.Tensor]:
        """Of all copies, in one order on all ranks."""
        names = [name for name, _ in self.module.named_buffers()]
        for tensors in begun(self.copies).values():
            yield from (tensors[name] for name in names if name in tensors)

    def _copied_alike(self, names: set[str]) -> Named:
        """Of the copies, what ranks should hold alike; `names`: of the model's tensors of which that is so."""
        return copy_tensors(self.copies, _titled, names)


def _titled(title: str, name: str, tensor: torch.Tensor) -> Named:
    yield title, tensor
