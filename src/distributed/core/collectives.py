"""Which library sends tensors between ranks, chosen by the device they are on, and why."""

from __future__ import annotations

from distributed.core.choices import Collectives, Device


def choose_collectives(device: Device, asked: str = "auto") -> tuple[Collectives, str]:
    """The library for tensors of this device and the reason; `asked` is the setting communication_backend.

    >>> choose_collectives("cpu")
    ('gloo', 'the ranks are CPU processes, and NCCL sends tensors of GPUs only')
    >>> choose_collectives("cuda", "gloo")[0]
    'gloo'
    """
    if device == "cpu":
        if asked == "nccl":
            return "gloo", "communication_backend=nccl needs CUDA devices, and the ranks are CPU processes"
        return "gloo", "the ranks are CPU processes, and NCCL sends tensors of GPUs only"
    if asked == "gloo":
        return "gloo", "communication_backend=gloo asks for it; tensors of GPUs go through host memory"
    why = "it sends from GPU to GPU"
    if asked == "mpi":  # the world of an engine
        why += "; MPI is in no wheel of torch"
    return "nccl", why
