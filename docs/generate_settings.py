"""Writes docs/settings.md from the descriptions in DistributedConfig: `python docs/generate_settings.py`."""

from __future__ import annotations

import json
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from distributed.core.config import DistributedConfig

TARGET = Path(__file__).with_name("settings.md")
_SECTIONS = {  # by the first setting of each
    "num_gpus": "Resources",
    "backend": "Backend",
    "batch_size": "Training",
    "sharding": "Parallelism",
    "activation_checkpointing": "Memory",
    "capture": "Speed",
    "mixed_precision": "Optimization",
    "communication_backend": "Communication",
    "max_restarts": "Survival",
    "drop_last": "Data",
    "checkpoint_dir": "Checkpoints",
    "run_dir": "Monitoring",
}
_SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
_HEAD = """\
# Settings

Every field of `DistributedConfig`. Each can be given in several places; a later one wins:

1. to the trainer, in `config=`;
2. to the trainer, as a keyword;
3. to `fit(…)`, as a keyword;
4. in a YAML file, one `name: value` a line: `distributed train --config run.yaml …`;
5. on the command line, as `name=value` or, for those that have one, as an option: `--num-gpus 2`.

`distributed config show --config run.yaml epochs=3` prints all of them with where each value came from. An unknown
name, a value out of range, and settings that deny each other or would have no effect are errors: all of them in one
report, before any process starts.

"GPU" in a name means device: without CUDA, that many CPU processes.

<!-- Made by docs/generate_settings.py; edit the descriptions in core/config.py instead. -->"""


def render() -> str:
    """The whole page."""
    unknown = _SECTIONS.keys() - DistributedConfig.model_fields.keys()
    if unknown:
        raise SystemExit(f"sections begin with settings that do not exist: {', '.join(sorted(unknown))}")
    lines = [_HEAD]
    for name, field in DistributedConfig.model_fields.items():
        if name in _SECTIONS:
            lines += [f"\n## {_SECTIONS[name]}\n", "| setting | value | default | meaning |", "|---|---|---|---|"]
        if not field.description:
            raise SystemExit(f"{name} has no description in core/config.py")
        description = field.description.replace("|", "\\|").replace("<", "\\<")
        lines.append(f"| `{name}` | {_values(field)} | {_default(field.default)} | {description} |")
    return "\n".join(lines) + "\n"


def _values(field: FieldInfo) -> str:
    limits = [
        f"{sign} {_number(getattr(limit, name))}"
        for limit in field.metadata
        for name, sign in _SIGNS.items()
        if hasattr(limit, name)
    ]
    return ", ".join([_kind(field.annotation), *limits])


def _kind(annotation: Any) -> str:
    """
    >>> _kind(int | None), _kind(bool | Literal["fp16", "bf16"]), _kind(list[str]), _kind(dict[str, str])
    ('integer', '`true`, `false`, `fp16`, `bf16`', 'list', 'mapping')
    """
    names = {int: "integer", float: "number", str: "text", bool: "`true`, `false`"}
    if annotation in names:
        return names[annotation]
    if get_origin(annotation) in (list, dict):
        return "list" if get_origin(annotation) is list else "mapping"
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    return ", ".join(_kind(part) for part in get_args(annotation) if part is not NoneType)


def _number(value: float) -> str:
    return "2⁶³" if value == 2**63 else f"{value:g}"


def _default(value: Any) -> str:
    return "–" if value is None else f"`{value if isinstance(value, str) else json.dumps(value)}`"


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
