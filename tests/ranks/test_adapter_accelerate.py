"""Scripts of Accelerate's train to the same numbers over a run of ours, on one rank and on two."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState

from distributed.adapters.accelerate import Accelerator
from distributed.testing import run_ranks
from tests.accelerate_scripts import SCRIPTS, accumulate, checkpoint

RESUMED = ("step_8", "step_16", "epoch_1")  # in the middle of an epoch; of the next; after an epoch


class Theirs(accelerate.Accelerator):
    def end_training(self) -> None:
        """The process group is that of the test's ranks, and stays."""


def their(**given: Any) -> Any:
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    return Theirs(cpu=True, **given)


def our(folder: str, ranks: int, **given: Any) -> Any:
    alone = {"num_gpus": 1} if ranks == 1 else {}
    return Accelerator(progress=False, run_dir=folder, **alone, **given)


def run_scripts(folder: str, ranks: int) -> dict[str, Any]:
    """Every script of both, and the states of each taken up again."""
    found: dict[str, Any] = {}
    for name, script in SCRIPTS.items():
        for whose in ("theirs", "ours"):
            place = Path(folder, f"{name}-{whose}")
            place.mkdir(exist_ok=True)
            make = their if whose == "theirs" else partial(our, f"{folder}/{name}-run", ranks)
            found[f"{name} {whose}"] = script(make, str(place), 4 // ranks)
    for state in RESUMED:
        make = partial(our, f"{folder}/{state}-run", ranks)
        found[f"resumed {state}"] = checkpoint(make, f"{folder}/checkpoint-ours", 4 // ranks, resume=state)
    if ranks > 1:
        make = partial(our, f"{folder}/sharded-run", ranks, sharding="full", whole_model_on="all")
        found["sharded"] = accumulate(make, folder, 4 // ranks)
    return found


@pytest.fixture(scope="module", params=[1, 2])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of each rank."""
    folder = str(tmp_path_factory.mktemp("scripts"))
    return [run_scripts(folder, 1)] if request.param == 1 else run_ranks(run_scripts, 2, folder, 2)


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_trains_to_numbers_of_accelerate(name: str, found: list[dict[str, Any]]) -> None:
    for rank in found:
        ours, theirs = rank[f"{name} ours"], rank[f"{name} theirs"]
        assert ours.keys() == theirs.keys()
        for part, value in theirs.items():
            if part == "weights":
                assert torch.allclose(ours[part], value, rtol=0, atol=1e-9)
            else:
                assert ours[part] == (pytest.approx(value) if part in ("norms", "rates", "total") else value), part


@pytest.mark.parametrize("state", RESUMED)
def test_loaded_state_ends_as_undisturbed(state: str, found: list[dict[str, Any]]) -> None:
    for rank in found:
        whole, resumed = rank["checkpoint ours"], rank[f"resumed {state}"]
        assert torch.allclose(resumed["weights"], whole["weights"], rtol=0, atol=1e-12)
        assert (resumed["metrics"], resumed["seen"]) == (whole["metrics"], whole["seen"])


def test_sharded_script_trains_to_the_same_numbers(found: list[dict[str, Any]]) -> None:
    for rank in found:
        sharded, whole = rank.get("sharded", rank["accumulate ours"]), rank["accumulate theirs"]
        assert torch.allclose(sharded["weights"], whole["weights"], rtol=0, atol=1e-9)
        assert sharded["metrics"] == whole["metrics"]
