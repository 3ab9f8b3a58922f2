"""Writes tables and pictures from benchmarks/*.json: `python docs/generate_benchmarks.py`.

The tables are those of README.md and benchmarks/README.md, and each file gets a picture beside it. A number in a
document has a file behind it, and this is how it gets there; a file that is not there has no line and no picture.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the suite is beside this folder, and not installed

from benchmarks.suite.pictures import draw  # noqa: E402
from distributed.bench.pictures import of_peak  # noqa: E402
from distributed.bench.throughput.results import Over  # noqa: E402
from distributed.observe.charts import short  # noqa: E402

RESULTS = ROOT / "benchmarks"
TARGETS = (ROOT / "README.md", RESULTS / "README.md")
BEGIN = "<!-- Made by docs/generate_benchmarks.py from benchmarks/*.json; run it after a benchmark. -->"
END = "<!-- The end of what is made. -->"
# Where a page shows what was drawn of a benchmark: this line, and below it a line a picture.
SHOWN = re.compile(r"<!-- Pictures of (\w+), made as well\. -->\n(?:!\[.*\n)*")

Record = dict[str, Any]


def render(target: Path = TARGETS[0], results: Path = RESULTS) -> str:
    """A page with its parts generated again: that of benchmarks/ has every contender and picture, the README's few."""
    page = target.read_text(encoding="utf-8")
    before, begun, rest = page.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not begun or not ended:
        raise SystemExit(f"{target} has no place for the tables: put these two lines there\n{BEGIN}\n{END}")
    made = summary(results) if target.name == TARGETS[0].name and target.parent == ROOT else in_full(results)
    return SHOWN.sub(lambda found: _show(found[1], results), f"{before}{BEGIN}\n\n{made}\n\n{END}{after}")


def pictures(results: Path = RESULTS) -> dict[Path, bytes]:
    """What is drawn of each file, and where it belongs: beside it, under the same name."""
    return {path.with_suffix(".svg"): draw(record) for path, record in _records(results)}


def _show(kind: str, results: Path) -> str:
    lines = [f"<!-- Pictures of {kind}, made as well. -->"]
    lines += [
        f"![{path.stem}: {_machine(record)}]({path.stem}.svg)"
        for path, record in _records(results)
        if _kind(path) == kind
    ]
    return "\n".join([*lines, ""])


def summary(results: Path = RESULTS) -> str:
    """A line a finding, with where it was measured and the file that holds it."""
    lines = ["| what | ours | beside it | on | file |", "|---|---|---|---|---|"]
    for path, record in _records(results):
        for what, ours, beside in FINDINGS[_kind(path)](record):
            lines.append(f"| {what} | {ours} | {beside} | {_machine(record)} | `benchmarks/{path.name}` |")
    return "\n".join(lines)


def in_full(results: Path = RESULTS) -> str:
    """The throughput of every contender, a table a workload."""
    parts = []
    for path, record in _records(results):
        if _kind(path) == "throughput":
            parts += [_full_throughput(path, record, result) for result in record["workloads"]]
    return "\n\n".join(parts) or "No throughput has been measured yet."


def _records(results: Path) -> Iterator[tuple[Path, Record]]:
    for kind in FINDINGS:
        for path in sorted(results.glob("*.json")):
            if _kind(path) == kind:
                yield path, json.loads(path.read_text(encoding="utf-8"))


def _kind(path: Path) -> str:
    """
    >>> _kind(Path("checkpoint-h200.json"))
    'checkpoint'
    """
    return path.stem.partition("-")[0]


def _machine(record: Record) -> str:
    machine = record["machine"]
    gpus = machine["gpus"]
    return gpus[0].removeprefix("NVIDIA ") if gpus else f"{machine['cores']} CPU cores"


def _throughput(record: Record) -> Iterator[tuple[str, str, str]]:
    for result in record["workloads"]:
        rows = {row["contender"]: row for row in result["rows"]}
        ours = [row for name, row in rows.items() if name.startswith("ours")]
        if not ours:
            continue
        shown = ", ".join(
            _rate(row, result["unit"], "" if row["contender"] == "ours" else row["contender"]) for row in ours
        )
        others = [row for name, row in rows.items() if not name.startswith("ours")]
        beside = ", ".join(f"{row['contender']} {short(row['units_per_second'])}" for row in others)
        alike = [name for name, found in result["ours_over_peers"].items() if found["verdict"] == "not told apart"]
        within = f"; within the noise of {', '.join(alike)}" if alike else ""
        caveats = ["one round"] if result["rounds"] == 1 else []
        caveats += [] if result["losses_agree"] is not False else ["losses do not agree, see benchmarks/README.md"]
        what = f"training {result['workload']}"
        yield f"{what} ({'; '.join(caveats)})" if caveats else what, shown + within, beside


def _rate(row: Record, unit: str, name: str) -> str:
    peak = of_peak(row)
    return f"{name} {short(row['units_per_second'])} {unit}/s{peak and f' ({peak})'}".strip()


def _overhead(record: Record) -> Iterator[tuple[str, str, str]]:
    rows = {row["contender"]: row for row in record["rows"]}
    engine = record["settings"].get("engine", "pytorch-ddp")
    if "ours" in rows:
        beside = [f"{name} {_over(row)}" for name, row in rows.items() if name not in ("ours", "bare-again")]
        noise = f"noise floor {record['noise_floor_us']:.0f} µs"
        yield f"CPU a step over a hand-written loop ({engine})", _over(rows["ours"]), ", ".join([*beside, noise])

    elif "callback" in rows:
        own = ("training-step", "task-with-log", "callback", "ema")
        beside = [f"{name} {_over(rows[name])}" for name in rows if name not in (*own, "bare-again")]
        added = ", ".join(f"{name} {_over(rows[name])}" for name in own if name in rows)
        yield (
            "CPU a step: a step, a task or a callback over plain ours; loops over a hand-written one",
            added,
            ", ".join(beside),
        )


def _over(row: Record) -> str:
    return f"{row['over_us']:+.0f} ± {row['over_error_us']:.0f} µs"


def _scaling(record: Record) -> Iterator[tuple[str, str, str]]:
    last = record["rows"][-1]
    yield f"speed-up with {last['processes']} processes", f"{last['speed_up']:.2f} ×", "1 process"


def _collectives(record: Record) -> Iterator[tuple[str, str, str]]:
    settings = record["settings"]
    if any(row.get("algorithm", "backend") != "backend" for row in record["rows"]):
        yield from _algorithms(record)
        return
    largest = max(row["size_bytes"] for row in record["rows"])
    rates = [f"{r['operation']} {r['bus_gb_s']:.2f} GB/s" for r in record["rows"] if r["size_bytes"] == largest]
    what = f"sending {largest // 2**20} MiB among {settings['processes']} processes on {settings['backend']}"
    yield what, "–", ", ".join(rates)


def _algorithms(record: Record) -> Iterator[tuple[str, str, str]]:
    """Each over the backend's own in the same run."""
    settings, rows = record["settings"], record["rows"]
    own = {row["size_bytes"]: row["latency_us"] for row in rows if row.get("algorithm", "backend") == "backend"}
    sizes = [size for size in own if size >= 2**20]
    over: dict[str, list[float]] = {}
    for row in rows:
        if row["algorithm"] != "backend" and row["size_bytes"] in sizes:
            over.setdefault(row["algorithm"], []).append(row["latency_us"] / own[row["size_bytes"]])
    ours = ", ".join(f"{name} {min(found):.2f}–{max(found):.2f} ×" for name, found in over.items())
    span = f"{min(sizes) // 2**20} to {max(sizes) // 2**20} MiB"
    yield f"time of all-reduces of {span} among {settings['processes']} processes", ours, f"{settings['backend']}'s own"


def _checkpoint(record: Record) -> Iterator[tuple[str, str, str]]:
    rows = {row["name"]: row for row in record["rows"]}
    others = ("copy", "torch.save", "dcp.save", "dcp.async_save")
    beside = ", ".join(f"{name} {rows[name]['stall_s']:.2f} s" for name in others if name in rows)
    ranks = f", FSDP on {len(record['ranks'])} ranks" if record.get("ranks") else ""
    yield f"stall of a save of {record['state_mib']} MiB{ranks}", f"{rows['save']['stall_s']:.2f} s", beside


def _bitwise(record: Record) -> Iterator[tuple[str, str, str]]:
    rates = [short(record[f"{mode}_samples_per_second"]) for mode in ("bitwise", "normal")]
    what = f"reproducible=bitwise, {record['virtual_ranks']} virtual ranks on {record['processes']} processes"
    yield what, f"{rates[0]} samples/s", f"normal mode {rates[1]} samples/s"


def _recovery(record: Record) -> Iterator[tuple[str, str, str]]:
    rows = {row["side"]: row for row in record["rows"]}
    ours, peer = rows["ours"], rows["torchrun"]
    kills = f"from SIGKILL of a rank to training again, median of {ours['kills']}"
    yield kills, f"{ours['p50_s']:.2f} s", f"torchrun {peer['p50_s']:.2f} s"


def _strategies(record: Record) -> Iterator[tuple[str, str, str]]:
    rows = {row["name"]: row for row in record["rows"]}
    ours, bare = rows["ours, compiled by the user"], rows["bare loop, compiled"]
    what = f"a step of a GPT of {record['parameters'] / 1e9:.1f} B parameters"
    yield what, f"{ours['step_ms']:.1f} ms", f"compiled hand-written loop {bare['step_ms']:.1f} ms"


def _start(record: Record) -> Iterator[tuple[str, str, str]]:
    by_hand = {row["name"]: row["first_step_s"] for row in record["rows"] if not row["peer"]}
    load = record["load_average"]["before"]
    for row in record["rows"]:
        if row["name"] == "pytorch-ddp":
            what = f"first step after the command (load average {load:.0f})"
            yield what, f"{row['first_step_s']:.1f} s", f"{row['peer']} {by_hand[row['peer']]:.1f} s"


def _tune(record: Record) -> Iterator[tuple[str, str, str]]:
    rows = {row["side"]: row["ratio"] for row in record["rows"]}
    beside = ", ".join(f"{side} {ratio:.2f}" for side, ratio in rows.items() if side != "ours")
    yield f"a search of {record['settings']['trials']} trials over its ideal", f"{rows['ours']:.2f}", beside


FINDINGS: dict[str, Callable[[Record], Iterator[tuple[str, str, str]]]] = {
    "throughput": _throughput,
    "overhead": _overhead,
    "scaling": _scaling,
    "collectives": _collectives,
    "strategies": _strategies,
    "checkpoint": _checkpoint,
    "bitwise": _bitwise,
    "recovery": _recovery,
    "start": _start,
    "tune": _tune,
}


def _full_throughput(path: Path, record: Record, result: Record) -> str:
    settings = record["settings"]
    load, number = record["load_average"], settings["processes"]
    where = f"{_machine(record)}, {number} process{'es' if number > 1 else ''}, {settings['precision']}"
    agree = {True: "; losses agree", False: "; **losses do not agree**", None: ""}[result["losses_agree"]]
    head = (
        f"`{path.name}`, **{result['workload']}**: {result['describes']}, batch {result['batch']}. {where}; "
        f"{_rounds(result)} of {result['steps']} steps; load average {load['before']} before, {load['after']} "
        f"after{agree}."
    )
    lines = [
        head,
        "",
        f"| contender | {result['unit']}/s | quartiles | ms a step | of {result['reference']} | of peak | GiB | loss |",
    ]
    lines.append("|---|---:|---:|---:|---:|---:|---:|---:|")
    for row in result["rows"]:
        peak = "" if row["part_of_peak"] is None else f"{row['part_of_peak']:.2f}"
        spread = f"{row['low']:,.0f}–{row['high']:,.0f}" if result["rounds"] > 1 else ""
        cells = [f"{row['units_per_second']:,.0f}", spread, f"{row['step_ms']:.3f}"]
        cells += [f"{row['ratio']:.3f}", peak, f"{row['peak_gib']:.2f}", f"{row['loss']:.4f}"]
        lines.append(f"| {row['contender']} | {' | '.join(cells)} |")
    missing = record["missing"] | result["missing"]
    left_out = "; ".join(f"{name}: {why}" for name, why in missing.items())
    over = "; ".join(
        f"{name} {Over(found['ratio'], found['error'])}" for name, found in result["ours_over_peers"].items()
    )
    notes = {"Ours over": over, "Left out:": left_out}
    return "\n".join([*lines, *(line for name, text in notes.items() if text for line in ("", f"{name} {text}."))])


def _rounds(result: Record) -> str:
    """
    >>> _rounds({"rounds": 1}), _rounds({"rounds": 7})
    ('one round, which has no spread,', 'median of 7 rounds')
    """
    rounds = result["rounds"]
    return f"median of {rounds} rounds" if rounds > 1 else "one round, which has no spread,"


if __name__ == "__main__":
    for page in TARGETS:
        page.write_text(render(page), encoding="utf-8")
    drawn = pictures()
    for leftover in set(RESULTS.glob("*.svg")) - set(drawn):
        leftover.unlink()
    for picture, content in drawn.items():
        picture.write_bytes(content)
