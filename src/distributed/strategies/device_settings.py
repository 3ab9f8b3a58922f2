"""Settings of a process that make a step faster: TF32, how memory grows on a GPU and stays on a CPU.

They are torch's own, or the system's, and hold for the whole process, its compiled blocks and its backward passes. Each
is as it was before when the run is over.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch

from distributed.core.env import ALLOCATOR
from distributed.core.plan import SpeedPlan

_SEGMENTS = "expandable_segments"
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt
_KEPT = 2**30


@contextmanager
def device_settings(speed: SpeedPlan, device: torch.device) -> Iterator[None]:
    """What the plan says of the device, while this lasts."""
    with ExitStack() as settings:
        if speed.keep_freed_memory:
            settings.enter_context(kept_memory())
        if device.type == "cuda":
            if speed.tf32:
                settings.enter_context(tf32_products())
            if speed.expandable_segments:
                settings.enter_context(growing_segments(os.environ))
        yield


@contextmanager
def tf32_products() -> Iterator[None]:
    """Products and convolutions of fp32 in TF32.

    torch has two ways to say so and refuses to read the older one once the newer one was used by itself. Everything
    reads what the older one writes, so that is the one to write, unless the process has begun with the other.
    """
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    newer, convolutions = matmul.fp32_precision, cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    try:
        older: tuple[bool, bool] | None = (matmul.allow_tf32, cudnn.allow_tf32)
    except RuntimeError:
        older = None
    if older is None:
        matmul.fp32_precision = cudnn.conv.fp32_precision = "tf32"  # type: ignore[attr-defined]
    else:
        matmul.allow_tf32 = cudnn.allow_tf32 = True
    try:
        yield
    finally:
        if older is not None:
            matmul.allow_tf32, cudnn.allow_tf32 = older
        # The older one writes "ieee" where nobody had said anything.
        matmul.fp32_precision, cudnn.conv.fp32_precision = newer, convolutions  # type: ignore[attr-defined]


@contextmanager
def kept_memory() -> Iterator[None]:
    """Memory that is freed stays with the process, which would else get it back as pages to be cleared, step by step.

    glibc moves its own limits with what is freed, up to 32 MiB for a piece and twice that for the end of the heap; the
    activations of one step are more. Afterwards they stay there, and what is free is given back.
    """
    libc = ctypes.CDLL(None)
    _limit(libc, _KEPT, _KEPT)
    try:
        yield
    finally:
        _limit(libc, 2**25, 2**26)
        libc.malloc_trim(0)


def _limit(libc: ctypes.CDLL, piece: int, end: int) -> None:
    """Of a piece that gets pages of its own, which go when it is freed; of what may be free at the end of the heap."""
    libc.mallopt(_MMAP_THRESHOLD, piece) or libc.mallopt(_MMAP_THRESHOLD, 2**25)  # older ones take no more
    libc.mallopt(_TRIM_THRESHOLD, end)


@contextmanager
def growing_segments(environ: Mapping[str, str]) -> Iterator[None]:
    """Let the allocator enlarge the segments that it asks for from now on; those that there are stay as they are."""
    _set_allocator(allocator_options(environ, True))
    try:
        yield
    finally:
        _set_allocator(allocator_options(environ, None))


def allocator_options(environ: Mapping[str, str], grows: bool | None) -> str:
    """The user's own options with ours; None: the user's alone, and torch's default where they say nothing of it.

    >>> allocator_options({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:False"}, True)
    'max_split_size_mb:64,expandable_segments:True'
    >>> allocator_options({}, None)
    'expandable_segments:False'
    """
    text = next((environ[name] for name in ALLOCATOR if environ.get(name)), "")
    options = [option.strip() for option in text.split(",") if option.strip()]
    said = [option for option in options if option.startswith(f"{_SEGMENTS}:")]
    others = [option for option in options if option not in said]
    if grows is None and said:
        return ",".join(options)
    return ",".join([*others, f"{_SEGMENTS}:{bool(grows)}"])


def _set_allocator(options: str) -> None:
    """torch 2.13 has a new name for it and warns of the old one."""
    known = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (known or torch.cuda.memory._set_allocator_settings)(options)
