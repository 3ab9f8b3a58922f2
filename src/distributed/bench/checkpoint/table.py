"""What the checkpoint benchmark found, as a table."""

from __future__ import annotations

from rich.console import Group
from rich.text import Text

from distributed.bench.checkpoint.benchmark import TARGET_SECOND, CheckpointCost
from distributed.bench.table import make_table


def checkpoint_table(found: CheckpointCost) -> Group:
    """A row a way of saving, then the two ratios that we hold ourselves to."""
    table = make_table("way", "stall s", "× copy", "on disk after s", "MiB written")
    floor = found.row("copy").stall_s
    for row in found.rows:
        cells = [f"{row.stall_s:.3f}", f"{row.stall_s / floor:.2f}"]
        cells += ["" if value is None else f"{value:.2f}" for value in (row.total_s, row.written_mib)]
        table.add_row(row.name, *cells, style="bold" if row.name.startswith("save") else None)
    notes = [
        *_of_ranks(found),
        f"{found.state_mib:.0f} MiB of state on {found.device}, median of {found.rounds} interleaved rounds; load "
        f"average {found.load_before} before, {found.load_after} after",
        "copy: a plain clone" if found.device == "cpu" else "copy: to pinned host memory",
        f"stall of an asynchronous save: {found.stall_ratio:.2f} × the copy; our own limit is {found.limit}",
        f"5 % of the bytes changed: {found.second_part:.1%} written; our own limit is {TARGET_SECOND:.0%}",
    ]
    return Group(table, Text("\n".join(["", *notes])))


def _of_ranks(found: CheckpointCost) -> list[str]:
    """Where ranks hold the state in parts: each of them, and when the checkpoint was there."""
    if not found.ranks:
        return []
    where = f", which share {found.shared_gpus} GPU{'s' * (found.shared_gpus > 1)}" if found.shared_gpus else ""
    return [
        f"FSDP on {found.processes} ranks{where}; of each round the slowest rank",
        *(
            f"rank {one.rank}: {one.shard_mib:.0f} MiB, copy {one.copy_s:.3f} s, save {one.save_s:.3f} s, "
            f"{one.ratio:.2f} × its copy"
            for one in found.ranks
        ),
        f"the manifest came at least {found.manifest_later_s or 0:.3f} s after all ranks could train again",
    ]
