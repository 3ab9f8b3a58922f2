"""Every strategy trains what one process trains: the loss of each step, the gradient's norm and the validation loss."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.meshes import MESHES, Trained, make_model, train

STEPS = 25
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"gradient_clipping": 0.5, "accumulation": 2},
}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory):
    """What one process comes to, trained once for each way of training."""

    @functools.cache
    def of(case: str, tied: bool = False) -> Trained:
        return train("one", tmp_path_factory.mktemp("one") / "run", make_model(tied=tied), **CASES[case])

    return of


def assert_same(found: Trained, wanted: Trained, relative: float = 1e-5) -> None:
    assert len(wanted.losses) == STEPS
    assert found.losses == pytest.approx(wanted.losses, rel=relative)
    assert found.norms == pytest.approx(wanted.norms, rel=max(relative, 1e-4))
    assert found.validation == pytest.approx(wanted.validation, rel=relative)
    assert wanted.losses[-1] < wanted.losses[0], "it must have learned something"


@pytest.mark.parametrize("mesh", [name for name in MESHES if name != "one"])
def test_it_trains_what_one_process_trains(mesh: str, one_process, tmp_path: Path) -> None:
    assert_same(train(mesh, tmp_path / "run"), one_process("plain"))


@pytest.mark.parametrize("mesh", ["fsdp_grad_op", "zero1", "tp", "pp", "3d"])
def test_with_accumulation_and_clipping(mesh: str, one_process, tmp_path: Path) -> None:
    assert_same(train(mesh, tmp_path / "run", **CASES["clipped"]), one_process("clipped"))


@pytest.mark.parametrize("mesh", ["fsdp_grad_op", "zero1", "tp", "pp"])
def test_with_tied_weights(mesh: str, one_process, tmp_path: Path) -> None:
    assert_same(train(mesh, tmp_path / "run", make_model(tied=True)), one_process("plain", tied=True))
