"""A rank of a Horovod run is killed, or fails: the others keep what they hold, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from distributed.core.registry import is_installed
from tests.e2e.survival import PER_EPOCH, fault, from_memory, start

pytestmark = [
    pytest.mark.skipif(not is_installed("horovod.torch"), reason="Horovod is not built: make horovod"),
]


def test_lost_horovod_ranks_resume_from_memory_with_same_bytes(tmp_path: Path) -> None:
    """Killed, and failing while its peer waits in Horovod; compared with a run of the same engine."""
    (tmp_path / "whole").mkdir()
    (tmp_path / "hurt").mkdir()
    undisturbed = start(tmp_path / "whole", 2, backend="horovod").end()
    result = start(
        tmp_path / "hurt",
        2,
        fault("training", rank=1, step=5),
        fault("training", rank=0, step=20),
        fault("training", "raise", rank=1, step=24),
        fault("evaluation", rank=0, step=3 * PER_EPOCH),
        backend="horovod",
        fusion_threshold_mb=1,
    ).end()
    result.assert_same_as(undisturbed)
    assert result.recoveries == from_memory(0, 1, 0, 1)
    assert "end of the script" in result.shown


def test_killed_rank_with_cycle_time_resumes_from_checkpoint(tmp_path: Path) -> None:
    """Horovod cannot be initialised again in a process where it is."""
    result = start(tmp_path, 2, fault("training", rank=1, step=18), backend="horovod", cycle_time_ms=2).end()
    assert result.code == 0, result.shown
    assert result.ledger.is_exact
    assert result.recoveries == [("step-000015", 2)]
