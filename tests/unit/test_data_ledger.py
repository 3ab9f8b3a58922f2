"""The sample ledger: what was used, after any history of kills and resumes."""

from __future__ import annotations

from pathlib import Path

import pytest

from distributed.core.errors import DataError
from distributed.core.run_dir import LedgerDir
from distributed.data.checks.ledger import Ledger, check_ledgers, read_ledger, rewind_ledgers


def write(folder: Path, rank: int, *records: tuple[int, int, list[int]]) -> None:
    ledger = Ledger(folder, rank)
    for record in records:
        ledger.record(*record)
    ledger.close()


def test_ledger_of_two_ranks_is_exactly_once(tmp_path: Path) -> None:
    write(tmp_path, 0, (1, 0, [3, 1]), (2, 0, [4]), (3, 1, [0, 1]))
    write(tmp_path, 1, (1, 0, [0, 2]), (2, 0, []), (3, 1, [2, 3]), (4, 1, [4]))
    report = check_ledgers(tmp_path, 5)
    assert report.is_exact
    assert (report.steps, report.samples) == (4, 10)


def test_ledger_names_repeated_and_missing_samples(tmp_path: Path) -> None:
    write(tmp_path, 0, (1, 0, [0, 1, 1]), (2, 1, [0, 1, 2, 3]), (3, 2, [0]))
    report = check_ledgers(tmp_path, 4, finished=False)
    assert report.repeated == {0: [1]}
    assert report.missing == {0: [2, 3]}
    assert "2 samples missing, 1 repeated" in str(report)
    assert check_ledgers(tmp_path, 4).missing[2] == [1, 2, 3]


def test_torn_ledger_record_is_ignored_and_rewind_drops_steps(tmp_path: Path) -> None:
    write(tmp_path, 0, (1, 0, [0, 1]), (2, 0, [2]), (3, 0, [3]))
    path = LedgerDir(tmp_path).file(0)
    whole = path.read_bytes()
    for cut in range(len(whole) - 27, len(whole)):
        path.write_bytes(whole[:cut])
        assert [entry.step for entry in read_ledger(path)] == [1, 2]
    rewind_ledgers(tmp_path, 1)
    write(tmp_path, 0, (2, 0, [2, 3]))
    assert [(e.step, e.indices.tolist()) for e in read_ledger(path)] == [(1, [0, 1]), (2, [2, 3])]
    assert check_ledgers(tmp_path, 4).is_exact


def test_file_that_is_no_ledger_is_refused(tmp_path: Path) -> None:
    LedgerDir(tmp_path).file(0).write_bytes(b"something else")
    with pytest.raises(DataError, match="no sample ledger"):
        check_ledgers(tmp_path, 4)
