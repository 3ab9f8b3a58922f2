"""Throughput as one picture, an SVG by itself: a panel a workload, a bar a contender, with quartiles and ratios."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from xml.sax.saxutils import escape

_WIDTH, _LEFT, _RIGHT, _TOP = 860, 120, 190, 66
_BAR, _GAP, _PANEL_HEAD, _PANEL_FOOT = 20, 8, 44, 22
_OURS, _HAND, _PEER = "#3b528b", "#9aa0a6", "#5ec962"
_BY_HAND = ("bare", "best-bare", "floor")
_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #222; paint-order: stroke; stroke: white; stroke-width: 3px }
.title { font-size: 16px; font-weight: 600 }
.panel { font-size: 13px; font-weight: 600 }
.small { font-size: 11px; fill: #555 }
.ours { font-weight: 700 }
.grid { stroke: #e6e6e6; stroke-width: 1 }
.spread { stroke: #222; stroke-width: 1.3 }
"""


def draw_throughput(record: dict[str, Any]) -> str:
    """The picture as text, from what `Throughput.to_dict` says or a file of it holds."""
    panels, y = [], float(_TOP)
    for result in record["workloads"]:
        panels += list(_panel(result, y))
        y += _PANEL_HEAD + len(result["rows"]) * (_BAR + _GAP) + _PANEL_FOOT
    height = int(y + 34)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'role="img"><style>{_STYLE}</style><rect width="{_WIDTH}" height="{height}" fill="white"/>'
    )
    title = _text(20, 28, "Throughput: whole trainings, by turns", "title")
    foot = _text(20, height - 14, "bar: median of the rounds; line: quartiles; ×: of the best loop by hand", "small")
    return (
        "\n".join([head, title, _text(20, 47, _where(record), "small"), *panels, foot, *_legend(height), "</svg>"])
        + "\n"
    )


def _where(record: dict[str, Any]) -> str:
    settings, machine = record["settings"], record["machine"]
    device = machine["gpus"][0] if settings["device"] == "cuda" else f"{machine['cpu']}, {machine['cores']} cores"
    number = settings["processes"]
    count = f"{number} process{'es' if number > 1 else ''}"
    return f"{device}; {count}, {settings['precision']}, torch {record['versions'].get('torch', '?')}"


def _panel(result: dict[str, Any], top: float) -> Iterator[str]:
    rows, width = result["rows"], _WIDTH - _LEFT - _RIGHT
    most = max(row["high"] for row in rows)
    yield _text(20, top + 16, f"{result['workload']}: {result['describes']}", "panel")
    yield _text(20, top + 32, f"{result['unit']} a second, batch {result['batch']}", "small")
    bottom = top + _PANEL_HEAD + len(rows) * (_BAR + _GAP)
    for part in (0.25, 0.5, 0.75, 1.0):
        x = _LEFT + width * part
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top + _PANEL_HEAD - 4:.1f}" y2="{bottom:.1f}"/>'
    for number, row in enumerate(rows):
        y = top + _PANEL_HEAD + number * (_BAR + _GAP)
        yield from _bar(row, y, width / most)


def _bar(row: dict[str, Any], y: float, scale: float) -> Iterator[str]:
    name, rate = row["contender"], row["units_per_second"]
    is_ours = name.startswith("ours")
    colour = _OURS if is_ours else _HAND if name in _BY_HAND else _PEER
    middle, end = y + _BAR / 2, _LEFT + rate * scale
    kind = "ours" if is_ours else ""
    yield _text(_LEFT - 8, middle + 4, name, kind, "end")
    yield f'<rect x="{_LEFT}" y="{y:.1f}" width="{rate * scale:.1f}" height="{_BAR}" fill="{colour}"/>'
    low, high = _LEFT + row["low"] * scale, _LEFT + row["high"] * scale
    yield f'<line class="spread" x1="{low:.1f}" x2="{high:.1f}" y1="{middle:.1f}" y2="{middle:.1f}"/>'
    for x in (low, high):
        yield f'<line class="spread" x1="{x:.1f}" x2="{x:.1f}" y1="{middle - 4:.1f}" y2="{middle + 4:.1f}"/>'
    peak = "" if row["part_of_peak"] is None else f", {row['part_of_peak']:.0%} of peak"
    label = f"{short(rate)} · {row['ratio']:.2f} ×{peak}"
    yield _text(max(end, high) + 8, middle + 4, label, kind)


def _legend(height: int) -> Iterator[str]:
    for number, (colour, name) in enumerate(((_OURS, "ours"), (_HAND, "by hand"), (_PEER, "peers"))):
        x = _WIDTH - 240 + number * 80
        yield f'<rect x="{x}" y="{height - 24}" width="11" height="11" fill="{colour}"/>'
        yield _text(x + 16, height - 14, name, "small")


def short(value: float) -> str:
    """A rate with three digits.

    >>> short(1234567.0), short(56789.0), short(123.4)
    ('1.23 M', '56.8 k', '123')
    """
    for size, word in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {word}"
    return f"{value:.3g}"


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'
