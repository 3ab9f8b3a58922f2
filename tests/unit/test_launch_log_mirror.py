"""What ranks write, on the screen: lines above, bars below."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from distributed.launch.node.log_mirror import LogMirror


class Shown:
    """A screen that writes down what it is to show."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []

    def rank_line(self, rank: int, text: str) -> None:
        self.calls.append((f"r{rank}", text))

    def unfinished_lines(self, lines: Mapping[int, str]) -> None:
        self.calls.append(("bars", dict(lines)))

    def attempt_began(self, attempt: int) -> None: ...

    def refresh(self) -> None: ...


def test_bar_that_ends_is_gone_before_its_last_line(tmp_path: Path) -> None:
    log, screen = tmp_path / "rank-1.log", Shown()
    log.write_text("\r10% of 1")
    mirror = LogMirror(screen)
    mirror.follow(1, str(log))
    mirror.drain()
    with log.open("a") as more:
        more.write("\r100% of 1\n")
    mirror.drain()
    mirror.close()
    assert screen.calls == [("bars", {1: "10% of 1"}), ("bars", {}), ("r1", "100% of 1")]
