"""Rates of a captured optimizer: in tensors, which a graph reads, and in numbers for everybody else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Rates:
    """Learning rates where a captured optimizer reads them: in tensors. For everybody else they stay numbers."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._optimizer, self._device = optimizer, device
        self.why_not = _keeps_on_host(optimizer)
        self.changed = ""
        self._tensors: list[torch.Tensor] | None = None
        groups = optimizer.param_groups if not self.why_not else []
        self._made = [i for i, g in enumerate(groups) if g.get("capturable") is False]
        for index in self._made:  # before a checkpoint is loaded, which puts the state where this needs it
            groups[index]["capturable"] = True

    def follow(self) -> bool:
        """Let the tensors have the present rates; False: something else than a rate has changed."""
        if self._tensors is None:
            self._begin()
            assert self._tensors is not None
        for index, group in enumerate(self._groups):
            if group["lr"] != self._values[index]:
                self._values[index] = group["lr"]
                self._tensors[index].fill_(group["lr"])
            for name, value in self._options[index].items():
                if group[name] != value:
                    self.changed = f"the optimizer's {name} changes from step to step"
                    return False
        return True

    def _begin(self) -> None:
        """At the first step: a checkpoint that was loaded has brought groups of its own."""
        for state in self._optimizer.state.values() if not self.why_not else ():  # of an earlier training
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].to(self._device, torch.float32)
        self._groups = self._optimizer.param_groups if not self.why_not else []
        self._tensors = [torch.tensor(float(group["lr"]), device=self._device) for group in self._groups]
        self._values = [group["lr"] for group in self._groups]
        names = [name for name in self._optimizer.defaults if name != "lr"]
        self._options = [{name: group[name] for name in names if name in group} for group in self._groups]

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """The optimizer reads tensors meanwhile: eager steps too, so that both kinds come to the same bytes."""
        self.follow()
        for group, tensor in zip(self._groups, self._tensors or (), strict=True):
            group["lr"] = tensor
        try:
            yield
        finally:
            for group, value in zip(self._groups, self._values, strict=True):
                group["lr"] = value

    def close(self) -> None:
        """The optimizer's flags and counters are where torch expects them without a graph."""
        for index in self._made:
            group = self._optimizer.param_groups[index]
            group["capturable"] = False
            for parameter in group["params"] if not group.get("fused") else ():
                state = self._optimizer.state.get(parameter, {})
                if isinstance(state.get("step"), torch.Tensor):
                    state["step"] = state["step"].cpu()


def _keeps_on_host(optimizer: torch.optim.Optimizer) -> str:
    """Why an optimizer's step cannot be repeated by a device alone."""
    if not type(optimizer).__module__.startswith("torch.optim"):
        return f"{type(optimizer).__name__} may keep numbers in Python, which a graph would repeat"
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            return "its learning rate is a tensor already, and who changes it may put another in its place"
        if any(parameter.dtype == torch.float64 for parameter in group["params"]):
            return "its parameters have 64 bits, and where a graph repeats its step, torch keeps rates and counts in 32"
        if not group.get("fused") and "capturable" not in group:
            return f"{type(optimizer).__name__} reads its rate on the host: fused_optimizer=true would not"
    return ""
