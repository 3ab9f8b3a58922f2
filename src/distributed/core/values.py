"""Settings that are written as text: how often something happens, and which is the best of several."""

from __future__ import annotations

import re


def parse_frequency(value: int | str) -> tuple[float, str]:
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
    unit = match.group(2) + "s"
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
        raise ValueError(f"say which is best: 'min:{metric}' or 'max:{metric}'")
    return direction, metric
