"""The least of what the machine has free and what a control group leaves, of either version."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from distributed.runtime.host_memory import free_host_memory

MIB = 2**20


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1000 * MIB})())


def group(folder: Path, files: tuple[str, str, str], limit: str, used: int, cached: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / files[0]).write_text(f"{limit}\n")
    (folder / files[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{files[2]} {cached}\n")


VERSION_2 = ("memory.max", "memory.current", "inactive_file")
VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def test_free_memory_is_what_the_control_group_leaves(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/job/step\n")
    group(tmp_path / "groups/job/step", VERSION_2, "max", 300 * MIB, 0)
    group(tmp_path / "groups/job", VERSION_2, str(400 * MIB), 350 * MIB, 50 * MIB)
    assert free_host_memory(tmp_path / "groups", own) == 100 * MIB


def test_free_memory_reads_groups_of_version_1(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("3:cpu,cpuacct:/a\n2:memory:/a\n")
    group(tmp_path / "groups/memory/a", VERSION_1, str(300 * MIB), 290 * MIB, 20 * MIB)
    assert free_host_memory(tmp_path / "groups", own) == 30 * MIB


def test_group_of_a_host_that_is_not_shown_limits_by_its_root(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("2:memory:/docker/abc\n")
    group(tmp_path / "groups/memory", VERSION_1, str(300 * MIB), 100 * MIB, 0)
    assert free_host_memory(tmp_path / "groups", own) == 200 * MIB


@pytest.mark.parametrize("lines", ["", "0::/\n", "1:name=systemd:/\n"])
def test_free_memory_without_a_limit_is_the_machines(tmp_path: Path, lines: str) -> None:
    own = tmp_path / "own"
    own.write_text(lines)
    assert free_host_memory(tmp_path / "groups", own) == 1000 * MIB
    assert free_host_memory(tmp_path / "groups", tmp_path / "none") == 1000 * MIB
