"""Recorders: requests the flight recorders of this node's ranks, and reads the files that they write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from distributed.launch.supervise.stuck_collectives import Call, has_lines, parse_record

_DUMP_TIMEOUT_NS = (
    2_500_000_000  # timeout for a rank whose interpreter is blocked in a call, and for the recorder's lines
)


class Recorders:
    """Requests flight recorders: `ask` returns at once; the answers are complete when `are_in`."""

    def __init__(self, paths: Mapping[int, Path], tell: Callable[[int], None]) -> None:
        """`tell` asks a rank to write to its path."""
        self._paths, self._tell = dict(paths), tell
        self._asked: dict[int, Path] = {}
        self._asked_at = 0

    def ask(self, ranks: list[int], now: int) -> None:
        self._asked = {rank: self._paths[rank] for rank in ranks}
        self._asked_at = now
        for rank, path in self._asked.items():
            path.unlink(missing_ok=True)
            self._tell(rank)

    def are_in(self, now: int) -> bool:
        return now - self._asked_at > _DUMP_TIMEOUT_NS or all(has_lines(_read(path)) for path in self._asked.values())

    def calls(self) -> dict[int, tuple[Call, ...]]:
        """The calls of the ranks that have answered and use NCCL."""
        found = {}
        for rank, path in self._asked.items():
            calls = parse_record(_read(path))
            if calls:
                found[rank] = calls
        return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
