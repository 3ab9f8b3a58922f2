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
        r"(\d+(?:\.\d+)?)\s*(epoch|step|minute|validation)s?",
        str(value).strip() + (" epochs" * isinstance(value, int)),
    )
    count = float(match.group(1)) if match else 0.0
    if not match or count <= 0 or (match.group(2) != "minute" and count != int(count)):
        raise ValueError(
            "should be a number of epochs, or like '2 epochs', '500 steps', '10 minutes' or '1 validation'"
        )
    unit = cast(FrequencyUnit, match.group(2) + "s")
    return (count if unit == "minutes" else int(count)), unit


def parse_interval(value: int | float | str) -> tuple[float, FrequencyUnit]:
    """How often something happens within epochs or after some: a whole number counts steps, a part is one of an epoch.

    >>> parse_interval(200), parse_interval(0.25), parse_interval("10 minutes"), parse_interval("2 epochs")
    ((200, 'steps'), (0.25, 'epochs'), (10.0, 'minutes'), (2, 'epochs'))
    """
    text = str(value).strip()
    if re.fullmatch(r"\d+", text):
        text += " steps"
    elif re.fullmatch(r"\d*\.\d+", text):
        text += " epochs"
    match = re.fullmatch(r"(\d+|\d*\.\d+)\s*(epoch|step|minute)s?", text)
    count = float(match.group(1)) if match else 0.0
    is_part = match is not None and match.group(2) == "epoch" and count <= 1
    if not match or count <= 0 or not (is_part or match.group(2) == "minute" or count == int(count)):
        raise ValueError("should be a number of steps, a part of an epoch such as 0.25, '10 minutes' or '2 epochs'")
    unit = cast(FrequencyUnit, match.group(2) + "s")
    return (count if unit == "minutes" or count != int(count) else int(count)), unit


def parse_start(value: int | str) -> tuple[int, FrequencyUnit]:
    """From when on something happens: after so many steps, or epochs.

    >>> parse_start(500), parse_start("500 steps"), parse_start("2 epochs")
    ((500, 'steps'), (500, 'steps'), (2, 'epochs'))
    """
    match = re.fullmatch(r"(\d+)\s*(epoch|step)s?", f"{value} steps" if str(value).isdigit() else str(value).strip())
    if not match or not int(match.group(1)):
        raise ValueError("should be a number of steps, or like '500 steps' or '2 epochs'")
    return int(match.group(1)), cast(FrequencyUnit, match.group(2) + "s")


_UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}


def parse_duration(value: str) -> float:
    """The seconds of a time that is written with its units.

    >>> parse_duration("2h30m"), parse_duration("1.5 hours"), parse_duration("1d 90s")
    (9000.0, 5400.0, 86490.0)
    """
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*(d|h|m|s)(?:ays?|ours?|in(?:ute)?s?|ec(?:ond)?s?)?\s*", value.strip())
    whole = r"(?:\d+(?:\.\d+)?\s*(?:d(?:ays?)?|h(?:ours?)?|m(?:in(?:ute)?s?)?|s(?:ec(?:ond)?s?)?)\s*)+"
    seconds = sum(float(count) * _UNITS[unit] for count, unit in parts)
    if not re.fullmatch(whole, value.strip()) or not seconds:
        raise ValueError("should be a time with its units, like '2h30m', '90 minutes' or '45s'")
    return seconds


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
