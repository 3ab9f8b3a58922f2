"""What the suite's benchmarks found, as tables."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from rich.console import Group
from rich.text import Text

from benchmarks.suite.bitwise import BitwiseCost
from benchmarks.suite.overhead.benchmark import TARGET_US, Overhead
from benchmarks.suite.overhead.contenders import BARE_AGAIN, OURS
from benchmarks.suite.start.benchmark import Starts
from benchmarks.suite.strategies import BARE, TARGET, StrategyCosts
from benchmarks.suite.strategies import OURS as OUR_STRATEGY
from benchmarks.suite.tuning.benchmark import TARGET as TUNING_TARGET
from benchmarks.suite.tuning.benchmark import TuningCost
from distributed.bench.table import make_table


def overhead_table(found: Overhead) -> Group:
    """A row a contender, and below it what the columns mean and how far to trust them."""
    headers = ("contender", "CPU µs", "Python µs", "wall µs", "over", "whom", "at best", "process", "ratio")
    table = make_table(*headers)
    bare = next(row for row in found.rows if row.contender == BARE_AGAIN)
    table.add_row("bare", f"{bare.bare_cpu_us:.0f}", f"{bare.bare_python_us:.0f}", f"{bare.bare_wall_us:.0f}")
    for row in found.rows:
        cells = [f"{row.cpu_us:.0f}", f"{row.python_us:.0f}", f"{row.wall_us:.0f}"]
        cells += [f"{row.over_us:+.1f} ± {row.over_error_us:.1f}", row.beside, f"{row.over_best_us:+.0f}"]
        cells += [f"{row.over_process_us:+.0f} ± {row.over_process_error_us:.0f}", f"{row.ratio:.2f}"]
        table.add_row(row.contender, *cells, style="bold" if row.contender == OURS else None)
    return Group(table, Text("\n".join(["", *_overhead_notes(found)])))


def _overhead_notes(found: Overhead) -> Iterator[str]:
    yield (
        f"{found.engine}, {found.processes} processes on gloo, one thread each; {found.rounds} rounds of {found.steps} "
        "timed steps. All figures are µs a step of rank 0."
    )
    yield "CPU: user and system time of the process. Python: of its Python threads; the rest are gloo's."
    yield "over: Python µs less those of `whom` on the same ranks; median over the rounds ± its error."
    yield "at best: the same for the cheapest 50 steps of all rounds, as noise only adds. process: the same in CPU µs."
    yield from (f"{row.contender}: {row.setup}" for row in found.rows)
    yield from (
        f'{name}: not installed; pip install "distributed-training[{extra}]"' for name, extra in found.missing.items()
    )
    yield f"load average {found.load_before} before, {found.load_after} after; noise floor {found.floor_us:.0f} µs"
    ours = next((row for row in found.rows if row.contender == OURS), None)
    if ours is not None:
        yield f"ours: {ours.over_us:+.1f} µs a step; our own limit is {TARGET_US:.0f} µs" + (
            f". The floor is {found.floor_us:.0f} µs: too noisy to tell, repeat it on a quiet machine"
            if found.floor_us > TARGET_US
            else ""
        )


def strategies_table(found: StrategyCosts) -> Group:
    """A row a way of training."""
    table = make_table("way", "ms a step", "spread", "of bare", "tokens/s", "of peak", "peak GiB", "loss")
    for row in found.rows:
        part, peak = found.part_of_peak(row), row.peak_gib
        cells = [f"{row.step_ms:.1f}", f"{row.spread_ms:.1f}", f"{row.ratio:.3f}"]
        cells += [f"{found.tokens / row.step_ms * 1e3:,.0f}", "" if part is None else f"{part:.2f}"]
        table.add_row(row.name, *cells, "" if peak is None else f"{peak:.1f}", f"{row.loss:.4f}")
    ours = next(row for row in found.rows if row.name == OUR_STRATEGY)
    verdict = "PASS" if ours.ratio <= TARGET else "MISS"
    notes = [
        "",
        f"GPT of {found.parameters / 1e6:.1f} M parameters on {found.device}, {found.tokens} tokens a step, "
        f"{found.precision}.",
        f"{OUR_STRATEGY} takes {ours.ratio:.3f} of the time of the {BARE}; our own limit is {TARGET}: {verdict}",
        "peak: of what was allocated on the device, measured for those that ran alone.",
    ]
    return Group(table, Text("\n".join(notes)))


def start_table(found: Starts) -> Group:
    """A row an engine with what it takes of a start by hand, then the starts by hand, then what is not installed."""
    table = make_table("engine", "first step s", "of by hand", "back after s")
    table.add_column("beside", no_wrap=True)
    for row in found.rows:
        part = found.of_peer(row)
        cells = [f"{row.first_step_s:.2f}", "" if part is None else f"{part:.2f}", f"{row.whole_s:.2f}"]
        table.add_row(row.name if row.peer else f"by hand: {row.name}", *cells, row.peer)
    notes = [
        "",
        f"{found.processes} CPU processes, one thread each; median of {found.repeats} interleaved starts.",
        "first step: from the command until rank 0 has made it. of by hand: over that of the start by hand beside it.",
        *(f"{name} is not installed: {brought_by}" for name, brought_by in found.missing.items()),
        f"load average {found.load_before} before, {found.load_after} after",
    ]
    return Group(table, Text("\n".join(notes)))


def tuning_table(found: TuningCost) -> Group:
    """A row a side: what its searches took over the ideal."""
    table = make_table("side", "wall s", "trials s", "of ideal", "")
    for row in found.rows:
        walls, sums = zip(*((search.wall_s, search.trials_s) for search in row.searches), strict=True)
        is_ours = row.side.startswith("ours")
        verdict = ("PASS" if row.ratio <= TUNING_TARGET else "MISS") if is_ours else ""
        cells = [f"{median(walls):.1f}", f"{median(sums):.1f}", f"{row.ratio:.2f}", verdict]
        table.add_row(row.side, *cells, style="bold" if is_ours else None)
    notes = [
        "",
        f"{found.trials} trials of {found.steps} steps, {found.parallel} at a time; median of {found.repeats} runs.",
        "trials: the sum of what the trials took by their own clocks. ideal: that by trials at a time.",
        f"our own limit is {TUNING_TARGET} of the ideal. Ray's clusters were started before.",
        *(f"{side} is not here: Ray is not installed" for side in found.missing),
        f"load average {found.load_before} before, {found.load_after} after",
    ]
    return Group(table, Text("\n".join(notes)))


def bitwise_table(found: BitwiseCost) -> Group:
    """A row a mode."""
    table = make_table("reproducible", "samples/s", "of normal's time")
    table.add_row("off", f"{found.normal_samples_per_second:,.0f}", "1.00")
    table.add_row("bitwise", f"{found.bitwise_samples_per_second:,.0f}", f"{found.slowdown:.2f}")
    notes = [
        "",
        f"{found.virtual_ranks} virtual ranks on {found.processes} processes; median of {found.rounds} interleaved "
        f"rounds; load average {found.load_average}",
    ]
    return Group(table, Text("\n".join(notes)))
