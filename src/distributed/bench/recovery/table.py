"""What the recovery benchmark found as rich tables: both sides beside each other, then what we hold ourselves to."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from rich.console import Group
from rich.text import Text

from distributed.bench.recovery.results import HANG_TIMEOUT_S, START_RANKS, Goal, RecoveryCost, percentile
from distributed.bench.recovery.runs import SIDES
from distributed.bench.recovery.workload import SAVE_EVERY
from distributed.bench.table import make_table


def recovery_table(found: RecoveryCost) -> Group:
    figures = ("recovered", "p50 s", "p95 s", "max s", "lost steps", "start s", "watching %")
    table = make_table("side", *figures)
    for side in SIDES:
        killed = found.recoveries[side]
        cells = [f"{len(killed.recoveries)} of {killed.kills}"]
        cells += [_number(percentile(killed.seconds, part)) for part in (0.5, 0.95, 1.0)]
        cells += [str(killed.lost_steps), _number(median(found.starts_s[side]))]
        cells += [f"{found.supervision[side].part:.2%}"]
        table.add_row(side, *cells, style="bold" if side == "ours" else None)
    bars = make_table("our own limit", "limit", "here", "")
    for bar in found.bars:
        style = "green" if bar.passed else "red"
        bars.add_row(bar.name, _of(bar, bar.limit), _of(bar, bar.value), Text("PASS" if bar.passed else "MISS", style))
    return Group(table, Text(""), bars, Text("\n".join(["", *_notes(found)])))


def _notes(found: RecoveryCost) -> Iterator[str]:
    ours = found.supervision["ours"]
    yield (
        f"{found.ranks} ranks on gloo, one thread each; a rank is killed with SIGKILL, each in turn, at a moment drawn "
        f"by chance (seed {found.seed}); both sides save every {SAVE_EVERY} steps."
    )
    yield "recovery: from the kill until every rank has made a step of the new world. lost: steps that were made again."
    yield f"start: from the command until each of {START_RANKS} ranks has made a step, median."
    yield (
        "torchrun has TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: without it, its restarts on gloo may read the addresses of "
        "dead peers, and fail or hang."
    )
    parts = ", ".join(f"{name} {cpu_s / ours.seconds:.2%}" for name, cpu_s in ours.cpu_s.items())
    yield (
        f"watching: CPU time of the processes that make no steps, of one core; ours: {parts}, "
        f"{ours.us_per_step:.0f} µs a step of {ours.step_s * 1e3:.1f} ms. Not on a terminal, so no progress is drawn."
    )
    own = ", ".join(f"{name} {cost:.1f}" for name, cost in found.in_rank_us.items())
    yield f"a rank's own part: {sum(found.in_rank_us.values()):.1f} µs a step ({own})"
    late = ", ".join(f"{stall.late_s:.1f} s" + ("" if stall.is_right else " (another rank)") for stall in found.stalls)
    yield (
        f"stuck (SIGSTOP, hang_timeout_s={HANG_TIMEOUT_S:g}): named {late or 'never'} after the deadline; "
        f"{len(found.stalls)} of {found.stalls_made}"
    )
    yield f"load average {found.load_before} before, {found.load_after} after; all of it took {found.seconds:.0f} s"


def _of(bar: Goal, value: float | None) -> str:
    if value is None:
        return "unknown"
    if bar.unit == "%":
        return f"{value:.2%}"
    return f"{value:.2f} {bar.unit}" if bar.unit else f"{value:.0f}"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"
