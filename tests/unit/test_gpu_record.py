"""The record of the GPU suite: counts, sources, parts; and no suite that passes because there is no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import gpu_record
from tests.conftest import clean_environ
from tests.gpu_plugin import Recorder

ROOT = Path(__file__).parents[2]
WHERE = {"device": "a GPU", "torch": "2", "cuda": "12", "nccl": "2"}
TESTS = """
import pytest

def test_good(): pass
def test_bad(): assert False
@pytest.fixture
def broken(): raise ValueError
def test_of_a_broken_fixture(broken): pass
@pytest.mark.skip(reason="to see")
def test_skipped(): pass
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("src/a.py", "src/b.py", "src/c.py", "tests/gpu/test_x.py", "tests/gpu/test_y.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1\n")
    return tmp_path


def record(tree: Path, *names: str, **counts: int) -> gpu_record.Record:
    modules = [f"tests/gpu/{name}.py" for name in names]
    return gpu_record.make(tree, counts, modules, seconds=2.0, date="2026-01-02T03:04:05+00:00", where=WHERE)


def age(tree: Path, made: gpu_record.Record) -> str:
    gpu_record.write(made, tree / "record.json")
    return gpu_record.age(tree, tree / "record.json")


def test_gpu_record_counts_changed_added_and_removed_files(tree: Path) -> None:
    made = record(tree, "test_x", "test_y", passed=7)
    assert age(tree, made) == ("0 of 3 source files changed since the GPU suite passed (7 tests) on 2026-01-02 (a GPU)")
    (tree / "src/a.py").write_text("2\n")
    (tree / "src/b.py").unlink()
    (tree / "src/d.py").write_text("")
    assert age(tree, made).startswith("3 of 3 source files changed")


def test_gpu_record_reports_failures_and_modules_not_run(tree: Path) -> None:
    line = age(tree, record(tree, "test_x", passed=7, failed=2))
    assert "had 2 failures" in line
    assert line.endswith("it has not run tests/gpu/test_y.py")
    assert "make test-gpu" in gpu_record.age(tree, tree / "none.json")


def test_gpu_record_parts_are_merged(tree: Path) -> None:
    parts = [record(tree, "test_x", passed=3, failed=1), record(tree, "test_y", passed=4, skipped=2)]
    whole = gpu_record.merge(parts, tree)
    assert (whole["passed"], whole["failed"], whole["skipped"], whole["seconds"]) == (7, 1, 2, 4.0)
    assert whole["modules"] == gpu_record.suite(tree)
    with pytest.raises(SystemExit, match=r"no part has run tests/gpu/test_y\.py"):
        gpu_record.merge(parts[:1], tree)
    (tree / "src/a.py").write_text("2\n")
    with pytest.raises(SystemExit, match="different sources"):
        gpu_record.merge([parts[0], record(tree, "test_y")], tree)


def test_gpu_plugin_counts_match_pytests_report(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_none.py").write_text("import pytest\npytest.skip('as a whole', allow_module_level=True)\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    out = tmp_path / "out.json"
    recorder = Recorder(out, WHERE)
    assert run_tests(tmp_path, recorder) == 1
    made = json.loads(out.read_text())
    assert (made["passed"], made["failed"], made["skipped"]) == (1, 2, 2)
    assert made["modules"] == ["test_none.py", "test_some.py"]
    assert made["files"] == gpu_record.digests(ROOT)
    assert made["device"] == "a GPU"


def test_gpu_record_of_a_cut_run_has_its_whole_files(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("def test_one(): pass\ndef test_two(): pass\n")
    (tmp_path / "test_b.py").write_text("def test_good(): pass\ndef test_cut(): raise KeyboardInterrupt\n")
    (tmp_path / "test_c.py").write_text("def test_never_begun(): pass\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    out = tmp_path / "out.json"
    assert run_tests(tmp_path, Recorder(out, WHERE)) == pytest.ExitCode.INTERRUPTED
    made = json.loads(out.read_text())
    assert (made["passed"], made["modules"]) == (2, ["test_a.py"])


def run_tests(folder: Path, recorder: Recorder) -> int:
    options = ["--rootdir", str(folder), "-q", "-p", "no:cacheprovider", "-c", f"{folder}/pytest.ini"]
    return pytest.main([str(folder), *options], plugins=[recorder])


def test_gpu_suite_without_a_gpu_is_refused(tmp_path: Path) -> None:
    record_path = str(tmp_path / "record.json")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.gpu_plugin", "-m", "gpu", "--gpu-record", record_path],
        cwd=ROOT,
        env=clean_environ(CUDA_VISIBLE_DEVICES=""),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "no CUDA device here" in done.stderr
    assert not Path(record_path).exists()
