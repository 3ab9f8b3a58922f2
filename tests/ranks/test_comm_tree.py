"""Sums in a tree's order: the bytes are those of a plain recursion, however the leaves are divided among processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distributed.comm.layout import FlatLayout
from distributed.comm.tree import TreeSum
from distributed.core.env import WorkerEnv, worker_env
from distributed.runtime.session import Session
from distributed.testing import run_ranks

LEAVES = 8
SIZES = {"small": 5, "large": 100_003}  # below and above the size from which halves are swapped


def alone() -> Session:
    return Session(WorkerEnv(), torch.device("cpu"), None)


def make_leaf(leaf: int, size: int) -> list[torch.Tensor | None]:
    """Numbers of very different magnitude, so that any other order shows; zeros of both signs; a missing tensor."""
    generator = torch.Generator().manual_seed(leaf)
    values = torch.randn(size, generator=generator) * 10.0 ** torch.randint(-6, 6, (size,), generator=generator)
    values[::7] = -0.0
    half = torch.randn(3, 4, generator=generator).bfloat16()
    double = torch.randn((), generator=generator, dtype=torch.float64)
    return [values, None if leaf in (2, 3, 6) else half, double, torch.tensor([leaf, 2**40])]


def make_leaves(size: int) -> list[list[torch.Tensor | None] | None]:
    return [None if leaf == 5 else make_leaf(leaf, size) for leaf in range(LEAVES)]  # leaf 5 is empty


def plain_tree(leaves: list[Any], like: list[torch.Tensor]) -> list[torch.Tensor]:
    if len(leaves) == 1:
        values = leaves[0] or [None] * len(like)
        return [torch.zeros_like(t) if value is None else value for value, t in zip(values, like, strict=True)]
    half = len(leaves) // 2
    sums = plain_tree(leaves[:half], like), plain_tree(leaves[half:], like)
    return [left + right for left, right in zip(*sums, strict=True)]


def raw(tensors: list[torch.Tensor]) -> list[bytes]:
    return [tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]


def sum_with(session: Session, size: int) -> list[bytes]:
    leaves = make_leaves(size)
    like = [t for t in make_leaf(0, size) if t is not None]
    tree = TreeSum("test", FlatLayout(like), session)
    count = LEAVES // session.world_size
    for _ in range(2):  # buffers are used again, and must not remember
        for leaf in leaves[session.rank * count : (session.rank + 1) * count]:
            tree.add(leaf)
        total = raw(tree.total())
    return total


def expected(size: int) -> list[bytes]:
    return raw(plain_tree(make_leaves(size), [t for t in make_leaf(0, size) if t is not None]))


@pytest.mark.parametrize("size", SIZES)
def test_tree_sum_in_one_process_matches_recursion(size: str) -> None:
    assert sum_with(alone(), SIZES[size]) == expected(SIZES[size])


@pytest.mark.parametrize("ranks", [2, 4])
def test_tree_sum_over_ranks_matches_recursion(ranks: int) -> None:
    sum_leaves, sizes, environment = sum_with, SIZES, worker_env

    def sums() -> dict[str, list[bytes]]:
        env = environment()
        assert env is not None
        session = Session(env, torch.device("cpu"), None)
        return {name: sum_leaves(session, size) for name, size in sizes.items()}

    wanted = {name: expected(size) for name, size in SIZES.items()}
    assert run_ranks(sums, ranks) == [wanted] * ranks


def test_sum_in_another_order_has_other_bytes() -> None:
    """Else the tests above could not fail."""
    size = SIZES["small"]
    like = [t for t in make_leaf(0, size) if t is not None]
    total = plain_tree(make_leaves(size)[:1], like)
    for leaf in make_leaves(size)[1:]:
        total = [a + b for a, b in zip(total, plain_tree([leaf], like), strict=True)]
    assert raw(total)[0] != expected(size)[0]
    torch.testing.assert_close(total[0], plain_tree(make_leaves(size), like)[0], rtol=1e-4, atol=1e-4)


def test_tree_sum_of_negative_zero_and_nothing_is_positive_zero() -> None:
    tree = TreeSum("test", FlatLayout([torch.zeros(1)]), alone())
    zero = [torch.tensor([-0.0])]
    for leaves in (zero, None), (None, zero), ([None], zero), (zero, [None]):
        for leaf in leaves:
            tree.add(leaf)
        (total,) = tree.total()
        assert not bool(torch.signbit(total)), "-0.0 + 0.0 is 0.0"


def test_discarded_tree_sum_leaves_nothing_behind() -> None:
    tree = TreeSum("test", FlatLayout([torch.zeros(1)]), alone())
    for _ in range(3):
        tree.add([torch.ones(1)])
    tree.discard()
    for _ in range(4):
        tree.add([torch.ones(1)])
    assert tree.total()[0].item() == 4


def test_flat_layout_views_do_not_overlap() -> None:
    like = [torch.zeros(3, dtype=torch.int8), torch.zeros(2, 2), torch.zeros(0), torch.zeros((), dtype=torch.int64)]
    flat = FlatLayout([*like, torch.zeros(5, dtype=torch.int8)]).new()
    for number, view in enumerate(flat.views):
        view.fill_(number + 1)
    assert [view.flatten().tolist() for view in flat.views] == [[1] * 3, [2.0] * 4, [], [4], [5] * 5]
