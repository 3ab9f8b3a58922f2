"""The command line: `distributed VERB …`. A verb is a file beside this one, entered in the app here."""

from __future__ import annotations

import platform
import sys

import typer

from distributed.cli import bench, chaos, config, diagnose, doctor, find, resize, train, tune
from distributed.cli.checkpoint import commands as checkpoint
from distributed.cli.words import ScriptCommand
from distributed.core.errors import DistributedError
from distributed.core.registry import DISTRIBUTION, installed_version
from distributed.observe.shown_error import show_error

# Plain help texts: their examples keep their lines, and can be copied.
app = typer.Typer(
    name="distributed",
    help="Take a model that trains on one device and train it on many.",
    epilog="Begin with: distributed doctor",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("train", cls=train.TrainCommand, short_help="Run a training script as N ranks.")(train.train)
app.command("tune", cls=ScriptCommand, short_help="Run a script with many settings, and find the best ones.")(tune.tune)
app.command(
    "chaos", cls=ScriptCommand, short_help="Run a training under faults and compare it with the undisturbed run."
)(chaos.chaos)
app.command("find", cls=ScriptCommand, short_help="Find a learning rate or a batch size by short trials.")(find.find)
app.command("resize", short_help="Change the number of ranks of a running run.")(resize.resize)
app.command("diagnose", short_help="Say why a run failed, from its logs.")(diagnose.diagnose)
app.command("doctor", short_help="Report what this machine can do.")(doctor.doctor)
app.add_typer(config.app, name="config")
app.add_typer(bench.app, name="bench")
app.add_typer(checkpoint.app, name="checkpoint")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"{DISTRIBUTION} {installed_version()}")
        print(f"Python {platform.python_version()}")
        print(f"torch {installed_version('torch')}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False,
        "--version",
        callback=_print_version,
        is_eager=True,
        help="Print the versions of this package, Python and torch, and exit.",
    ),
) -> None:
    pass


def main() -> None:
    """Run the command line; what follows the first `--` belongs to the user's script."""
    own, script_arguments = split_arguments(sys.argv[1:])
    try:
        app(args=own, prog_name="distributed", obj=script_arguments)
    except DistributedError as error:
        show_error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


def split_arguments(words: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """
    >>> split_arguments(["train", "--script", "a.py", "--", "--lr", "1", "--", "x"])
    (['train', '--script', 'a.py'], ('--lr', '1', '--', 'x'))
    """
    if "--" not in words:
        return words, ()
    at = words.index("--")
    return words[:at], tuple(words[at + 1 :])
