"""The benchmarks' results as rich tables."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from rich.console import Group
from rich.table import Table
from rich.text import Text

from distributed.bench.bitwise import BitwiseCost
from distributed.bench.checkpoint import TARGET_SECOND, TARGET_STALL, TARGET_STALL_GPU, CheckpointCost
from distributed.bench.collectives import OPERATIONS, Collectives
from distributed.bench.contenders import BARE_AGAIN, OURS
from distributed.bench.figures import figures_table
from distributed.bench.overhead import TARGET_US, Overhead
from distributed.bench.scaling import Scaling
from distributed.bench.start import Starts
from distributed.bench.strategies import BARE, TARGET, StrategyCosts
from distributed.bench.strategies import OURS as OUR_STRATEGY
from distributed.bench.tuning import TARGET as TUNING_TARGET
from distributed.bench.tuning import TuningCost

_BAR = 24  # columns


def overhead_table(found: Overhead) -> Group:
    """A row a contender, and below it what the columns mean and how far to trust them."""
    table = figures_table("contender", "CPU µs", "Python µs", "wall µs", "over bare", "at best", "process", "ratio")
    bare = next(row for row in found.rows if row.contender == BARE_AGAIN)
    table.add_row("bare", f"{bare.bare_cpu_us:.0f}", f"{bare.bare_python_us:.0f}", f"{bare.bare_wall_us:.0f}")
    for row in found.rows:
        cells = [f"{row.cpu_us:.0f}", f"{row.python_us:.0f}", f"{row.wall_us:.0f}"]
        cells += [f"{row.over_us:+.0f} ± {row.over_error_us:.0f}", f"{row.over_best_us:+.0f}"]
        cells += [f"{row.over_process_us:+.0f} ± {row.over_process_error_us:.0f}", f"{row.ratio:.2f}"]
        table.add_row(row.contender, *cells, style="bold" if row.contender == OURS else None)
    return Group(table, Text("\n".join(["", *_overhead_notes(found)])))


def _overhead_notes(found: Overhead) -> Iterator[str]:
    yield (
        f"{found.engine}, {found.processes} processes on gloo, one thread each; {found.rounds} rounds of {found.steps} "
        "timed steps. All figures are µs a step of rank 0."
    )
    yield "CPU: user and system time of the process. Python: of its Python threads; the rest are gloo's."
    yield "over bare: Python µs less those of the bare loop on the same ranks; median over the rounds ± its error."
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


def checkpoint_table(found: CheckpointCost, bitwise: BitwiseCost | None) -> Group:
    """A row a way of saving, then the two ratios that we hold ourselves to."""
    table = figures_table("way", "stall s", "× copy", "on disk after s", "MiB written")
    floor = found.row("copy").stall_s
    for row in found.rows:
        cells = [f"{row.stall_s:.3f}", f"{row.stall_s / floor:.2f}"]
        cells += ["" if value is None else f"{value:.2f}" for value in (row.total_s, row.written_mib)]
        table.add_row(row.name, *cells, style="bold" if row.name.startswith("save") else None)
    limit = TARGET_STALL if found.device == "cpu" else TARGET_STALL_GPU
    notes = [
        f"{found.state_mib:.0f} MiB of state on {found.device}, median of {found.rounds} rounds by turns; load average "
        f"{found.load_before} before, {found.load_after} after",
        "copy: a plain clone" if found.device == "cpu" else "copy: to pinned host memory",
        f"stall of an asynchronous save: {found.stall_ratio:.2f} × the copy; our own limit is {limit}",
        f"5 % of the bytes changed: {found.second_part:.1%} written; our own limit is {TARGET_SECOND:.0%}",
    ]
    if bitwise is not None:
        notes.append(
            f"reproducible='bitwise' with {bitwise.virtual_ranks} virtual ranks on {bitwise.processes} processes: "
            f"{bitwise.slowdown:.2f} × the time of the normal mode"
        )
    return Group(table, Text("\n".join(["", *notes])))


def scaling_table(found: Scaling) -> Group:
    """A row a number of processes, with its speed-up drawn to scale."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("processes", "batch/device", "samples/s", "speed-up", "efficiency"):
        table.add_column(name, justify="right")
    table.add_column("(· is linear)", no_wrap=True)
    most = found.sizes[-1].processes
    for size in found.sizes:
        cells = [str(size.processes), str(size.batch_per_device), f"{size.samples_per_second:.0f}"]
        cells += [f"{size.speed_up:.2f}", f"{size.efficiency:.0%}", draw_bar(size.speed_up, size.processes, most)]
        style = "dim" if size.processes > found.devices else None
        table.add_row(*cells, style=style)
    return Group(table, Text("\n".join(["", *_scaling_notes(found)])))


def draw_bar(speed_up: float, linear: int, most: int) -> str:
    """
    >>> draw_bar(1.0, 1, 2), draw_bar(1.5, 2, 2)
    ('████████████', '██████████████████······')
    """
    filled = min(_BAR, int(speed_up / most * _BAR + 0.5))
    return "█" * filled + "·" * (linear * _BAR // most - filled)


def _scaling_notes(found: Scaling) -> Iterator[str]:
    kind = "strong scaling: the global batch is fixed" if found.strong else "weak scaling: a device's batch is fixed"
    yield (
        f"{kind}; {found.steps} steps an epoch, of which the first does not count; of {found.repeats} runs the fastest."
    )
    if found.device == "cpu":
        yield (
            f"This machine has {found.devices} cores. Each process has one thread, so more than {found.devices} "
            "processes cannot be faster; whatever else runs here takes its part."
        )
    else:
        yield f"This machine has {found.devices} GPUs, one for each process."
    yield f"load average {found.load_before} before, {found.load_after} after"


def strategies_table(found: StrategyCosts) -> Group:
    """A row a way of training."""
    table = figures_table("way", "ms a step", "spread", "of bare", "tokens/s", "of peak", "peak GiB", "loss")
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
    table = figures_table("engine", "first step s", "of by hand", "back after s")
    table.add_column("beside", no_wrap=True)
    for row in found.rows:
        part = found.of_peer(row)
        cells = [f"{row.first_step_s:.2f}", "" if part is None else f"{part:.2f}", f"{row.whole_s:.2f}"]
        table.add_row(row.name if row.peer else f"by hand: {row.name}", *cells, row.peer)
    notes = [
        "",
        f"{found.processes} CPU processes, one thread each; median of {found.repeats} starts, by turns.",
        "first step: from the command until rank 0 has made it. of by hand: over the same by hand, by the one beside.",
        *(f"{name} is not installed: {brought_by}" for name, brought_by in found.missing.items()),
        f"load average {found.load_before} before, {found.load_after} after",
    ]
    return Group(table, Text("\n".join(notes)))


def tuning_table(found: TuningCost) -> Group:
    """A row a side: what its searches took over the ideal."""
    table = figures_table("side", "wall s", "trials s", "of ideal", "")
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


def collectives_table(found: Collectives) -> Group:
    """A row an operation and size."""
    table = figures_table("operation", "bytes", "µs", "quartiles", "GB/s")
    for row in sorted(found.rows, key=lambda row: OPERATIONS.index(row.operation)):
        cells = [f"{row.latency_us:.0f}", f"{row.low_us:.0f}–{row.high_us:.0f}", f"{row.bus_gb_s:.3f}"]
        table.add_row(row.operation, f"{row.size_bytes:,}", *cells)
    notes = [
        "",
        f"{found.processes} processes on {found.backend}; median of {found.rounds} rounds. µs: a call. GB/s: 10⁹ bytes",
        "a second that each link carries.",
        *(f"{operation} is left out: {why}" for operation, why in found.missing.items()),
        f"load average {found.load_before} before, {found.load_after} after",
    ]
    return Group(table, Text("\n".join(notes)))
