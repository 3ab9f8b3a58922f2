"""DeepSpeed's compiled ops: a folder of our own, built once by one process, never waiting for a stale lock.

DeepSpeed compiles an op when it is first used. A process that is killed meanwhile leaves torch's `lock` file behind,
and every later one waits for it for ever. Here the process that builds holds a lock that ends with it, and takes a
file that was left away. `python -m distributed.engines.deepspeed.ops` builds ahead.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from distributed.core.env import announce, inherited_environ, user_cache
from distributed.core.errors import PlanError
from distributed.core.registry import import_extra

_BUILDERS = {
    "async_io": "AsyncIOBuilder",
    "cpu_adam": "CPUAdamBuilder",
    "cpu_adagrad": "CPUAdagradBuilder",
    "cpu_lion": "CPULionBuilder",
    "fused_adam": "FusedAdamBuilder",
}
_FOLDER = "TORCH_EXTENSIONS_DIR"
_ABANDONED_S = 1800.0  # after which a lock in a folder that is not ours cannot be of a compiler that still runs
_LOOK_S = 0.5
# Each source reads torch's headers, which takes most of the time: one file that includes all of them is built in a
# fraction of it. These may not be put together, as they define the same names.
_COMPILED_SEPARATELY = "/common/"


def ops_folder(environ: Mapping[str, str]) -> Path:
    """Where compiled ops lie: the user's choice, or one folder for each set of versions that must fit together.

    And for each environment: the compiler is given its paths, and others would build all of it again.
    """
    if environ.get(_FOLDER):
        return Path(environ[_FOLDER])
    versions = f"torch-{version('torch')}_deepspeed-{version('deepspeed')}_py{platform.python_version()}"
    place = hashlib.sha256(torch.__path__[0].encode()).hexdigest()[:8]
    return user_cache(environ) / "deepspeed-ops" / f"{versions}_{place}"


def needed_ops(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The ops that an engine of this configuration loads when it is made.

    >>> needed_ops({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}})
    ('async_io',)
    >>> needed_ops({"zero_optimization": {"stage": 2}})
    ()
    """
    zero = config.get("zero_optimization", {})
    offloads = {(zero.get(key) or {}).get("device", "none") for key in ("offload_optimizer", "offload_param")}
    found = ["async_io"] if "nvme" in offloads and zero.get("stage") == 3 else []
    optimizer = config.get("optimizer") or {}
    kind, on_host = str(optimizer.get("type", "")).lower(), bool((zero.get("offload_optimizer") or {}).get("device"))
    if kind in ("adam", "adamw") and not optimizer.get("params", {}).get("torch_adam"):
        found.append("cpu_adam" if on_host else "fused_adam")
    elif kind in ("adagrad", "lion") and on_host:
        found.append(f"cpu_{kind}")
    return tuple(found)


def check_ops(names: tuple[str, ...], environ: Mapping[str, str] | None = None) -> None:
    """Raise what is missing to build those that are not built yet."""
    environ = inherited_environ() if environ is None else environ
    missing = [name for name in names if not (ops_folder(environ) / name / f"{name}.so").exists()]
    if not missing:
        return
    compiler = shutil.which(environ.get("CXX", "c++"))
    if compiler is None:
        raise _cannot_build(missing[0], "there is no C++ compiler")
    if "async_io" in missing:
        probe = [compiler, "-E", "-x", "c++", "-o", os.devnull, "-"]
        if subprocess.run(probe, input=b"#include <libaio.h>\n", capture_output=True, check=False).returncode:
            raise _cannot_build("async_io", "the headers of libaio are not there")


def import_deepspeed(device: str) -> Any:
    """DeepSpeed for this device, without most of what it says, and compiling nothing that is not needed.

    It looks which ops could be compiled, which takes a compiler some seconds, only to compile one that sends through
    shared memory; whether that is there must not change what a run computes. And it imports MLflow, where that is
    installed, for its autotuning, which is refused here: that takes nine tenths of the time of its import.
    """
    if device == "cpu":
        announce({"DS_ACCELERATOR": "cpu"})  # read when it is imported
    with _Hidden("mlflow"):
        deepspeed = import_extra("deepspeed", "deepspeed", "strategy 'deepspeed'")
    old_names = "`torch.distributed.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated"  # DeepSpeed's calls
    warnings.filterwarnings("ignore", message=old_names, category=FutureWarning)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
    return deepspeed


class _Hidden:
    """A module that this thread does not find for a while, unless it was imported before."""

    def __init__(self, name: str) -> None:
        self._name, self._thread = name, threading.get_ident()

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == self._name and threading.get_ident() == self._thread:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    def __enter__(self) -> None:
        sys.meta_path.insert(0, self)  # type: ignore[arg-type]

    def __exit__(self, *exception: object) -> None:
        sys.meta_path.remove(self)  # type: ignore[arg-type]


def load_ops(names: tuple[str, ...], verbose: bool = False) -> None:
    """Load them into this process, where DeepSpeed finds them; the first process builds, the others wait."""
    if not names:
        return
    environ = inherited_environ()
    check_ops(names, environ)
    from deepspeed.accelerator import get_accelerator

    folder = ops_folder(environ)
    for name in names:
        if not (folder / name / f"{name}.so").exists():
            print(f"compiling DeepSpeed's op {name} into {folder}, once; it takes minutes", file=sys.stderr, flush=True)
        with _alone(folder, name):
            if name == "async_io":
                _load(get_accelerator().create_op_builder("PinMemoryBuilder"), "pin_memory", folder, environ, verbose)
            _load(get_accelerator().create_op_builder(_BUILDERS[name]), name, folder, environ, verbose)


def _load(builder: Any, name: str, folder: Path, environ: Mapping[str, str], verbose: bool) -> None:
    _remove_abandoned(folder / name / "lock", is_ours=ops_folder({**environ, _FOLDER: ""}) == folder)
    if builder is None:
        raise _cannot_build(name, "DeepSpeed has no such op for this device")
    if name in ("pin_memory", "async_io"):
        _put_together(builder, folder / f"sources-{name}")
    try:
        builder.load(verbose=verbose)
    except (RuntimeError, subprocess.SubprocessError, OSError) as failed:
        raise _cannot_build(name, str(failed).strip().splitlines()[0]) from failed


def _put_together(builder: Any, root: Path) -> None:
    """Make a builder compile one file in place of many; its headers have no guards, so copies of them get some."""
    sources, folders = builder.sources(), builder.include_paths()
    if not all(folder.startswith("csrc/") for folder in [*sources, *folders]):
        return  # built otherwise in this version or for this device
    for path in {Path(name).parent for name in sources} | {Path(folder) for folder in folders}:
        for origin in Path(builder.deepspeed_src_path(str(path))).glob("*.[hc]*"):
            _write(root / path / origin.name, ("#pragma once\n" * (origin.suffix == ".h")) + origin.read_text())
    separate = [str(root / name) for name in sources if _COMPILED_SEPARATELY in name]
    merged = root / "together.cpp"
    _write(merged, "".join(f'#include "{root / name}"\n' for name in sources if _COMPILED_SEPARATELY not in name))
    builder.sources = lambda: [str(merged), *separate]
    builder.include_paths = lambda: [str(root / folder) for folder in folders]


def _write(path: Path, text: str) -> None:
    """Only what is new, as a file that is younger than what was built of it is built again."""
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@contextmanager
def _alone(folder: Path, name: str) -> Iterator[None]:
    """One process of this machine at a time; the system gives the lock back when its holder ends, however it does."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"building-{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _remove_abandoned(lock: Path, is_ours: bool) -> None:
    """In our own folder no other process builds. In the user's, one may, and is waited for."""
    if not is_ours and lock.exists():
        print(f"waiting for the process that holds {lock}; if none compiles: rm {lock}", file=sys.stderr, flush=True)
    while not is_ours and lock.exists() and time.time() - lock.stat().st_mtime < _ABANDONED_S:
        time.sleep(_LOOK_S)
    lock.unlink(missing_ok=True)


def _cannot_build(name: str, why: str) -> PlanError:
    return PlanError(
        f"DeepSpeed's op {name!r} is compiled when it is first needed, and that is not possible here",
        why=why,
        do="apt-get install g++ libaio-dev (or its like), then: python -m distributed.engines.deepspeed.ops",
    )


def main() -> None:
    """Build what NVMe offload needs, and any op that is named."""
    names = tuple(sys.argv[1:]) or ("async_io",)
    unknown = [name for name in names if name not in _BUILDERS]
    if unknown:
        sys.exit(f"not known: {', '.join(unknown)}; there are {', '.join(_BUILDERS)}")
    announce({_FOLDER: str(ops_folder(inherited_environ()))})
    import_deepspeed("cuda" if torch.cuda.is_available() else "cpu")
    began = time.monotonic()
    try:
        load_ops(names)
    except PlanError as failed:
        sys.exit(str(failed))
    print(f"{', '.join(names)}: ready in {ops_folder(inherited_environ())} after {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
