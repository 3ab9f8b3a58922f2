"""A picture for each benchmark, drawn from what `--json` writes: a committed file can be drawn at any time."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median
from typing import Any

from distributed.bench.panels import Bar, Bars, Lines, Panel, Point, Series, stack
from distributed.core.errors import ConfigError
from distributed.observe.svg import short

Record = dict[str, Any]

_OURS, _HAND, _PEER = "#3b528b", "#9aa0a6", "#5ec962"
_SERIES = ("#440154", "#3b6fb6", "#1f9e89", "#d98200")  # apart in lightness too
_LEGEND = (("ours", _OURS), ("by hand", _HAND), ("peers", _PEER))
_BY_HAND = ("bare", "bare-again", "best-bare", "floor", "copy", "bare loop, compiled")
_HAND_PREFIX = "by hand: "


def draw(record: Record) -> str:
    """The picture as text."""
    # The files of `strategies` were the first, and do not say what they are.
    kind = record.get("benchmark", "strategies")
    if kind not in _DRAWN:
        raise ConfigError(f"there is no picture of a benchmark {kind!r}", do=f"one of: {', '.join(_DRAWN)}")
    return _DRAWN[kind](_known(record))


def _known(found: Any) -> Any:
    """The same without what is not a number: it is as if it had not been measured."""
    if isinstance(found, dict):
        return {key: _known(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [_known(value) for value in found]
    return None if isinstance(found, float) and not math.isfinite(found) else found


def _throughput(record: Record) -> str:
    panels = []
    for result in record["workloads"]:
        bars = [
            _bar(row["contender"], row["units_per_second"], _rate(row), spread=_between(row["low"], row["high"]))
            for row in result["rows"]
        ]
        about = f"{result['unit']} a second, batch {result['batch']}; {_rounds(result['rounds'], 'round')}"
        about += f"; ×: of {result['reference']}"
        if result["losses_agree"] is False:
            about += "; LOSSES DO NOT AGREE: not all may have trained the same"
        panels.append(Bars(f"{result['workload']}: {result['describes']}", about, tuple(bars)))
    note = "bar: median; line: quartiles"
    return stack("Throughput: whole trainings, by turns", _where(record), panels, note, _LEGEND)


def _rate(row: Record) -> str:
    peak = of_peak(row)
    return f"{short(row['units_per_second'] or 0)} · {_say('{:.2f}', row['ratio'])} ×{peak and f', {peak}'}"


def of_peak(row: Record) -> str:
    """What a contender has of the device's operations, in words; nothing where that is not known.

    >>> of_peak({"contender": "ours", "part_of_peak": 0.61}), of_peak({"contender": "ours", "part_of_peak": None})
    ('61% of peak', '')
    """
    part = row["part_of_peak"]
    whose = "bf16's peak" if row["contender"] == "ours-fp8" else "peak"
    return "" if part is None else f"{part:.{0 if part >= 0.01 else 1}%} of {whose}"


def _overhead(record: Record) -> str:
    floor, limit = record["noise_floor_us"], record["target_over_us"]
    bars = [
        _bar(
            row["contender"],
            row["over_us"],
            f"{_say('{:+.0f}', row['over_us'])} ± {_say('{:.0f}', row['over_error_us'])} µs",
            spread=_around(row["over_us"], row["over_error_us"]),
        )
        for row in record["rows"]
    ]
    engine, settings = record["settings"].get("engine", "pytorch-ddp"), record["settings"]
    about = f"µs a step; {settings['rounds']} rounds of {settings['steps']} steps"
    title = f"CPU time of Python's threads over a loop by hand ({engine})"
    panel = Bars(title, about, tuple(bars), (limit, f"our limit: {limit:g} µs"), _around(0.0, floor))
    note = f"bar: median of the rounds; line: its error; grey: noise, ± {_say('{:.0f}', floor)} µs"
    return stack("Overhead: what a trainer costs", _where(record), [panel], note, _LEGEND)


def _scaling(record: Record) -> str:
    title, rows = "Scaling: what another process brings", record["rows"]
    if not rows:
        return stack(title, _where(record), [], "")
    own = tuple(Point(row["processes"], row["samples_per_second"], _efficiency(row)) for row in rows)
    most = rows[-1]["processes"]
    ideal = (Point(0, 0), Point(most, (rows[0]["samples_per_second"] or 0) / rows[0]["processes"] * most))
    series = (Series("linear", _HAND, ideal, is_dashed=True), Series("ours", _OURS, own))
    ticks = tuple((row["processes"], str(row["processes"])) for row in rows)
    panel = Lines("samples a second by processes", record["kind"], series, ticks)
    note = "%: efficiency, the speed-up by processes; the fastest run of each size"
    return stack(title, _where(record), [panel], note)


def _efficiency(row: Record) -> str:
    return f"{short(row['samples_per_second'] or 0)} · {_say('{:.0%}', row['efficiency'])}"


def _collectives(record: Record) -> str:
    operations = list(dict.fromkeys(row["operation"] for row in record["rows"]))
    sizes = sorted({row["size_bytes"] for row in record["rows"]})
    ticks = tuple((size, _size(size)) for size in sizes)

    def lines(title: str, about: str, points: Callable[[Record], Point], figure: Callable[[Record], str]) -> Lines:
        series = []
        for operation, colour in zip(operations, _SERIES * len(operations), strict=False):
            rows = sorted((r for r in record["rows"] if r["operation"] == operation), key=lambda r: r["size_bytes"])
            series.append(Series(f"{operation} {figure(rows[-1])}", colour, tuple(points(row) for row in rows)))
        return Lines(title, about, tuple(series), ticks, is_log=True)

    largest = _size(sizes[-1]) if sizes else "?"
    panels = [
        lines(
            "latency: µs a call, by size of the message",
            f"line: median of the rounds, with quartiles; at the end: at {largest}",
            lambda row: Point(row["size_bytes"], row["latency_us"], spread=_between(row["low_us"], row["high_us"])),
            lambda row: _microseconds(row["latency_us"]),
        ),
        lines(
            "bus bandwidth: GB/s on each link, by size of the message",
            f"10⁹ bytes a second, whatever the operation and the number of processes; at the end: at {largest}",
            lambda row: Point(row["size_bytes"], row["bus_gb_s"]),
            lambda row: f"{_say('{:.3g}', row['bus_gb_s'])} GB/s",
        ),
    ]
    left_out = f"; left out: {', '.join(record['missing'])}" if record["missing"] else ""
    note = f"{record['settings']['backend']}; axes are logarithmic{left_out}"
    return stack("Collectives: what sending costs", _where(record), panels if sizes else [], note)


def _checkpoint(record: Record) -> str:
    rows, limit = record["rows"], record["limits"]["stall"]
    floor = next((row["stall_s"] for row in rows if row["name"] == "copy"), None)
    stalls = tuple(_bar(row["name"], row["stall_s"], _stall(row["stall_s"], floor)) for row in rows)
    whole = tuple(_bar(row["name"], row["total_s"], _written(row)) for row in rows if row["total_s"] is not None)
    panels = [
        Bars(
            "stall: seconds that training stands still",
            f"{record['state_mib']:.0f} MiB of state; median of {record['rounds']} rounds",
            stalls,
            (limit * floor, f"our limit: {limit:g} × the copy") if floor else None,
        )
    ]
    panels += [Bars("on disk: seconds until all of it is written", "the same saves", whole)] if whole else []
    if cost := record.get("bitwise"):
        about = f"{cost['virtual_ranks']} virtual ranks on {cost['processes']} processes"
        paces = {mode: cost[f"{mode}_samples_per_second"] for mode in ("normal", "bitwise")}
        bars = tuple(_bar(mode, rate, short(rate or 0), is_ours=True) for mode, rate in paces.items())
        panels.append(Bars("reproducible: samples a second of the two modes", about, bars))
    note = "copy: a plain clone of the same bytes" if record["device"] == "cpu" else "copy: to pinned host memory"
    legend = (("ours", _OURS), ("plain copy", _HAND), ("torch's own", _PEER))
    return stack("Checkpoint: what a save costs", _where(record), panels, note, legend)


def _stall(stall: float | None, floor: float | None) -> str:
    part = f" · {stall / floor:.2f} × the copy" if stall is not None and floor else ""
    return f"{_say('{:.3f}', stall)} s{part}"


def _written(row: Record) -> str:
    written = f" · {row['written_mib']:.0f} MiB written" if row["written_mib"] is not None else ""
    return f"{row['total_s']:.2f} s{written}"


def _recovery(record: Record) -> str:
    limits = {bar["name"]: bar["limit"] for bar in record["bars"]}
    kills = tuple(
        _bar(row["side"], row["p50_s"], _percentiles(row), dots=tuple(row["seconds"])) for row in record["rows"]
    )
    starts = tuple(
        _bar(side, median(taken), f"{median(taken):.2f} s", dots=tuple(taken))
        for side, taken in record["starts_s"].items()
        if taken
    )
    limit = limits.get("recovery, p50, at most")
    settings = record["settings"]
    panels = [
        Bars(
            "recovery: seconds from SIGKILL of a rank until all ranks train again",
            f"{settings['ranks']} ranks, a kill at a time",
            kills,
            None if limit is None else (limit, f"our limit for the median: {limit:g} s"),
        ),
        Bars(
            "start: seconds from the command until all ranks have made a step",
            f"{settings['start_ranks']} ranks",
            starts,
        ),
    ]
    legend = (("ours", _OURS), ("torchrun with a loop by hand", _PEER))
    return stack("Recovery: what a killed rank costs", _where(record), panels, "bar: median; circle: each one", legend)


def _percentiles(row: Record) -> str:
    p50, p95 = (_say("{:.2f}", row[name]) for name in ("p50_s", "p95_s"))
    return f"p50 {p50} s, p95 {p95} s · {row['recovered']} of {row['kills']}"


def _start(record: Record) -> str:
    rows = record["rows"]
    bars: list[Bar] = []
    for peer in dict.fromkeys(row["peer"] or row["name"] for row in rows):  # each engine above who starts it by hand
        for row in sorted((r for r in rows if (r["peer"] or r["name"]) == peer), key=lambda r: not r["peer"]):
            dots = tuple(start["first_step_s"] for start in row["starts"]) if len(row["starts"]) > 1 else ()
            part = f" · {row['of_peer']:.2f} × by hand" if row["of_peer"] is not None else ""
            name = row["name"] if row["peer"] else f"{_HAND_PREFIX}{row['name']}"
            label = f"{_say('{:.2f}', row['first_step_s'])} s{part}"
            bars.append(_bar(name, row["first_step_s"], label, dots=dots, is_ours=bool(row["peer"])))
    number = record["settings"]["repeats"]
    about = f"each engine above the same training started by hand; {_rounds(number, 'start')}"
    panel = Bars("seconds from the command to the end of the first step", about, tuple(bars))
    note = "bar: median; circle: each start" if number > 1 else "bar: one start"
    return stack("Start: how long until training begins", _where(record), [panel], note, _LEGEND[:2])


def _strategies(record: Record) -> str:
    times = tuple(
        _bar(
            row["name"],
            row["step_ms"],
            f"{_say('{:.1f}', row['step_ms'])} ms · {_say('{:.2f}', row['ratio'])} ×",
            spread=_around(row["step_ms"], row["spread_ms"]),
            is_ours=row["name"] not in _BY_HAND,
        )
        for row in record["rows"]
    )
    peaks = tuple(
        _bar(
            row["name"], row["peak_gib"], f"{_say('{:.1f}', row['peak_gib'])} GiB", is_ours=row["name"] not in _BY_HAND
        )
        for row in record["rows"]
    )
    millions = record["parameters"] / 1e6
    about = f"GPT of {millions:,.1f} M parameters, {record['tokens']:,} tokens a step, {record['precision']}"
    panels: list[Panel] = [Bars("time: ms a step", about, times)]
    if any(bar.value is not None for bar in peaks):
        panels.append(Bars("memory: peak GiB on the device", "of those that ran alone", peaks))
    note = "×: of the loop by hand; line: spread of the rounds"
    return stack("Strategies: what a way of training costs", _where(record), panels, note, _LEGEND[:2])


def _tune(record: Record) -> str:
    limit, settings = record["target_ratio"], record["settings"]
    bars = tuple(
        _bar(
            row["side"],
            row["ratio"],
            f"{_say('{:.2f}', row['ratio'])} × · {median(search['wall_s'] for search in row['searches']):.1f} s",
            dots=tuple(search["ratio"] for search in row["searches"]) if len(row["searches"]) > 1 else (),
        )
        for row in record["rows"]
    )
    about = f"{settings['trials']} trials of {settings['steps']} steps, {settings['parallel']} at a time"
    panel = Bars("wall time of a search over its ideal", about, bars, (limit, f"our limit: {limit:g}"))
    note = "ideal: the sum of the trials' own times by trials at a time; bar: median of the searches"
    return stack("Tune: what a search costs beside its trials", _where(record), [panel], note, (_LEGEND[0], _LEGEND[2]))


_DRAWN: dict[str, Callable[[Record], str]] = {
    "throughput": _throughput,
    "overhead": _overhead,
    "scaling": _scaling,
    "collectives": _collectives,
    "checkpoint": _checkpoint,
    "recovery": _recovery,
    "start": _start,
    "strategies": _strategies,
    "tune": _tune,
}


def _bar(
    name: str,
    value: float | None,
    label: str,
    *,
    spread: tuple[float, float] | None = None,
    dots: tuple[float, ...] = (),
    is_ours: bool | None = None,
) -> Bar:
    """In the colour of who it is: ours, by the name where it is not said; by hand; or a peer."""
    is_hand = name in _BY_HAND or name.startswith(_HAND_PREFIX)
    if is_ours is None:
        is_ours = name.startswith(("ours", "save"))
    return Bar(name, value, label, _OURS if is_ours else _HAND if is_hand else _PEER, is_ours, spread, dots)


def _say(form: str, value: float | None) -> str:
    """
    >>> _say("{:.2f}", 1.5), _say("{:.2f}", None)
    ('1.50', '?')
    """
    return form.format(value) if value is not None else "?"


def _between(low: float | None, high: float | None) -> tuple[float, float] | None:
    return None if low is None or high is None else (low, high)


def _around(value: float | None, error: float | None) -> tuple[float, float] | None:
    return None if value is None or error is None else (value - error, value + error)


def _where(record: Record) -> str:
    """On what it was measured, and under which load."""
    settings, machine = record.get("settings", {}), record["machine"]
    device = settings.get("device") or record.get("device") or ("cuda" if settings.get("backend") == "nccl" else "cpu")
    parts = [
        machine["gpus"][0] if device != "cpu" and machine["gpus"] else f"{machine['cpu']}, {machine['cores']} cores"
    ]
    number = settings.get("processes") or settings.get("ranks")
    parts += [_times(number, "process")] if number else []
    parts += [settings["precision"]] if "precision" in settings else []
    parts.append(f"torch {record['versions'].get('torch', '?')}")
    load = record.get("load_average") or {name: record.get(f"load_{name}") for name in ("before", "after")}
    if load["before"] is not None and load["after"] is not None:
        parts.append(f"load average {load['before']} before, {load['after']} after")
    return "; ".join(parts)


def _rounds(number: int, what: str) -> str:
    """
    >>> _rounds(1, "round"), _rounds(3, "start")
    ('one round, which has no spread', 'median of 3 starts')
    """
    return f"median of {_times(number, what)}" if number > 1 else f"one {what}, which has no spread"


def _times(number: int, what: str) -> str:
    """
    >>> _times(1, "start"), _times(2, "process")
    ('1 start', '2 processes')
    """
    ending = "" if number == 1 else "es" if what.endswith("s") else "s"
    return f"{number} {what}{ending}"


def _microseconds(taken: float | None) -> str:
    """
    >>> _microseconds(937.4), _microseconds(4870.0)
    ('937 µs', '4.87 ms')
    """
    if taken is None or taken < 1e3:
        return f"{_say('{:.3g}', taken)} µs"
    return f"{taken / 1e3:.3g} ms"


def _size(size: int) -> str:
    """
    >>> _size(1024), _size(2**26), _size(100)
    ('1 KiB', '64 MiB', '100 B')
    """
    for unit, word in ((2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:g} {word}"
    return f"{size} B"
