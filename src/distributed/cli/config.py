"""distributed config: every setting with where its value came from, and what a run has planned from them."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from distributed.cli import options as opt
from distributed.cli.settings import gather
from distributed.core.config import DistributedConfig
from distributed.core.documents.run_config import RunConfig
from distributed.core.plan import Plan
from distributed.core.secrets import mask

app = typer.Typer(help="Look at settings and plans.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _config() -> None:
    pass


@app.command("show")
def show(
    settings: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings to add.")] = None,
    config: opt.ConfigFile = None,
    run_dir: Annotated[
        str | None, typer.Option(metavar="DIR", help="A run directory: the settings that run was given.")
    ] = None,
    given: Annotated[bool, typer.Option("--given", help="Only settings that were given.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
) -> None:
    """Show every setting: its value, where the value came from, what it means.

    Later wins: defaults, then the file, then KEY=VALUE. (In a run, what a script passes to its Trainer
    comes between the defaults and the file.)

    \b
    Example:
      distributed config show --config run.yaml epochs=3
      distributed config show --given --config run.yaml
      distributed config show --given --run-dir runs/20260131-120000-1f2e
    """
    chosen = gather(config, settings or [], {}, base=RunConfig.read(run_dir).config if run_dir else None)
    names = [name for name in DistributedConfig.model_fields if not given or chosen.given(name)]
    values = mask(chosen.model_dump(mode="json"))
    if as_json:
        print(json.dumps({name: {"value": values[name], "source": chosen.source(name)} for name in names}, indent=2))
        return
    table = _table("setting", "value", "from", "meaning")
    for name in names:
        style = "bold" if chosen.given(name) else None
        meaning = DistributedConfig.model_fields[name].description or ""
        table.add_row(name, _text(values[name]), chosen.source(name), meaning, style=style)
    _print(table)


@app.command("plan")
def plan(
    run_dir: Annotated[str, typer.Argument(metavar="RUN_DIR", help="The directory of a run.")],
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs: the whole plan.")] = False,
) -> None:
    """Show what was planned for a run: strategy, mesh, batch, precision, and every decision with its reason.

    A second fit of the same script has its plan in RUN_DIR/fit-2.

    \b
    Example:
      distributed config plan runs/20260131-120000-1f2e
    """
    planned = Plan.read(run_dir)
    if as_json:
        print(planned.to_json(), end="")
        return
    table = _table("planned", "")
    for name, value in _summary(planned).items():
        table.add_row(name, value)
    _print(table)
    print()
    decisions = _table("decision", "reason", "change it with")
    for decision in planned.decisions:
        decisions.add_row(decision.choice, decision.reason, decision.override)
    _print(decisions)


def _summary(planned: Plan) -> dict[str, str]:
    """
    >>> from distributed.core.batch_plan import BatchPlan
    >>> _summary(Plan("runs/x", BatchPlan(per_device=8, accumulation=2)))["batch"]
    '16 samples a step: 2 × 8'
    """
    batch, nodes = planned.batch, planned.num_nodes
    cut = "" if batch.accumulation == 1 else f": {batch.accumulation} × {batch.micro_batch}"
    return {
        "run": planned.run_dir,
        "strategy": planned.strategy + ("" if planned.shard.kind == "none" else f", sharding {planned.shard.kind}"),
        "mesh": f"{planned.mesh} on {nodes} node{'s' * (nodes > 1)}, {planned.device} with {planned.collectives}",
        "batch": f"{batch.global_batch} samples a step{cut}",
        "precision": planned.precision.kind,
    }


def _table(*columns: str) -> Table:
    return Table(*columns, box=None, pad_edge=False, header_style="bold")


def _print(table: Table) -> None:
    Console(width=None if sys.stdout.isatty() else 200, highlight=False, markup=False).print(table)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
