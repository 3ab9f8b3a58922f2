"""A picture for each benchmark, drawn from what `--json` writes: a committed file can be drawn at any time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from distributed.core.errors import ConfigError
from distributed.observe.charts import Bar, Bars, Lines, Point, Series, Sheet, short

Record = dict[str, Any]
Drawings = Mapping[str, Callable[[Record], Sheet]]

OURS, HAND, PEER = "#3b528b", "#9aa0a6", "#5ec962"
_SERIES = ("#440154", "#3b6fb6", "#1f9e89", "#d98200")  # apart in lightness too
_LINEAR = "#666666"
LEGEND = (("ours", OURS), ("hand-written", HAND), ("peers", PEER))
HAND_WRITTEN = ("bare", "bare-again", "best-bare", "floor", "copy", "copy, memory kept", "bare loop, compiled")
HAND_PREFIX = "by hand: "


def draw(record: Record, form: str = "svg", drawings: Drawings | None = None) -> bytes:
    """The picture of a record as the bytes of a file."""
    known = drawings or DRAWINGS
    # The files of `strategies` were the first, and do not say what they are.
    kind = record.get("benchmark", "strategies")
    if kind not in known:
        raise ConfigError(f"there is no picture of a benchmark {kind!r}", do=f"choose one of: {', '.join(known)}")
    return known[kind](_known(record)).render(form)


def _known(found: Any) -> Any:
    """The same without what is not a number: it is as if it had not been measured."""
    if isinstance(found, dict):
        return {key: _known(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [_known(value) for value in found]
    return None if isinstance(found, float) and not math.isfinite(found) else found


def _throughput(record: Record) -> Sheet:
    panels = []
    for result in record["workloads"]:
        bars = [
            make_bar(row["contender"], row["units_per_second"], _rate(row), spread=_between(row["low"], row["high"]))
            for row in result["rows"]
        ]
        about = f"{result['unit']} a second, batch {result['batch']}; {rounds_of(result['rounds'], 'round')}"
        about += f"; ×: of {result['reference']}"
        if result["losses_agree"] is False:
            about += "; LOSSES DO NOT AGREE: not all may have trained the same"
        panels.append(Bars(f"{result['workload']}: {result['describes']}", about, tuple(bars)))
    note = "bar: median; line: quartiles"
    return Sheet("Throughput: whole trainings, interleaved", where(record), panels, note, LEGEND)


def _rate(row: Record) -> str:
    peak = of_peak(row)
    return f"{short(row['units_per_second'] or 0)} · {say('{:.2f}', row['ratio'])} ×{peak and f', {peak}'}"


def of_peak(row: Record) -> str:
    """What a contender has of the device's operations, in words; nothing where that is not known.

    >>> of_peak({"contender": "ours", "part_of_peak": 0.61}), of_peak({"contender": "ours", "part_of_peak": None})
    ('61% of peak', '')
    """
    part = row["part_of_peak"]
    whose = "bf16's peak" if row["contender"] == "ours-fp8" else "peak"
    return "" if part is None else f"{part:.{0 if part >= 0.01 else 1}%} of {whose}"


def _script(record: Record) -> Sheet:
    bars = [
        make_bar(
            _times(row["processes"], "rank"),
            row["samples_per_second"],
            f"{short(row['samples_per_second'] or 0)} · {say('{:.2f}', row['speed_up'])} ×, {_part(row)}",
            spread=_between(row["low"], row["high"]),
            is_ours=row["processes"] > 1,
        )
        for row in record["rows"]
    ]
    about = f"samples a second; {rounds_of(record['rounds'], 'round')}"
    about += "; ×: of one rank, %: of that for each rank; a device's batch is the same"
    panels = [Bars(f"{record['script']}: the same settings", about, tuple(bars))] if bars else []
    return Sheet("Throughput of your own training", where(record), panels, "bar: median; line: quartiles")


def _scaling(record: Record) -> Sheet:
    title, rows = "Scaling: what another process brings", record["rows"]
    if not rows:
        return Sheet(title, where(record), [], "")
    own = tuple(Point(row["processes"], row["samples_per_second"], _efficiency(row)) for row in rows)
    most = rows[-1]["processes"]
    ideal = (Point(0, 0), Point(most, (rows[0]["samples_per_second"] or 0) / rows[0]["processes"] * most))
    series = (Series("linear", _LINEAR, ideal, is_dashed=True), Series("ours", OURS, own))
    ticks = tuple((row["processes"], str(row["processes"])) for row in rows)
    panel = Lines("samples a second by processes", record["kind"], series, ticks)
    note = "%: efficiency, the speed-up by processes; the fastest run of each size"
    return Sheet(title, where(record), [panel], note)


def _efficiency(row: Record) -> str:
    return f"{short(row['samples_per_second'] or 0)} · {_part(row)}"


def _part(row: Record) -> str:
    return say("{:.0%}", row["efficiency"])


def _collectives(record: Record) -> Sheet:
    names = list(dict.fromkeys(operation_name(row) for row in record["rows"]))
    sizes = sorted({row["size_bytes"] for row in record["rows"]})
    ticks = tuple((size, _size(size)) for size in sizes)

    def lines(title: str, about: str, points: Callable[[Record], Point], figure: Callable[[Record], str]) -> Lines:
        series = []
        for name, colour in zip(names, _SERIES * len(names), strict=False):
            rows = sorted((r for r in record["rows"] if operation_name(r) == name), key=lambda r: r["size_bytes"])
            series.append(Series(f"{name} {figure(rows[-1])}", colour, tuple(points(row) for row in rows)))
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
            f"10⁹ bytes a second, comparable between operations and numbers of processes; at the end: at {largest}",
            lambda row: Point(row["size_bytes"], row["bus_gb_s"]),
            lambda row: f"{say('{:.3g}', row['bus_gb_s'])} GB/s",
        ),
    ]
    left_out = f"; left out: {', '.join(record['missing'])}" if record["missing"] else ""
    note = f"{record['settings']['backend']}; axes are logarithmic{left_out}"
    return Sheet("Collectives: what sending costs", where(record), panels if sizes else [], note)


def operation_name(row: Record) -> str:
    """The operation, and by which algorithm if that is not the backend's own; older files know no others.

    >>> operation_name({"operation": "all-reduce"}), operation_name({"operation": "all-reduce", "algorithm": "ring"})
    ('all-reduce', 'all-reduce ring')
    """
    algorithm = row.get("algorithm", "backend")
    return str(row["operation"]) if algorithm == "backend" else f"{row['operation']} {algorithm}"


def _pairs(record: Record) -> Sheet:
    rows = record["rows"]
    large = tuple(make_bar(row["name"], row["gb_s"], f"{row['gb_s']:.3g} GB/s", is_ours=True) for row in rows)
    small = tuple(
        make_bar(row["name"], row["latency_us"], _microseconds(row["latency_us"]), is_ours=True) for row in rows
    )
    about = f"half of the way there and back; {rounds_of(record['settings']['rounds'], 'round')}"
    panels = [
        Bars(f"GB/s between two ranks: messages of {_size(record['large_bytes'])}", about, large),
        Bars(f"µs between two ranks: messages of {_size(record['small_bytes'])}", about, small),
    ]
    return Sheet("Messages between any two ranks", where(record), panels, record["settings"]["backend"])


def _checkpoint(record: Record) -> Sheet:
    rows, limit = record["rows"], record["limits"]["stall"]
    floor = next((row["stall_s"] for row in rows if row["name"] == "copy"), None)
    stalls = tuple(make_bar(row["name"], row["stall_s"], _stall(row["stall_s"], floor)) for row in rows)
    whole = tuple(make_bar(row["name"], row["total_s"], _written(row)) for row in rows if row["total_s"] is not None)
    panels = [
        Bars(
            "stall: seconds that training stands still",
            f"{record['state_mib']:.0f} MiB of state{_held_by(record)}; median of {record['rounds']} rounds",
            stalls,
            (limit * floor, f"our limit: {limit:g} × the copy") if floor else None,
        )
    ]
    panels += [Bars("on disk: seconds until all of it is written", "the same saves", whole)] if whole else []
    note = "copy: a plain clone of the same bytes" if record["device"] == "cpu" else "copy: to pinned host memory"
    legend = (("ours", OURS), ("plain copy", HAND), ("torch's own", PEER))
    return Sheet("Checkpoint: what a save costs", where(record), panels, note, legend)


def _held_by(record: Record) -> str:
    ranks = len(record.get("ranks", ()))
    return f" in parts on {ranks} ranks, of which the slowest counts" if ranks else ""


def _stall(stall: float | None, floor: float | None) -> str:
    part = f" · {stall / floor:.2f} × the copy" if stall is not None and floor else ""
    return f"{say('{:.3f}', stall)} s{part}"


def _written(row: Record) -> str:
    written = f" · {row['written_mib']:.0f} MiB written" if row["written_mib"] is not None else ""
    return f"{row['total_s']:.2f} s{written}"


def _recovery(record: Record) -> Sheet:
    limits = {bar["name"]: bar["limit"] for bar in record["bars"]}
    kills = tuple(
        make_bar(row["side"], row["p50_s"], _percentiles(row), dots=tuple(row["seconds"])) for row in record["rows"]
    )
    starts = tuple(
        make_bar(side, median(taken), f"{median(taken):.2f} s", dots=tuple(taken))
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
    legend = (("ours", OURS), ("torchrun with a hand-written loop", PEER))
    return Sheet("Recovery: what a killed rank costs", where(record), panels, "bar: median; circle: each one", legend)


def _percentiles(row: Record) -> str:
    p50, p95 = (say("{:.2f}", row[name]) for name in ("p50_s", "p95_s"))
    return f"p50 {p50} s, p95 {p95} s · {row['recovered']} of {row['kills']}"


def _network(record: Record) -> Sheet:
    rates = [
        make_bar(
            f"{row['from']} → {row['to']}, {_streams(row)}",
            row["gbit_s"],
            f"{say('{:.3f}', row['gbit_s'])} Gbit/s",
            spread=_between(row["low_gbit_s"], row["high_gbit_s"]),
            is_ours=True,
        )
        for row in record["throughput"]
    ]
    trips = [
        make_bar(
            f"{row['from']} ⇄ {row['to']}",
            row["median_us"],
            f"{_microseconds(row['median_us'])}, p99 {_microseconds(row['p99_us'])}",
            is_ours=True,
        )
        for row in record["latency"]
    ]
    panels = [
        Bars("rates", "10⁹ bits a second that arrive; line: least and most of tenths of a second", tuple(rates)),
        Bars("round trips", "of 64 bytes, one at a time; bar: median", tuple(trips)),
    ]
    return Sheet("Network between nodes", where(record), [panel for panel in panels if panel.bars], "")


def _streams(row: Record) -> str:
    if row["kind"] == "rdma":
        return "ib_write_bw"
    return _times(row["streams"], "stream") + (", both ways" if row["kind"] == "both" else "")


DRAWINGS: Drawings = {
    "network": _network,
    "throughput": _throughput,
    "script": _script,
    "scaling": _scaling,
    "collectives": _collectives,
    "pairs": _pairs,
    "checkpoint": _checkpoint,
    "recovery": _recovery,
}


def make_bar(
    name: str,
    value: float | None,
    label: str,
    *,
    spread: tuple[float, float] | None = None,
    dots: tuple[float, ...] = (),
    is_ours: bool | None = None,
) -> Bar:
    """In the colour of who it is: ours, by the name where it is not said; by hand-written; or a peer."""
    is_hand = name in HAND_WRITTEN or name.startswith(HAND_PREFIX)
    if is_ours is None:
        is_ours = name.startswith(("ours", "save"))
    return Bar(
        name,
        value=value,
        label=label,
        colour=OURS if is_ours else HAND if is_hand else PEER,
        is_ours=is_ours,
        spread=spread,
        dots=dots,
    )


def say(form: str, value: float | None) -> str:
    """
    >>> say("{:.2f}", 1.5), say("{:.2f}", None)
    ('1.50', '?')
    """
    return form.format(value) if value is not None else "?"


def _between(low: float | None, high: float | None) -> tuple[float, float] | None:
    return None if low is None or high is None else (low, high)


def around(value: float | None, error: float | None) -> tuple[float, float] | None:
    return None if value is None or error is None else (value - error, value + error)


def where(record: Record) -> str:
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


def rounds_of(number: int, what: str) -> str:
    """
    >>> rounds_of(1, "round"), rounds_of(3, "start")
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
        return f"{say('{:.3g}', taken)} µs"
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
