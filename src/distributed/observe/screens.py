"""Where a run is shown: a terminal with a bar, a notebook with a bar, or plain lines."""

from __future__ import annotations

import atexit
import html
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TextIO

import rich.console
import rich.progress
from rich.text import Text

MIN_BAR, MAX_BAR = 8, 40  # columns
_MOST_RANKS = 8  # whose unfinished lines are drawn
_ECHO_COLUMNS = 3  # columns left free: a terminal writes ^C behind the bar, and a bar that wraps is drawn twice


@dataclass(frozen=True)
class Snapshot:
    """What a bar shows at one moment; `facts` begin with the most important; the last yield to a narrow screen."""

    label: str
    done: int
    total: int | None  # None: unknown, the bar only shows that something moves
    facts: tuple[str, ...] = ()

    @property
    def count(self) -> str:
        return f"{self.done}/{self.total}" if self.total is not None else f"{self.done}"

    def fitted(self, width: int) -> tuple[int, str]:
        """The bar's width and the facts that fit in a line of that many columns.

        >>> Snapshot("epoch 1/2", 5, 10, ("loss 0.5000", "12 samples/s")).fitted(40)
        (13, 'loss 0.5000')
        """
        facts = list(self.facts)
        while True:
            text = "  ".join(facts)
            room = width - len(self.label) - len(self.count) - len(text) - 3
            if room >= MIN_BAR or not facts:
                return max(MIN_BAR, min(MAX_BAR, room)), text
            facts.pop()


class Screen(Protocol):
    has_bar: bool

    def line(self, text: str, prefix: str = "") -> None: ...

    def draw(self, snapshot: Snapshot) -> None: ...

    def draw_ranks(self, lines: Mapping[int, str]) -> None:
        """Lines of ranks that may still change; where nothing can be drawn twice, they are shown once they end."""

    def close(self) -> None: ...


class PlainScreen:
    """Lines only: a pipe, a file, CI."""

    has_bar = False

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def line(self, text: str, prefix: str = "") -> None:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._stream.write((prefix + text + "\n").encode(encoding, "replace").decode(encoding))
        self._stream.flush()

    def draw(self, snapshot: Snapshot) -> None:
        pass

    def draw_ranks(self, lines: Mapping[int, str]) -> None:
        pass

    def close(self) -> None:
        pass


class TerminalScreen:
    """A rich bar at the bottom, lines above it. It is redrawn on request; there is no thread."""

    has_bar = True

    def __init__(self, stream: TextIO) -> None:
        self._console = _rich_console(stream)
        self._bar = rich.progress.BarColumn(MAX_BAR)
        self._bottom: _Bottom | None = None
        self._task: rich.progress.TaskID | None = None

    def line(self, text: str, prefix: str = "") -> None:
        body = Text.from_ansi(text)  # keeps a rank's colours, drops what would move the cursor
        self._console.print(Text.assemble((prefix, "cyan"), body) if prefix else body, soft_wrap=True)

    def draw(self, snapshot: Snapshot) -> None:
        bottom = self._open()
        if self._task is None:
            self._task = bottom.add_task("", total=snapshot.total, label="", count="", facts="")
        self._bar.bar_width, facts = snapshot.fitted(self._console.width - _ECHO_COLUMNS)
        bottom.update(
            self._task,
            completed=snapshot.done,
            total=snapshot.total,
            label=snapshot.label,
            count=snapshot.count,
            facts=facts,
        )
        bottom.refresh()

    def draw_ranks(self, lines: Mapping[int, str]) -> None:
        if lines or self._bottom is not None:
            bottom = self._open()
            bottom.lines = dict(sorted(lines.items()))
            bottom.refresh()

    def close(self) -> None:
        if self._bottom is not None:
            self._bottom.lines = {}
            self._bottom.stop()  # gives the cursor and the streams back
            self._bottom = self._task = None
            atexit.unregister(self.close)

    def _open(self) -> _Bottom:
        if self._bottom is None:
            atexit.register(self.close)  # a bar hides the cursor: it must be shown again when this process ends
            self._bottom = _Bottom(self._console, self._bar)
            self._bottom.start()
        return self._bottom


class _Bottom(rich.progress.Progress):
    """What is drawn again and again below all lines: lines of ranks that are not ended, and the run's own bar."""

    def __init__(self, console: rich.console.Console, bar: rich.progress.BarColumn) -> None:
        # Before the base class draws for the first time, in its constructor.
        self.lines: dict[int, str] = {}
        self._console = console
        label, count, facts = (
            rich.progress.TextColumn(f"{{task.fields[{name}]}}", markup=False) for name in ("label", "count", "facts")
        )
        super().__init__(
            *(label, bar, count, facts),
            console=console,
            auto_refresh=False,
            # Prints of this process go above the bar too; but not into it when they go to a file.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )

    def get_renderables(self) -> Iterable[rich.console.RenderableType]:
        for rank, text in list(self.lines.items())[:_MOST_RANKS]:
            line = Text.assemble((f"[r{rank}] ", "cyan"), Text.from_ansi(text))
            line.truncate(self._console.width - _ECHO_COLUMNS, overflow="ellipsis")
            yield line
        if len(self.lines) > _MOST_RANKS:
            yield Text(f"… and {len(self.lines) - _MOST_RANKS} ranks more")
        if self.tasks:
            yield self.make_tasks_table(self.tasks)


class NotebookScreen:
    """One display in the cell's output that is updated in place; needs no widgets."""

    has_bar = True

    def __init__(self, display: Any) -> None:
        self._display = display
        self._handle: Any = None

    def line(self, text: str, prefix: str = "") -> None:
        print(prefix + text, flush=True)

    def draw(self, snapshot: Snapshot) -> None:
        shown = _mime(snapshot)
        if self._handle is None:
            self._handle = self._display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)

    def draw_ranks(self, lines: Mapping[int, str]) -> None:
        pass

    def close(self) -> None:
        self._handle = None


def screen_for(stream: TextIO | None, bar: bool = True) -> Screen:
    """The best screen that a stream allows; None is wherever this process prints."""
    display = _notebook_display() if stream is None and bar else None
    if display is not None:
        return NotebookScreen(display)
    out = sys.stdout if stream is None else stream
    return TerminalScreen(out) if bar and out.isatty() and not _rich_console(out).is_dumb_terminal else PlainScreen(out)


def _rich_console(stream: TextIO) -> rich.console.Console:
    return rich.console.Console(file=stream, markup=False, emoji=False, highlight=False, force_jupyter=False)


def _notebook_display() -> Any | None:
    """IPython's `display` when this process is a notebook's kernel, which has imported IPython; else None."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return sys.modules["IPython.display"].display if getattr(shell, "kernel", None) is not None else None


def _mime(snapshot: Snapshot) -> dict[str, str]:
    facts = "  ".join(snapshot.facts)
    value = "" if snapshot.total is None else f' value="{snapshot.done}" max="{max(1, snapshot.total)}"'
    label, count, text = (html.escape(part) for part in (snapshot.label, snapshot.count, facts))
    style = "font-family: monospace; white-space: pre"
    return {
        "text/plain": f"{snapshot.label}  {snapshot.count}  {facts}",
        "text/html": f'<div style="{style}">{label} <progress{value}></progress> {count}  {text}</div>',
    }
