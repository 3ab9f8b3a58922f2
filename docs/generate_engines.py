"""Writes the table of docs/engines.md from what the engines declare: `python docs/generate_engines.py`."""

from __future__ import annotations

from pathlib import Path

from distributed.core.engines.engine import ENGINES, matrix

TARGET = Path(__file__).with_name("engines.md")
_BEGIN = "<!-- Made by docs/generate_engines.py from engines/declared.py; edit the declarations there instead. -->"
_END = "<!-- The end of what is made. -->"


def render() -> str:
    """The page with its tables generated again."""
    page = TARGET.read_text(encoding="utf-8")
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n\n{_engines()}\n\n{_features()}\n\n{_END}{after}"


def _engines() -> str:
    lines = ["| `backend=` | what it is | what brings it |", "|---|---|---|"]
    for name, engine in ENGINES.entries.items():
        brings = f"`{engine.brought_by}`" if engine.brought_by else "nothing more"
        lines.append(f"| `{name}` | {engine.does} | {brings} |")
    return "\n".join(lines)


def _features() -> str:
    names = list(ENGINES.entries)
    lines = [f"| | {' | '.join(f'`{name}`' for name in names)} |", f"|---|{'---|' * len(names)}"]
    for title, words in matrix():
        lines.append(f"| {title} | {' | '.join(words[name] or '–' for name in names)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
