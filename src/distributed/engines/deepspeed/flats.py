"""What a rank holds of a model under ZeRO: flat tensors of fp32 values, and which range of which parameter lies where.

DeepSpeed keeps these in its own fields, which differ between its stages and with where the state is offloaded to; all
that is known of them is here. A flat tensor that is on a disk is in memory only while it is open.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch


class Slot(NamedTuple):
    """Where a range of a flattened parameter is on this rank."""

    parameter: torch.nn.Parameter
    shape: tuple[int, ...]  # of the whole parameter
    start: int  # of the range in the parameter
    size: int  # 0: others have it
    offset: int  # in the flat tensor


class Flat(NamedTuple):
    """One flat tensor of master values, and the optimizer's state of it."""

    values: torch.Tensor
    state: dict[str, Any]
    is_borrowed: bool  # whether both are gone when it is closed


class Flats(Protocol):
    members: list[list[Slot]]  # of each flat tensor
    groups: list[int]  # the optimizer's group of each

    def opened(self, index: int, writes: bool = False) -> Any: ...

    def begin_writing(self) -> None: ...

    def end_writing(self) -> None:
        """The parameters as they are computed with follow the master values. Every rank comes here."""


def flats_of(zero: Any) -> Flats:
    """`zero` is the engine's optimizer."""
    return PartitionedParameters(zero) if hasattr(zero, "fp16_groups") else ReplicatedParameters(zero)


class ReplicatedParameters:
    """Stages 1 and 2: a group's parameters one after the other, cut into as many equal parts as there are ranks."""

    def __init__(self, zero: Any) -> None:
        self._zero = zero
        self.groups = list(range(len(zero.bit16_groups)))
        self.members = [[_fragment(parameter) for parameter in group] for group in zero.bit16_groups]

    @contextmanager
    def opened(self, index: int, writes: bool = False) -> Iterator[Flat]:
        values = self._zero.single_partition_of_fp32_groups[index]
        yield Flat(values.detach(), _state_of(self._zero.optimizer, values, writes), False)

    def begin_writing(self) -> None:
        self._zero._hp_optimizer_states_linked = False  # its views of the state, which may be replaced

    def end_writing(self) -> None:
        self._zero.update_lp_params()


def _fragment(parameter: torch.nn.Parameter) -> Slot:
    found = parameter._hp_mapping  # type: ignore[attr-defined]
    if found is None:
        return Slot(parameter, tuple(parameter.shape), 0, 0, 0)
    here, there = found.lp_fragment_address, found.hp_fragment_address
    return Slot(parameter, tuple(parameter.shape), here.start, here.numel, there.start)


class PartitionedParameters:
    """Stage 3: of each parameter an equal part, the last one padded; those of some parameters one after the other."""

    def __init__(self, zero: Any) -> None:
        self._zero = zero
        self.groups = [zero.sub_group_to_group_id[index] for index in range(len(zero.fp16_groups))]
        self.members = []
        for group in zero.fp16_groups:
            offset, slots = 0, []
            for parameter in group:
                start, size = own_range(parameter)
                slots.append(Slot(parameter, tuple(parameter.ds_shape), start, size, offset))
                offset += parameter.partition_numel()
            self.members.append(slots)

    @contextmanager
    def opened(self, index: int, writes: bool = False) -> Iterator[Flat]:
        zero = self._zero
        values, is_swapped = zero.fp32_partitioned_groups_flat[index], zero._swappable_optimizer_subgroup(index)
        if is_swapped:
            zero._optimizer_states_and_gradient_swap_in(index)
        try:
            yield Flat(values.detach(), _state_of(zero.optimizer, values, writes), is_swapped)
            if writes:
                zero._reassign_or_swap_out_partitioned_parameters(index)
        finally:
            if is_swapped and writes:
                zero._optimizer_states_and_gradient_swap_out(index)
            elif is_swapped:
                zero._release_swap_buffers(index)

    def begin_writing(self) -> None:
        self._zero.checkpoint_event_prologue()  # parameters that are gathered are given back

    def end_writing(self) -> None:
        self._zero.checkpoint_event_epilogue()  # and those that are always gathered are so again


def share_masters(zero: Any) -> None:
    """Where stage 3 computes in fp32, the values that are stepped and those that are computed with are the same.

    DeepSpeed means to keep them once then, but takes the device of one for another's name and keeps them twice.
    """
    if not hasattr(zero, "fp16_groups") or zero.offload_optimizer or zero.offload_param:
        return
    for master, computed in zip(zero.fp32_partitioned_groups_flat, zero.fp16_partitioned_groups_flat, strict=True):
        if (master.dtype, master.device) == (computed.dtype, computed.device):
            master.data = computed.data


def keep_unaligned_gradients(zero: Any) -> None:
    """Where the optimizer's state is in files, gradients that do not begin where a disk's block does stay in memory.

    DeepSpeed writes them, and reads them back to a place that the system cannot read to: it steps by something else.
    """
    swapper = getattr(zero, "optimizer_swapper", None)
    if swapper is None:
        return
    swap_out = swapper.swap_out_gradients

    def swap_out_aligned(parameter: Any, gradient_offsets: list[int], gradient_tensors: list[Any]) -> None:
        for offset, gradient in zip(gradient_offsets, gradient_tensors, strict=True):
            if offset % swapper.numel_alignment:
                gradient.swappable = False
        swap_out(parameter=parameter, gradient_offsets=gradient_offsets, gradient_tensors=gradient_tensors)

    swapper.swap_out_gradients = swap_out_aligned


def own_range(parameter: Any) -> tuple[int, int]:
    """Where this rank's part of a parameter of stage 3 begins, and its size without padding."""
    import deepspeed.comm

    length = parameter.partition_numel()
    start = min(length * deepspeed.comm.get_rank(parameter.ds_process_group), parameter.ds_numel)
    return start, min(length, parameter.ds_numel - start)


@contextmanager
def opened_part(parameter: Any, writes: bool = False) -> Iterator[torch.Tensor]:
    """This rank's part of a parameter of stage 3 as it is computed with: of one that is not trained, all there is."""
    swapper = parameter.nvme_swapper if parameter.ds_tensor.status.name == "NOT_AVAILABLE" else None
    if swapper is not None:
        swapper.swap_in([parameter], async_op=False)
    try:
        yield parameter.ds_tensor.data
        if swapper is not None and writes:
            swapper.swap_out_and_release([parameter])
            swapper = None
    finally:
        if swapper is not None:
            swapper.remove_partition_and_release_buffers([parameter])


def _state_of(optimizer: torch.optim.Optimizer, values: torch.Tensor, creates: bool) -> dict[str, Any]:
    """Without making an entry of one that is only looked at."""
    return optimizer.state[values] if creates else optimizer.state.get(values, {})
