"""The averages of a checkpoint: copies of the model that callbacks keep, each under a name, as if it were the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from distributed.checkpoint.exchange.catalog import Opened
from distributed.checkpoint.format.manifest import Manifest
from distributed.core.errors import CheckpointError

COMPONENT = "copies"


def averages_in(manifest: Manifest) -> Mapping[str, Mapping[str, Any]]:
    """By name, the skeleton of each."""
    found = manifest.shared.skeleton.get(COMPONENT, {})
    return found if isinstance(found, dict) else {}


def choose_average(manifest: Manifest, wanted: str, path: str) -> str:
    """The name of the one that is wanted, or of the only one; raises where there is none, or several."""
    names = sorted(averages_in(manifest))
    if wanted in names:
        return wanted
    if not wanted and len(names) == 1:
        return names[0]
    if not names:
        raise CheckpointError(
            f"{path} holds no averaged weights",
            why="none of the run's callbacks had averaged any when it was saved",
            do="Trainer(…, callbacks=[callbacks.EMA(0.999)])",
        )
    what = f"has no {wanted!r}" if wanted else "has averages of several callbacks"
    raise CheckpointError(
        f"{path} {what}", why=f"it has those of {', '.join(names)}", do=f"name one of them: {names[0]!r}"
    )


def as_model(checkpoint: Opened, wanted: str = "") -> Opened:
    """The same checkpoint with averaged weights in place of the model's; what is not averaged stays the model's."""
    manifest = checkpoint.manifest
    average = averages_in(manifest)[choose_average(manifest, wanted, checkpoint.path)]
    model = manifest.shared.skeleton["model"]
    merged = {name: average.get(name, value) for name, value in model.items()}
    shared = replace(manifest.shared, skeleton={**manifest.shared.skeleton, "model": merged})
    return replace(checkpoint, manifest=replace(manifest, shared=shared))
