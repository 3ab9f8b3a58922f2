"""The options of `throughput`, which the package's command and the suite's have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distributed.bench.output import Drawing, JsonFile, PictureFile, progress, show, write
from distributed.bench.throughput.contenders import Contender, find_contenders
from distributed.core.choices import Device
from distributed.core.errors import ConfigError
from distributed.core.registry import nearest_hint
from distributed.planner.hardware import probe_hardware

if TYPE_CHECKING:
    from distributed.bench.script.benchmark import ScriptRequest


def throughput_command(known: Mapping[str, Contender], drawing: Drawing) -> Callable[..., None]:
    """A command that measures these contenders and draws what it found."""

    def throughput(
        context: typer.Context,
        settings: Annotated[
            list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="With --script: settings of the training.")
        ] = None,
        script: Annotated[
            str | None,
            typer.Option(metavar="FILE", help="Your own training: with N ranks against one, in place of workloads."),
        ] = None,
        config: Annotated[
            str | None, typer.Option(metavar="FILE", help="With --script: a YAML file of settings.")
        ] = None,
        workload: Annotated[
            list[str] | None,
            typer.Option("--workload", metavar="NAME", help="Only this one; may be repeated. On a CPU: mlp, convnet."),
        ] = None,
        only: Annotated[
            list[str] | None, typer.Option("--only", metavar="NAME", help="Only this contender; may be repeated.")
        ] = None,
        precision: Annotated[
            str | None, typer.Option(metavar="NAME", help="fp32, bf16 or fp8; by default bf16 on a GPU, else fp32.")
        ] = None,
        processes: Annotated[
            int | None, typer.Option(min=1, metavar="N", help="Of each contender; by default 1 on a GPU, 2 on a CPU.")
        ] = None,
        steps: Annotated[
            int | None, typer.Option(min=1, metavar="N", help="Timed steps a turn; by default by workload.")
        ] = None,
        rounds: Annotated[
            int, typer.Option(min=1, metavar="N", help="Interleaved runs of each contender; more: less noise.")
        ] = 5,
        seconds: Annotated[
            float | None,
            typer.Option(min=1, metavar="S", help="Time for a workload; by default 65 on a GPU, none on a CPU."),
        ] = None,
        free_speed: Annotated[bool, typer.Option(help="Also ours with its options for more speed, on a GPU.")] = True,
        tiny: Annotated[bool, typer.Option("--tiny", help="Models of the same kinds that train in a moment.")] = False,
        json_file: JsonFile = None,
        picture: PictureFile = None,
    ) -> None:
        if script is not None:
            _refuse(
                {"--workload": workload, "--only": only, "--precision": precision, "--tiny": tiny},
                why="with --script, the script's own model and settings are trained",
            )
            from distributed.bench.script.benchmark import STEPS, ScriptRequest, default_processes

            own = ScriptRequest(
                script,
                processes=processes or default_processes(settings or ()),
                settings=tuple(settings or ()),
                arguments=tuple(context.obj or ()),
                config=config,
                steps=steps or STEPS,
                rounds=rounds,
                seconds=seconds,
            )
            _measure_script(own, json_file, picture, drawing)
            return
        _refuse(
            {"settings": settings, "--config": config, "what follows --": context.obj},
            why="the workloads have settings of their own",
        )
        from distributed.bench.throughput.benchmark import ThroughputRequest, choose_workloads, measure_throughput
        from distributed.bench.throughput.table import throughput_table

        device = _device(processes)
        request = ThroughputRequest(
            workloads=choose_workloads(workload, device, tiny),
            device=device,
            precision=_precision(precision, device),
            processes=processes or (1 if device == "cuda" else 2),
            rounds=rounds,
            steps=steps,
            seconds=seconds or (65.0 if device == "cuda" else None),
            tiny=tiny,
        )
        contenders = find_contenders(only, device, free_speed=free_speed, known=known)
        with progress(logs=True) as notify:
            for found in measure_throughput(request, contenders, notify):
                write(found.to_dict(), json_file, picture, drawing)
        show(throughput_table(found), found.to_dict(), json_file, picture, drawing)

    return throughput


def _measure_script(request: ScriptRequest, json_file: Path | None, picture: Path | None, drawing: Drawing) -> None:
    from distributed.bench.script.benchmark import measure_script
    from distributed.bench.script.table import script_table

    with progress(logs=True) as notify:
        for found in measure_script(request, notify):
            write(found.to_dict(), json_file, picture, drawing)
    show(script_table(found), found.to_dict(), json_file, picture, drawing)


def _refuse(given: Mapping[str, object], why: str) -> None:
    if names := [name for name, value in given.items() if value]:
        what = f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} given, and would have no effect"
        raise ConfigError(what, why=why, do=f"leave {' and '.join(names)} out")


def _device(processes: int | None) -> Device:
    """A GPU for each process, or CPUs for all."""
    gpus = len(probe_hardware().gpus)
    return "cuda" if gpus and (processes or 1) <= gpus else "cpu"


def _precision(asked: str | None, device: str) -> str:
    if asked not in (None, "fp32", "bf16", "fp8"):
        raise ConfigError(f"--precision {asked}", do=nearest_hint(str(asked), ("fp32", "bf16", "fp8")))
    if asked == "fp8" and device == "cpu":
        raise ConfigError("--precision fp8 on a CPU", why="products in 8 bits need a GPU", do="--precision bf16")
    return asked or ("bf16" if device == "cuda" else "fp32")
