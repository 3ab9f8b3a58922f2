"""A picture for each benchmark of the suite, drawn from what `--json` writes."""

from __future__ import annotations

from functools import partial
from statistics import median

from distributed.bench import pictures
from distributed.bench.pictures import (
    HAND_PREFIX,
    HAND_WRITTEN,
    LEGEND,
    Drawings,
    Record,
    around,
    make_bar,
    rounds_of,
    say,
    where,
)
from distributed.observe.charts import Bar, Bars, Sheet, short


def _overhead(record: Record) -> Sheet:
    floor, limit = record["noise_floor_us"], record["target_over_us"]
    bars = [
        make_bar(
            row["contender"],
            row["over_us"],
            f"{say('{:+.0f}', row['over_us'])} ± {say('{:.0f}', row['over_error_us'])} µs",
            spread=around(row["over_us"], row["over_error_us"]),
        )
        for row in record["rows"]
    ]
    engine, settings = record["settings"].get("engine", "pytorch-ddp"), record["settings"]
    about = f"µs a step; {settings['rounds']} rounds of {settings['steps']} steps"
    over = "what is plainer" if any(row.get("beside") == "ours" for row in record["rows"]) else "a hand-written loop"
    title = f"CPU time of Python's threads over {over} ({engine})"
    panel = Bars(title, about, tuple(bars), (limit, f"our limit: {limit:g} µs"), around(0.0, floor))
    note = f"bar: median of the rounds; line: its error; grey: noise, ± {say('{:.0f}', floor)} µs"
    return Sheet("Overhead: what a trainer costs", where(record), [panel], note, LEGEND)


def _start(record: Record) -> Sheet:
    rows = record["rows"]
    bars: list[Bar] = []
    for peer in dict.fromkeys(row["peer"] or row["name"] for row in rows):  # each engine above who starts it by hand
        for row in sorted((r for r in rows if (r["peer"] or r["name"]) == peer), key=lambda r: not r["peer"]):
            dots = tuple(start["first_step_s"] for start in row["starts"]) if len(row["starts"]) > 1 else ()
            part = f" · {row['of_peer']:.2f} × by hand" if row["of_peer"] is not None else ""
            name = row["name"] if row["peer"] else f"{HAND_PREFIX}{row['name']}"
            label = f"{say('{:.2f}', row['first_step_s'])} s{part}"
            bars.append(make_bar(name, row["first_step_s"], label, dots=dots, is_ours=bool(row["peer"])))
    number = record["settings"]["repeats"]
    about = f"each engine above the same training started by hand; {rounds_of(number, 'start')}"
    panel = Bars("seconds from the command to the end of the first step", about, tuple(bars))
    note = "bar: median; circle: each start" if number > 1 else "bar: one start"
    return Sheet("Start: how long until training begins", where(record), [panel], note, LEGEND[:2])


def _strategies(record: Record) -> Sheet:
    times = tuple(
        make_bar(
            row["name"],
            row["step_ms"],
            f"{say('{:.1f}', row['step_ms'])} ms · {say('{:.2f}', row['ratio'])} ×",
            spread=around(row["step_ms"], row["spread_ms"]),
            is_ours=row["name"] not in HAND_WRITTEN,
        )
        for row in record["rows"]
    )
    peaks = tuple(
        make_bar(
            row["name"],
            row["peak_gib"],
            f"{say('{:.1f}', row['peak_gib'])} GiB",
            is_ours=row["name"] not in HAND_WRITTEN,
        )
        for row in record["rows"]
    )
    millions = record["parameters"] / 1e6
    about = f"GPT of {millions:,.1f} M parameters, {record['tokens']:,} tokens a step, {record['precision']}"
    panels: list[Bars] = [Bars("time: ms a step", about, times)]
    if any(bar.value is not None for bar in peaks):
        panels.append(Bars("memory: peak GiB on the device", "of those that ran alone", peaks))
    note = "×: of the hand-written loop; line: spread of the rounds"
    return Sheet("Strategies: what a way of training costs", where(record), panels, note, LEGEND[:2])


def _tune(record: Record) -> Sheet:
    limit, settings = record["target_ratio"], record["settings"]
    bars = tuple(
        make_bar(
            row["side"],
            row["ratio"],
            f"{say('{:.2f}', row['ratio'])} × · {median(search['wall_s'] for search in row['searches']):.1f} s",
            dots=tuple(search["ratio"] for search in row["searches"]) if len(row["searches"]) > 1 else (),
        )
        for row in record["rows"]
    )
    about = f"{settings['trials']} trials of {settings['steps']} steps, {settings['parallel']} at a time"
    panel = Bars("wall time of a search over its ideal", about, bars, (limit, f"our limit: {limit:g}"))
    note = "ideal: the sum of the trials' own times by trials at a time; bar: median of the searches"
    return Sheet("Tune: what a search costs beside its trials", where(record), [panel], note, (LEGEND[0], LEGEND[2]))


def _bitwise(record: Record) -> Sheet:
    rates = {mode: record[f"{mode}_samples_per_second"] for mode in ("normal", "bitwise")}
    bars = tuple(make_bar(mode, rate, short(rate or 0), is_ours=True) for mode, rate in rates.items())
    about = f"{record['virtual_ranks']} virtual ranks; {rounds_of(record['rounds'], 'round')}"
    panel = Bars("samples a second of the two modes", about, bars)
    note = f"bar: median of the rounds; load average {say('{:g}', record['load_average'])} after"
    return Sheet("Bitwise: what reproducible=bitwise costs", where(record | {"load_average": None}), [panel], note)


DRAWINGS: Drawings = pictures.DRAWINGS | {
    "overhead": _overhead,
    "bitwise": _bitwise,
    "start": _start,
    "strategies": _strategies,
    "tune": _tune,
}
draw = partial(pictures.draw, drawings=DRAWINGS)
