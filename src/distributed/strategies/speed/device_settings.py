"""Process-wide settings for faster steps: TF32, expandable segments on a GPU, kept memory on a CPU.

They are torch's or the system's, and hold for the whole process, its compiled blocks and its backward passes. After the
run, torch's settings are restored, and free memory is returned to the system.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch

from distributed.core.env import ALLOCATOR, inherited_environ
from distributed.core.plan import SpeedPlan
from distributed.runtime.torch_compat import set_allocator

_SEGMENTS = "expandable_segments"
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _NEVER = -1, -3, -1  # of mallopt
_PIECE = 2**25  # bytes: larger pieces are mapped and unmapped separately, at the maximum of glibc's own threshold
_keeping = 0  # nested runs


@contextmanager
def device_settings(speed: SpeedPlan, device: torch.device) -> Iterator[None]:
    """A scope with the plan's settings of the device."""
    with ExitStack() as settings:
        if speed.keep_freed_memory:
            settings.enter_context(kept_memory())
        if device.type == "cuda":
            if speed.tf32:
                settings.enter_context(tf32_products())
            if speed.expandable_segments:
                settings.enter_context(growing_segments(inherited_environ()))
        yield


@contextmanager
def tf32_products() -> Iterator[None]:
    """Products and convolutions of fp32 in TF32.

    torch has two settings for it, and refuses to read the older one once the newer one was set. All code reads what
    the older one writes, so that one is set, unless the process has set the newer one.
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
        # The older setting writes "ieee" where nothing was set.
        matmul.fp32_precision, cudnn.conv.fp32_precision = newer, convolutions  # type: ignore[attr-defined]


@contextmanager
def kept_memory() -> Iterator[None]:
    """Keep freed memory in the process, because pages that come back from the system must be cleared in every step.

    glibc returns free memory at the end of its heap, with a threshold of at most 64 MiB, which the activations of a
    step exceed. Pieces of more than 32 MiB are still mapped separately: on the heap they would fragment it. Threads
    other than the first have their own heaps, which are unmapped when they are empty.
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
    """Turn on expandable segments for new allocations; existing segments stay unchanged."""
    set_allocator(allocator_options(environ, True))
    try:
        yield
    finally:
        set_allocator(allocator_options(environ, None))


def allocator_options(environ: Mapping[str, str], grows: bool | None) -> str:
    """The user's allocator options with expandable segments set; None: the user's value, or torch's default.

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
