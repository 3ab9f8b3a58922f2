"""The environment of a rank that DeepSpeed's own launcher started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from distributed.core.env import WorkerEnv, read_torch_env

_WORDS = {"LOCAL_SIZE": "LOCAL_WORLD_SIZE", "CROSS_RANK": "GROUP_RANK", "CROSS_SIZE": "GROUP_WORLD_SIZE"}


def read_env(environ: Mapping[str, str]) -> WorkerEnv:
    """This rank's place, from the variables of DeepSpeed's launcher."""
    renamed = {theirs: environ[own] for own, theirs in _WORDS.items() if own in environ}
    found = read_torch_env({name: text for name, text in environ.items() if name not in _WORDS.values()} | renamed)
    return replace(found, launcher="deepspeed") if found.launcher == "torchrun" else found
