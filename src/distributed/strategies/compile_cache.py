"""The cache of compiled code: kept for later runs and restarts, so that a rank that comes back does not compile again.

torch's compiler knows by itself what fits: code is found by a hash of the graph, its settings, the versions and the
device. It writes files whole or not at all, so ranks may share one folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from distributed.core.env import environ_with, user_cache
from distributed.core.plan import Plan

_FOLDER = "TORCHINDUCTOR_CACHE_DIR"


def compile_folder(plan: Plan, environ: Mapping[str, str]) -> Path:
    """The plan's folder or the user's, and in it one for each version of torch."""
    base = (
        Path(plan.memory.compile_cache).expanduser() if plan.memory.compile_cache else user_cache(environ) / "compile"
    )
    return base.absolute() / f"torch-{torch.__version__}"


@contextmanager
def compile_cache(plan: Plan) -> Iterator[None]:
    """What is compiled while this lasts is kept. A folder that the user has set in the environment is left alone."""
    if not plan.memory.compile or _is_the_users(os.environ):
        yield
        return
    folder = compile_folder(plan, os.environ)
    folder.mkdir(parents=True, exist_ok=True)
    with environ_with({_FOLDER: str(folder)}):
        yield


def _is_the_users(environ: Mapping[str, str]) -> bool:
    """torch writes its own default into the environment as soon as it has looked for the folder."""
    given = environ.get(_FOLDER)
    if not given:
        return False
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # takes long to import

    return Path(given) != Path(default_cache_dir())
