"""`python -m tests.adversarial.soak --cases 5000`: draws cases, trains each, and writes down what became of them."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tests.adversarial.case import draw
from tests.adversarial.runner import Runner
from tests.adversarial.script import script_of
from tests.adversarial.verdict import Verdict


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, nargs="*", help="these seeds and no others")
    parser.add_argument("--minutes", type=float, default=None, help="stop after that long")
    parser.add_argument("--skip", default="", help="traits, with commas: cases that have one of them are left out")
    parser.add_argument("--only", default="", help="traits, with commas: cases that have none of them are left out")
    parser.add_argument("--folder", type=Path, default=Path("runs/adversarial"), help="for scripts and the summary")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for one fit")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    skipped, wanted = set(filter(None, asked.skip.split(","))), set(filter(None, asked.only.split(",")))
    seeds = asked.seeds or range(asked.first, asked.first + asked.cases)
    seeds = [s for s in seeds if not draw(s).traits & skipped and (not wanted or draw(s).traits & wanted)]
    console = Console()
    began, verdicts = time.monotonic(), list[Verdict]()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with Runner(timeout_s=asked.timeout, logs=asked.folder) as runner:
        try:
            _run(runner, seeds, verdicts, asked, console)
        except KeyboardInterrupt:
            console.print("interrupted")
    _summarize(console, verdicts, time.monotonic() - began, asked.folder)
    return int(any(verdict.kind == "failed" for verdict in verdicts))


def _run(
    runner: Runner, seeds: list[int], verdicts: list[Verdict], asked: argparse.Namespace, console: Console
) -> None:
    began = time.monotonic()
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("cases", total=len(seeds))
        for seed in seeds:
            verdict = runner.run(seed)
            verdicts.append(verdict)
            if verdict.kind == "failed":
                path = _write_script(asked.folder, verdict)
                told = f"failed {draw(seed)}\n  {verdict.why}\n  {verdict.detail[-600:]}\n  {path}"
                console.print(told, highlight=False, markup=False, soft_wrap=True)
            counts = Counter(one.kind for one in verdicts)
            progress.update(bar, advance=1, description=", ".join(f"{n} {kind}" for kind, n in counts.items()))
            if asked.minutes is not None and time.monotonic() - began > 60 * asked.minutes:
                console.print(f"stopped after {asked.minutes:g} minutes, as asked")
                return


def _write_script(folder: Path, verdict: Verdict) -> Path:
    path = folder / f"case_{verdict.seed}.py"
    path.write_text(script_of(draw(verdict.seed), verdict), encoding="utf-8")
    return path


def _summarize(console: Console, verdicts: list[Verdict], seconds: float, folder: Path) -> None:
    counts = Counter(verdict.kind for verdict in verdicts)
    rate = len(verdicts) / seconds if seconds else 0.0
    console.print(f"{len(verdicts)} cases in {seconds:.0f} s ({rate:.2f} a second): {dict(counts)}")
    for kind in ("failed", "refused", "unstable", "void"):
        reasons = Counter(verdict.why for verdict in verdicts if verdict.kind == kind)
        if not reasons:
            continue
        table = Table(title=f"{kind}: {counts[kind]} ({100 * counts[kind] / len(verdicts):.1f} %)")
        table.add_column("cases", justify="right")
        table.add_column("why")
        table.add_column("seeds")
        for why, count in reasons.most_common():
            some = [str(v.seed) for v in verdicts if v.kind == kind and v.why == why][:6]
            table.add_row(str(count), why, ", ".join(some))
        console.print(table, markup=False)
    (folder / "summary.json").write_text(
        json.dumps({"seconds": seconds, "counts": counts, "verdicts": [asdict(v) for v in verdicts]}, indent=1)
    )


if __name__ == "__main__":
    sys.exit(main())
