"""The list of seeded faults: each can still be put in, and its tests are there, so that it cannot rot unseen."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.seeded_faults import FAULTS

ROOT = Path(__file__).resolve().parents[2]


def test_each_seeded_fault_changes_one_place_and_names_tests() -> None:
    for fault in FAULTS:
        path = ROOT / "src" / "distributed" / fault.file
        assert path.is_file(), f"{fault.name}: there is no {fault.file}"
        text = path.read_text()
        assert text.count(fault.before) == 1, f"{fault.name}: its snippet is not once in {fault.file}"
        ast.parse(text.replace(fault.before, fault.after))
        assert fault.before != fault.after
        assert fault.tests, fault.name
        missing = [tests for tests in fault.tests if not (ROOT / tests.partition(" ")[0].partition("::")[0]).is_file()]
        assert not missing, f"{fault.name}: {missing}"


def test_seeded_faults_have_unique_names() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
