"""Launchers by the name that a rank knows: ours, those of schedulers and those of engines."""

from __future__ import annotations

from collections.abc import Iterator

from distributed.core.engines.engine import ENGINES, LauncherTraits

OURS = "distributed"  # the one of this machine

_KNOWN = {
    OURS: LauncherTraits(OURS, is_ours=True, regroups=True, shows_one_gpu=True),
    "srun": LauncherTraits("srun", shows_one_gpu=True),
}


def launchers_of_engines() -> Iterator[LauncherTraits]:
    return (engine.launcher for engine in ENGINES.entries.values() if engine.launcher is not None)


def launcher_of(name: str) -> LauncherTraits:
    """What is known of a launcher; nothing of torchrun, mpirun and others.

    >>> launcher_of("distributed").regroups, launcher_of("mpirun").regroups
    (True, False)
    """
    known = _KNOWN | {launcher.name: launcher for launcher in launchers_of_engines()}
    return known.get(name, LauncherTraits(name))
