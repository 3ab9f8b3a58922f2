"""Writes docs/settings.md and core/settings/typed.py from the settings: `python docs/generate_settings.py`."""

from __future__ import annotations

import json
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

import distributed
from distributed.core.settings import SECTIONS

TARGET = Path(__file__).with_name("settings.md")
TYPES = Path(distributed.__file__).parent / "core" / "settings" / "typed.py"
_PATHS = ("compile_cache", "timeline", "resume_from_checkpoint", "deepspeed_config")  # and all that end in _dir
_ALSO = {"compression": "type[Any]", "deepspeed_config": "Any"}  # objects of Horovod and DeepSpeed, which are read
_TYPES_HEAD = '''\
"""The settings as types of keywords, so that an editor completes them and mypy refuses wrong ones.

Made by docs/generate_settings.py from core/settings/; not to be edited.
"""

from __future__ import annotations

from os import PathLike
from typing import Any, Literal, TypedDict


class TrainerSettings(TypedDict, total=False):
    """All settings but the optimizer's name, which trainers take beside optimizers."""
'''
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

<!-- Made by docs/generate_settings.py; edit the descriptions in core/settings/ instead. -->"""


def render() -> str:
    """The whole page."""
    lines = [_HEAD]
    for title, section in SECTIONS.items():
        lines += [f"\n## {title}\n", "| setting | value | default | meaning |", "|---|---|---|---|"]
        lines += [_row(name, field) for name, field in section.model_fields.items()]
    return "\n".join(lines) + "\n"


def render_types() -> str:
    """The whole module."""
    lines, last = [_TYPES_HEAD], []
    for title, section in SECTIONS.items():
        fields = [f"    {name}: {_typed(name, field)}" for name, field in section.model_fields.items()]
        last += [line for line in fields if line.startswith("    optimizer:")]
        lines += [f"    # {title}", *(line for line in fields if line not in last)]
    lines += ["", "", "class Settings(TrainerSettings, total=False):", '    """All settings."""', "", *last]
    return "\n".join(lines) + "\n"


def _typed(name: str, field: FieldInfo) -> str:
    is_path = name in _PATHS or name.endswith("_dir")
    text = _annotation(field.annotation, "str | PathLike[str]" if is_path else "str")
    return f"{_ALSO[name]} | {text}" if name in _ALSO else text


def _annotation(annotation: Any, text: str) -> str:
    """
    >>> _annotation(int | Literal["auto"] | None, "str"), _annotation(dict[str, Any] | str, "str | PathLike[str]")
    ('int | Literal["auto"] | None', 'dict[str, Any] | str | PathLike[str]')
    """
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _annotation(parts[0], text)
    if origin is Literal:
        return f"Literal[{', '.join(map(json.dumps, parts))}]"
    if origin in (list, dict):
        return f"{origin.__name__}[{', '.join(part.__name__ for part in parts)}]"
    if parts:
        return " | ".join(_annotation(part, text) for part in parts)
    return {str: text, NoneType: "None"}.get(annotation, annotation.__name__)


def _row(name: str, field: FieldInfo) -> str:
    if not field.description:
        raise SystemExit(f"{name} has no description in core/settings/")
    description = field.description.replace("|", "\\|").replace("<", "\\<")
    return f"| `{name}` | {_values(field)} | {_default(field.default)} | {description} |"


def _values(field: FieldInfo) -> str:
    return ", ".join([_kind(field.annotation), *_limits(field)])


def _limits(field: FieldInfo) -> list[str]:
    return [
        f"{sign} {_number(getattr(limit, name))}"
        for limit in field.metadata
        for name, sign in _SIGNS.items()
        if hasattr(limit, name)
    ]


def _kind(annotation: Any) -> str:
    """
    >>> _kind(int | None), _kind(bool | Literal["fp16", "bf16"]), _kind(list[str]), _kind(dict[str, str])
    ('integer', '`true`, `false`, `fp16`, `bf16`', 'list', 'mapping')
    """
    names = {int: "integer", float: "number", str: "text", bool: "`true`, `false`"}
    if annotation in names:
        return names[annotation]
    if get_origin(annotation) is Annotated:
        kind, *fields = get_args(annotation)
        return " ".join([_kind(kind), *(limit for field in fields for limit in _limits(field))])
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
    TYPES.write_text(render_types(), encoding="utf-8")
