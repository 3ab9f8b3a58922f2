"""Checkpoints of DeepSpeed: any ZeRO stage, DDP, FSDP2 and one process load what any other saved, bytes equal.

Each trains a few steps and saves. Then one process loads all of these, each loads its own and another one, saves what
it holds without a step in between, and goes on: where it is the one that had saved, to the same bytes as without the
interruption. Every pair is in `make soak`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.checkpoint.format.tree import flatten
from distributed.checkpoint.restore.reading import load
from distributed.testing import run_ranks
from tests.zero import Rank, make_tied, make_wide, train_unused

STEPS, MORE = 3, 2
PAIR = ["plain", "fsdp", "z1", "z2", "z3", "z3_cpu", "z2_bf16"]
ALONE = ["plain", "z2", "z3"]
SETTINGS = {"learning_rate": 0.01, "lr_schedule": "cosine"}
Pairs = list[tuple[str, str]]  # source and target


def train_and_save(kinds: list[str], root: str, suffix: str) -> None:
    for kind in kinds:
        rank = Rank(kind, make_tied(), **SETTINGS)
        rank.steps(STEPS)
        rank.save(f"{root}/{kind}{suffix}", STEPS)
        rank.steps(MORE)
        rank.save(f"{root}/{kind}{suffix}-on", STEPS + MORE)
        rank.strategy.close()


def load_and_save(kinds: list[str], root: str, suffix: str, pairs: Pairs) -> dict[tuple[str, str], float]:
    losses = {}
    for kind in kinds:
        for source in [source for source, target in pairs if target == f"{kind}{suffix}"]:
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
ALL = [(source, target) for source in SOURCES for target in TARGETS]
USUAL = [
    (source, target)
    for source, target in ALL
    if target in ("plain-1", source, TARGETS[SOURCES.index(source) - 1]) or (source, target) == ("z2-2", "z2-1")
]
USUAL += [("z3-1", "z3-2"), ("z3-2", "z3-1")]


@dataclass(frozen=True)
class Moved:
    """Where the checkpoints are, and by source and target the loss of the step after a load."""

    root: Path
    losses: dict[tuple[str, str], float]


def save_and_load(root: str, pairs: Pairs, disk: str) -> dict[tuple[str, str], float]:
    train_and_save(PAIR, root, "-2")
    if disk:
        move_on_disk(disk)
    return load_and_save(PAIR, root, "-2", pairs)


def move(root: Path, pairs: Pairs, disk: str = "") -> Moved:
    """Two ranks do all of theirs in one pair of processes. None is done here: DeepSpeed sets variables."""
    run_ranks(train_and_save, 1, ["z3"], str(root), "-1")
    losses = run_ranks(save_and_load, 2, str(root), pairs, disk)[0]
    return Moved(root, losses | run_ranks(load_and_save, 1, ALONE, str(root), "-1", pairs)[0])


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory, disk: Path) -> Moved:
    return move(tmp_path_factory.mktemp("moved"), USUAL, str(disk))


@pytest.fixture(scope="module")
def moved_to_all(tmp_path_factory: pytest.TempPathFactory) -> Moved:
    return move(tmp_path_factory.mktemp("all"), ALL)


def tree_of(folder: Path, step: int = STEPS) -> dict[str, Any]:
    return load(str(folder / f"step-{step:06d}"), ranks=()).shared


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    before, after = flatten(one)[0], flatten(other)[0]
    assert before.keys() == after.keys()
    assert [name for name in before if before[name].dtype != after[name].dtype] == []
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert one["optimizer"]["param_groups"] == other["optimizer"]["param_groups"]


def assert_loaded(source: str, target: str, moved: Moved) -> None:
    assert_same(tree_of(moved.root / source), tree_of(moved.root / f"{source}-{target}"))
    tolerance = 2e-2 if "bf16" in target else 1e-5
    assert moved.losses[source, target] == pytest.approx(moved.losses[source, "plain-1"], rel=tolerance)


@pytest.mark.parametrize(("source", "target"), USUAL)
def test_checkpoint_loads_under_any_stage_or_strategy(source: str, target: str, moved: Moved) -> None:
    assert_loaded(source, target, moved)


@pytest.mark.soak
@pytest.mark.parametrize(("source", "target"), ALL)
def test_what_each_saved_every_other_loads(source: str, target: str, moved_to_all: Moved) -> None:
    assert_loaded(source, target, moved_to_all)


def test_each_is_loaded_by_itself_and_loads_another() -> None:
    assert {source for source, target in USUAL if source == target} == set(SOURCES)
    assert {target for source, target in USUAL if source != target} == set(TARGETS)
    assert {source for source, target in USUAL if source[:-2] != target[:-2]} == set(SOURCES)


@pytest.mark.parametrize("kind", [f"{kind}-2" for kind in PAIR if kind.startswith("z")])
def test_resumed_zero_run_has_same_bytes(kind: str, moved: Moved) -> None:
    root = moved.root
    assert_same(tree_of(root / f"{kind}-on", STEPS + MORE), tree_of(root / f"{kind}-resumed", STEPS + MORE))


def test_checkpoints_have_ddps_names_and_dtypes(moved: Moved) -> None:
    expected = flatten(tree_of(moved.root / "plain-2"))[0]
    for source in SOURCES:
        found = flatten(tree_of(moved.root / source))[0]
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


@pytest.mark.usefixtures("moved")
def test_disk_offload_and_unused_parameters_round_trip(disk: Path, tmp_path: Path) -> None:
    saved = tree_of(disk / "disk_saved")
    assert saved["optimizer"]["state"]["1.weight"]["step"] == STEPS
    assert_same(saved, tree_of(disk / "plain_moved"))
    assert_same(saved, tree_of(disk / "disk_moved"))
    assert_same(tree_of(disk / "disk_on", STEPS + MORE), tree_of(disk / "disk_resumed", STEPS + MORE))
    for kind in ("z1", "z3"):
        train_unused("plain", str(tmp_path / f"unused_{kind}_again"), 0, str(disk / f"unused_{kind}"))
        assert_same(tree_of(disk / f"unused_{kind}"), tree_of(tmp_path / f"unused_{kind}_again"))
