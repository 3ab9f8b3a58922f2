"""Settings of a process that make a step faster: TF32, how memory grows on a GPU and stays on a CPU.

They are torch's own, or the system's, and hold for the whole process, its compiled blocks and its backward passes. When
the run is over, torch's are as they were before, and memory that is free is given back.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch

from distributed.core.env import ALLOCATOR
from distributed.core.plan import SpeedPlan

_SEGMENTS = "expandable_segments"
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _NEVER = -1, -3, -1  # of mallopt
_PIECE = 2**25  # bytes, from which on memory is taken and given back by itself: as far as glibc's own limit moves
_keeping = 0  # runs, one within another


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

    glibc gives back what is free at the end of its heap, and moves the limit up to 64 MiB, which the activations of a
    step exceed. Pieces of more than 32 MiB come and go by themselves as ever: on the heap they would leave holes. Other
    threads than the first have heaps of their own, which go when they are empty.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    global _keeping
    libc = ctypes.CDLL(None)
    _keeping += 1
    libc.mallopt(_MMAP_THRESHOLD, _PIECE)
    libc.mallopt(_TRIM_THRESHOLD, _NEVER)
    try:
        yield
    finally:
        _keeping -= 1
        if not _keeping:
            libc.mallopt(_TRIM_THRESHOLD, 2 * _PIECE)
            libc.malloc_trim(0)


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
