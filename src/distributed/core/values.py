"""Settings that are written as text: how often something happens, which is the best of several, what may change."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import cast

from distributed.core.choices import FrequencyUnit
from distributed.core.registry import nearest_hint

# What a resumed run may change only with allow_change: samples would be repeated, left out, or trained otherwise.
CHANGES = (
    "seed",
    "shuffle",
    "sampler",
    "data",
    "batch",
    "ranks",
    "iterable_split",
    "loss",
    "optimizer",
    "groups",
    "scheduler",
)


def parse_frequency(value: int | str) -> tuple[float, FrequencyUnit]:
    """How often, and in what.

    >>> parse_frequency(10), parse_frequency("500 steps"), parse_frequency("1.5 minutes")
    ((10, 'epochs'), (500, 'steps'), (1.5, 'minutes'))
    """
    match = re.fullmatch(
        r"(\d+(?:\.\d+)?)\s*(epoch|step|minute)s?", str(value).strip() + (" epochs" * isinstance(value, int))
    )
    count = float(match.group(1)) if match else 0.0
    if not match or count <= 0 or (match.group(2) != "minute" and count != int(count)):
        raise ValueError("should be a number of epochs, or like '2 epochs', '500 steps' or '10 minutes'")
    unit = cast(FrequencyUnit, match.group(2) + "s")
    return (count if unit == "minutes" else int(count)), unit


def parse_best(value: str) -> tuple[str, str]:
    """Whether the least or the most is best, and of which metric.

    >>> parse_best("val_loss"), parse_best("val_accuracy"), parse_best("min:val_mae")
    (('min', 'val_loss'), ('max', 'val_accuracy'), ('min', 'val_mae'))
    """
    direction, _, metric = value.rpartition(":")
    if not direction:
        direction = "min" if metric.endswith("loss") else "max" if metric.endswith("accuracy") else ""
    if direction not in ("min", "max") or not metric:
        raise ValueError(f"write 'min:{metric}' or 'max:{metric}'")
    return direction, metric


def parse_changes(value: str | Sequence[str]) -> tuple[str, ...]:
    """The names of what may have changed since a checkpoint.

    >>> parse_changes("seed, shuffle"), parse_changes(["loss"])
    (('seed', 'shuffle'), ('loss',))
    """
    listed = value.split(",") if isinstance(value, str) else value
    names = tuple(dict.fromkeys(name.strip() for name in listed if name.strip()))
    for name in names:
        if name not in CHANGES:
            raise ValueError(f"{name!r} is not a change that can be allowed; {nearest_hint(name, CHANGES)}")
    if not names:
        raise ValueError(f"should name some of: {', '.join(CHANGES)}")
    return names
