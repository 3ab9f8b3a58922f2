"""Checkpoints of DeepSpeed: any ZeRO stage, DDP, FSDP2 and one process load what any other saved, bytes equal.

Each trains a few steps and saves. Then each loads all of these, saves what it holds without a step in between, and
goes on: where it is the one that had saved, to the same bytes as without the interruption.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.checkpoint.reading import load
from distributed.checkpoint.tree import flatten
from distributed.testing import run_ranks
from tests.zero import Rank, make_tied, make_wide, train_unused

STEPS, MORE = 3, 2
PAIR = ["plain", "fsdp", "z1", "z2", "z3", "z3_cpu", "z2_bf16"]
ALONE = ["plain", "z2", "z3"]
SETTINGS = {"learning_rate": 0.01, "lr_schedule": "cosine"}


def train_and_save(kinds: list[str], root: str, suffix: str) -> None:
    for kind in kinds:
        rank = Rank(kind, make_tied(), **SETTINGS)
        rank.steps(STEPS)
        rank.save(f"{root}/{kind}{suffix}", STEPS)
        rank.steps(MORE)
        rank.save(f"{root}/{kind}{suffix}-on", STEPS + MORE)
        rank.strategy.close()


def load_and_save(kinds: list[str], root: str, suffix: str, sources: list[str]) -> dict[tuple[str, str], float]:
    losses = {}
    for kind in kinds:
        for source in sources:
            rank = Rank(kind, make_tied(), **SETTINGS)
            rank.load(f"{root}/{source}")
            rank.save(f"{root}/{source}-{kind}{suffix}", STEPS)
            losses[source, f"{kind}{suffix}"] = rank.steps(1)[0][0]
            if source == f"{kind}{suffix}":
                rank.steps(MORE - 1)
                rank.save(f"{root}/{source}-resumed", STEPS + MORE)
            rank.strategy.close()
    return losses


SOURCES = [*(f"{kind}-2" for kind in PAIR), "z3-1"]
TARGETS = [*(f"{kind}-2" for kind in PAIR), *(f"{kind}-1" for kind in ALONE)]


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[tuple[str, str], float]]:
    root = tmp_path_factory.mktemp("moved")
    run_ranks(train_and_save, 2, PAIR, str(root), "-2")
    train_and_save(["z3"], str(root), "-1")
    losses = run_ranks(load_and_save, 2, PAIR, str(root), "-2", SOURCES)[0]
    return root, losses | load_and_save(ALONE, str(root), "-1", SOURCES)


def tree_of(folder: Path, step: int = STEPS) -> dict[str, Any]:
    return load(str(folder / f"step-{step:06d}"), ranks=()).shared


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    before, after = flatten(one)[0], flatten(other)[0]
    assert before.keys() == after.keys()
    assert [name for name in before if before[name].dtype != after[name].dtype] == []
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert one["optimizer"]["param_groups"] == other["optimizer"]["param_groups"]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", SOURCES)
def test_what_one_saved_another_loads(source: str, target: str, moved: Any) -> None:
    root, losses = moved
    assert_same(tree_of(root / source), tree_of(root / f"{source}-{target}"))
    tolerance = 2e-2 if "bf16" in target else 1e-5
    assert losses[source, target] == pytest.approx(losses[source, "plain-1"], rel=tolerance)


@pytest.mark.parametrize("kind", [f"{kind}-2" for kind in PAIR if kind.startswith("z")])
def test_a_resumed_run_has_the_bytes_of_one_that_was_not_interrupted(kind: str, moved: Any) -> None:
    root, _ = moved
    assert_same(tree_of(root / f"{kind}-on", STEPS + MORE), tree_of(root / f"{kind}-resumed", STEPS + MORE))


def test_checkpoints_have_the_names_and_types_of_ddp(moved: Any) -> None:
    root, _ = moved
    expected = flatten(tree_of(root / "plain-2"))[0]
    for source in SOURCES:
        found = flatten(tree_of(root / source))[0]
        assert list(found) == list(expected), source
        assert [(t.dtype, t.shape) for t in found.values()] == [(t.dtype, t.shape) for t in expected.values()], source


def move_on_disk(folder: str) -> None:
    """From files of state on a disk into DDP, and back into files."""
    disk = {"offload_optimizer": "nvme", "offload_parameters": "nvme", "offload_dir": folder}
    rank = Rank("z3", make_wide(), **disk)
    rank.steps(STEPS)
    rank.save(f"{folder}/disk_saved", STEPS)
    rank.steps(MORE)
    rank.save(f"{folder}/disk_on", STEPS + MORE)
    rank.strategy.close()
    for kind, more, source, name in (
        ("plain", {}, "disk_saved", "plain_moved"),
        ("z3", disk, "plain_moved", "disk_moved"),
    ):
        rank = Rank(kind, make_wide(), **more)
        rank.load(f"{folder}/{source}")
        rank.save(f"{folder}/{name}", STEPS)
        if kind == "z3":
            rank.steps(MORE)
            rank.save(f"{folder}/disk_resumed", STEPS + MORE)
        rank.strategy.close()
    for kind in ("z1", "z3"):
        train_unused(kind, f"{folder}/unused_{kind}", STEPS)


def test_state_on_a_disk_and_parameters_that_nobody_uses(tmp_path: Path) -> None:
    run_ranks(move_on_disk, 2, str(tmp_path))
    saved = tree_of(tmp_path / "disk_saved")
    assert saved["optimizer"]["state"]["1.weight"]["step"] == STEPS
    assert_same(saved, tree_of(tmp_path / "plain_moved"))
    assert_same(saved, tree_of(tmp_path / "disk_moved"))
    assert_same(tree_of(tmp_path / "disk_on", STEPS + MORE), tree_of(tmp_path / "disk_resumed", STEPS + MORE))
    for kind in ("z1", "z3"):
        train_unused("plain", str(tmp_path / f"unused_{kind}_again"), 0, str(tmp_path / f"unused_{kind}"))
        assert_same(tree_of(tmp_path / f"unused_{kind}"), tree_of(tmp_path / f"unused_{kind}_again"))
