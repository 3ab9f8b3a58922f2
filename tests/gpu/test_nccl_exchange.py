"""A checkpoint of any mesh on NCCL goes on under any other: the next step is the one that one process takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.checkpoint.format.tree import flatten
from distributed.checkpoint.restore.reading import load
from tests.gpu.worlds import ALONE, SHARED, Job, result, run_jobs
from tests.meshes import MESHES, Trained, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

KINDS = ["one", "ddp", "fsdp", "zero1", "tp", "pp", "pp_tp"]
STEPS = 3
SGD = {"optimizer": "sgd", "momentum": 0.9, "learning_rate": 0.1}  # Adam makes steps of what is 0 but for rounding
# Each loads what three others have saved, so chosen that every two kinds meet once, one way or the other.
SOURCES = {kind: [KINDS[(at + step) % len(KINDS)] for step in (1, 2, 4)] for at, kind in enumerate(KINDS)}
PAIRS = [(source, kind) for kind, sources in SOURCES.items() for source in sources]


def save(mesh: str, root: Path, settings: dict[str, Any]) -> Trained:
    return train(mesh, root / mesh, max_steps=STEPS, **SGD, **settings)


def go_on(mesh: str, source: str, root: Path, settings: dict[str, Any]) -> Trained:
    checkpoint = str(root / source / "checkpoints" / f"step-{STEPS:06d}")
    more = settings | SGD | {"resume_from_checkpoint": checkpoint, "max_steps": STEPS + 1}
    return train(mesh, root / f"{source}-{mesh}", **more)


def jobs_of(ranks: int, root: Path, saved: list[str], *, saves: bool) -> dict[str, Job]:
    """Those of one world: what it saves, and what it loads of that and of what others have saved."""
    mine = [kind for kind in KINDS if MESHES[kind].ranks == ranks]
    jobs: dict[str, Job] = {kind: (save, (kind, root, SHARED)) for kind in mine if saves}
    pairs = [(source, kind) for source, kind in PAIRS if kind in mine and source in saved]
    return jobs | {f"{source}-{kind}": (go_on, (kind, source, root, SHARED)) for source, kind in pairs}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Worlds of 2, of 4 and again of 2 ranks, each with what there is to load by then."""
    root = tmp_path_factory.mktemp("saved")
    done: dict[str, Any] = {"whole": train("one", root / "whole", max_steps=STEPS + 1, **SGD, **ALONE)}
    done["one"] = save("one", root, ALONE)
    of_two = ["one", *(kind for kind in KINDS if MESHES[kind].ranks == 2)]
    of_four = [kind for kind in KINDS if MESHES[kind].ranks == 4]
    done |= run_jobs(2, jobs_of(2, root, of_two, saves=True))[0]
    done |= run_jobs(4, jobs_of(4, root, KINDS, saves=True))[0]
    done |= run_jobs(2, jobs_of(2, root, of_four, saves=False))[0]
    return done | {f"{source}-one": go_on("one", source, root, ALONE) for source in SOURCES["one"]}


def tensors_of(trained: Trained) -> dict[str, torch.Tensor]:
    tensors = flatten(load(trained.checkpoint, ranks=()).shared)[0]
    return {name: value for name, value in tensors.items() if value.is_floating_point()}


@pytest.mark.parametrize(("source", "kind"), PAIRS)
def test_next_step_after_resume_on_another_mesh_matches(source: str, kind: str, found: dict[str, Any]) -> None:
    after: Trained = result(found, f"{source}-{kind}")
    assert after.losses == pytest.approx(found["whole"].losses[STEPS:], rel=1e-5)
    assert after.norms == pytest.approx(found["whole"].norms[STEPS:], rel=1e-4)
    wanted, there = tensors_of(found["whole"]), tensors_of(after)
    assert wanted.keys() == there.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(there[name], value, rtol=1e-4, atol=1e-6, msg=name)
