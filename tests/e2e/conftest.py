"""What the end-to-end tests of one session share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.e2e.survival import Undisturbed


@pytest.fixture(scope="session")
def session_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all workers of pytest-xdist, each of which has a folder of its own in it."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def undisturbed(session_folder: Path) -> Undisturbed:
    folder = session_folder / "undisturbed"
    folder.mkdir(exist_ok=True)
    return Undisturbed(folder)
