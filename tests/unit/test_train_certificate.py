"""The resume certificate: what is recorded after a save is compared after a resume, and the first cause is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distributed.core.env import WorkerEnv
from distributed.runtime.session import Session
from distributed.train.resume.certificate import ResumeCertificate, Verdict

STEPS = 2  # after a save at step 4


def state(step: int, **wrong: float) -> dict[str, Any]:
    """Of a run; `wrong` components are others."""
    names = ("model", "optimizer", "loss", "rng")
    return {name: torch.tensor([float(step), wrong.get(name, 0.0)]) for name in names}


def resume(wrong: dict[int, dict[str, float]], until: int = 4 + STEPS) -> tuple[list[int], Verdict | None]:
    """The steps that are compared with those of a run that was not interrupted, and the verdict."""
    session, records = Session(WorkerEnv(), torch.device("cpu"), None), dict[str, bytes]()
    whole = ResumeCertificate(session, records.__setitem__, steps=STEPS)
    whole.saved(4)
    for step in range(4, 8):
        if whole.wants(step):
            whole.look(step, state(step))
    resumed = ResumeCertificate(session, lambda name, data: None, steps=STEPS)
    assert resumed.resumed(4, records.get)
    compared = []
    for step in range(4, until + 1):
        if resumed.wants(step):
            compared.append(step)
            if verdict := resumed.look(step, state(step, **wrong.get(step, {}))):
                return compared, verdict
    return compared, resumed.conclude()


def test_certificate_passes_for_equal_recorded_steps() -> None:
    compared, verdict = resume({})
    assert compared == [4, 5, 6]
    assert verdict is not None
    assert (verdict.passed, verdict.steps) == (True, STEPS)


@pytest.mark.parametrize(
    ("wrong", "component", "step"),
    [
        ({4: {"optimizer": 1.0}}, "optimizer", 4),
        ({6: {"model": 1.0}}, "model", 6),
        ({5: {"model": 1.0, "optimizer": 1.0, "rng": 1.0, "loss": 1.0}}, "rng", 5),
        ({5: {"model": 1.0}, 6: {"rng": 1.0, "model": 1.0}}, "model", 5),
    ],
)
def test_certificate_names_the_first_differing_component(
    wrong: dict[int, dict[str, float]], component: str, step: int
) -> None:
    _, verdict = resume(wrong)
    assert verdict is not None
    assert (verdict.passed, verdict.component, verdict.step) == (False, component, step)


def test_certificate_of_a_shorter_run_covers_its_steps() -> None:
    _, verdict = resume({}, until=5)
    assert verdict is not None
    assert (verdict.passed, verdict.steps) == (True, 1)
    _, verdict = resume({}, until=4)
    assert verdict is not None
    assert verdict.passed is None, "the state of the checkpoint alone proves no step"
