"""The text of a small file of the system's, for all that reads /sys and /proc."""

from __future__ import annotations

from pathlib import Path


def text_of(path: Path) -> str:
    """Without white space around it; "" where it is not there, or cannot be read: a link that is down has no speed."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
