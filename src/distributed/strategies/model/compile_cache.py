"""The cache of compiled code, kept for later runs, so that a restarted rank does not compile again.

torch's compiler finds valid code by a hash of the graph, its settings, the versions and the device. It writes files
atomically, so ranks may share one folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from distributed.core.env import environ_with, inherited_environ, user_cache
from distributed.core.plan import Plan
from distributed.runtime.torch_compat import default_compile_cache

_FOLDER = "TORCHINDUCTOR_CACHE_DIR"


def compile_folder(plan: Plan, environ: Mapping[str, str]) -> Path:
    """The cache folder of the plan or the user, with one sub-folder for each version of torch."""
    base = (
        Path(plan.memory.compile_cache).expanduser() if plan.memory.compile_cache else user_cache(environ) / "compile"
    )
    return base.absolute() / f"torch-{torch.__version__}"


@contextmanager
def compile_cache(plan: Plan) -> Iterator[None]:
    """A scope in which compiled code is cached. A folder that the user set in the environment is kept."""
    if not plan.memory.compile or _is_the_users(inherited_environ()):
        yield
        return
    folder = compile_folder(plan, inherited_environ())
    folder.mkdir(parents=True, exist_ok=True)
    with environ_with({_FOLDER: str(folder)}):
        yield


def _is_the_users(environ: Mapping[str, str]) -> bool:
    """Whether the folder in the environment is the user's; torch writes its own default there too."""
    given = environ.get(_FOLDER)
    if not given:
        return False
    return Path(given) != Path(default_compile_cache())
