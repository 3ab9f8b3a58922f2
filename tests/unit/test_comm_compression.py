"""Compressors without a network: nothing of a gradient is lost, fewer bytes are sent, and all ranks decode the same."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

import distributed
from distributed import comm
from distributed.comm.compression.exchange import Exchange, ExchangePlace, Gather, GradientPiece, Reduced, Sum, Swap
from distributed.comm.compression.feedback import ErrorFeedback, row_box
from distributed.comm.compression.kinds import KINDS, make_compressor
from distributed.comm.compression.low_rank import orthonormal
from distributed.comm.compression.quantized import BLOCK
from distributed.comm.compression.sparse import drawn
from distributed.core.env import WorkerEnv
from distributed.core.errors import ConfigError
from distributed.core.plan_parts.compression import CompressionPlan
from distributed.runtime.session import Session
from distributed.runtime.tensor_shard import TensorShard
from distributed.strategies.data_parallel.compressed_gradients import FedBackGradients

SHAPES = {"wide": (24, 100), "tall": (331, 7), "long": (1031,)}
LOSSY = [kind for kind in KINDS if kind not in ("fp16", "bf16")]


class Network:
    """Carries out the requests of several ranks in one process, and counts the bytes that each rank sends."""

    def __init__(self) -> None:
        self.sent = 0.0  # by a rank, of collectives as rings and pairs carry them out

    def run(self, exchanges: list[Exchange]) -> list[list[Reduced]]:
        ranks = len(exchanges)
        requests = [next(exchange) for exchange in exchanges]
        while True:
            size = requests[0].tensor.numel() * requests[0].tensor.element_size()
            assert len({(type(one), one.tensor.shape, one.tensor.dtype) for one in requests}) == 1
            tensors = [one.tensor.clone() for one in requests]
            if isinstance(requests[0], Sum):
                self.sent += 2 * size * (ranks - 1) / ranks
                results = [sum(tensors[1:], tensors[0]) for _ in tensors]
            elif isinstance(requests[0], Gather):
                self.sent += size * (ranks - 1)
                results = [torch.stack(tensors) for _ in tensors]
            else:
                assert isinstance(requests[0], Swap)
                self.sent += size * (ranks - 1) / ranks
                results = [torch.stack([one[rank] for one in tensors]) for rank in range(ranks)]
            found: list[list[Reduced]] = []
            following = []
            for exchange, result in zip(exchanges, results, strict=True):
                try:
                    following.append(exchange.send(result))
                except StopIteration as done:
                    found.append(done.value)
            if found:
                assert len(found) == ranks
                return found
            requests = following


def draw(ranks: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {name: torch.randn(math.prod(shape), generator=generator) for name, shape in SHAPES.items()}
        for _ in range(ranks)
    ]


def reduce(kind: str, values: list[dict[str, torch.Tensor]], step: int = 0, **basis: torch.Tensor) -> Outcome:
    compressor = make_compressor(kind, ratio=0.05, rank=3)
    names = [name for name, shape in SHAPES.items() if compressor.fits(shape)]
    network = Network()
    found = network.run(
        [
            compressor.exchange(
                [GradientPiece(name, SHAPES[name], own[name].clone(), basis.get(name)) for name in names],
                ExchangePlace(rank, len(values), step),
            )
            for rank, own in enumerate(values)
        ]
    )
    return Outcome(names, found, network.sent)


class Outcome:
    def __init__(self, names: list[str], found: list[list[Reduced]], sent: float) -> None:
        self.names, self.sent = names, sent
        self.by_rank = [dict(zip(names, one, strict=True)) for one in found]


def mean(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(tensors).double().mean(0)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", LOSSY)
def test_what_is_sent_and_what_is_left_is_the_gradient(kind: str, ranks: int) -> None:
    values = draw(ranks)
    outcome = reduce(kind, values)
    for name in outcome.names:
        found = [one[name] for one in outcome.by_rank]
        assert all(torch.equal(one.mean, found[0].mean) for one in found), "ranks decode other numbers"
        whole = mean([own[name] for own in values])
        kept = found[0].mean.double() + mean([one.left for one in found])
        torch.testing.assert_close(kept, whole, rtol=0, atol=1e-5)
        assert found[0].mean.abs().sum() > 0


@pytest.mark.parametrize(
    ("kind", "most"), [("topk", 0.21), ("randomk", 0.06), ("powersgd", 0.35), ("int8", 0.35), ("onebit", 0.06)]
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_fewer_bytes_are_sent_than_of_whole_gradients(kind: str, most: float, ranks: int) -> None:
    outcome = reduce(kind, draw(ranks))
    numbers = sum(math.prod(SHAPES[name]) for name in outcome.names)
    assert outcome.sent < most * 2 * 4 * numbers * (ranks - 1) / ranks


@pytest.mark.parametrize("kind", LOSSY)
def test_a_constant_gradient_arrives_in_the_course_of_steps(kind: str) -> None:
    """Of 60 steps with one gradient, the sum of what was applied comes near 60 times that gradient."""
    values = draw(2)
    left = [{name: torch.zeros_like(value) for name, value in own.items()} for own in values]
    applied = {name: torch.zeros(math.prod(shape)) for name, shape in SHAPES.items()}
    basis: dict[str, torch.Tensor] = {}
    for step in range(60):
        fed = [{name: own[name] + rest[name] for name in own} for own, rest in zip(values, left, strict=True)]
        outcome = reduce(kind, fed, step, **basis)
        for rank, one in enumerate(outcome.by_rank):
            left[rank] |= {name: found.left for name, found in one.items()}
        for name, found in outcome.by_rank[0].items():
            applied[name] += found.mean
            if found.basis is not None:
                basis[name] = found.basis
    for name in outcome.names:
        whole = 60 * mean([own[name] for own in values])
        assert (applied[name] - whole).norm() < 0.5 * whole.norm(), name


def test_numbers_that_are_not_finite_are_not_hidden() -> None:
    for kind in LOSSY:
        values = draw(2)
        for own in values[1].values():
            own += math.nan  # as the hook makes it of a single NaN or infinity in a bucket
        outcome = reduce(kind, values)
        for one in outcome.by_rank:
            assert all(not torch.isfinite(found.mean).all() for found in one.values()), kind


@pytest.mark.parametrize("kind", LOSSY)
def test_zeros_stay_zeros(kind: str) -> None:
    values = [{name: torch.zeros(math.prod(shape)) for name, shape in SHAPES.items()} for _ in range(2)]
    for one in reduce(kind, values).by_rank:
        for found in one.values():
            assert not found.mean.any()
            assert not found.left.any()
            assert found.basis is None or found.basis.any(), "a direction without a gradient is lost for ever"


def test_a_matrix_of_low_rank_is_sent_exactly() -> None:
    torch.manual_seed(0)
    values = [{"wide": (torch.randn(24, 2) @ torch.randn(2, 100)).view(-1)} | draw(1)[0] for _ in range(1)]
    values[0]["wide"] = (torch.randn(24, 2) @ torch.randn(2, 100)).view(-1)
    found = reduce("powersgd", values).by_rank[0]["wide"]  # of rank 2, by factors of rank 3
    torch.testing.assert_close(found.mean, values[0]["wide"], rtol=1e-4, atol=1e-4)


def test_columns_become_orthonormal_and_dependent_ones_zero() -> None:
    torch.manual_seed(0)
    column = torch.randn(50, 1)
    found = orthonormal(torch.cat([column, 3 * column, torch.randn(50, 1), torch.zeros(50, 1)], 1))
    torch.testing.assert_close(found.T @ found, torch.diag(torch.tensor([1.0, 0.0, 1.0, 0.0])), rtol=0, atol=1e-6)


def test_random_places_differ_and_each_comes_up() -> None:
    generator = torch.Generator().manual_seed(0)
    seen = torch.zeros(103)
    for _ in range(500):
        places = drawn(103, 10, generator)
        assert len(set(places.tolist())) == 10
        seen[places] += 1
    assert seen.min() > 20
    assert seen.max() < 90  # 48.5 on average


def test_feedback_of_a_step_that_is_not_taken_stays_as_it_was() -> None:
    feedback = ErrorFeedback()
    feedback.follow({"w": torch.zeros(2, 3)})
    feedback.keep("w", torch.ones(6))
    feedback.take_step()
    feedback.keep("w", torch.full((6,), 9.0))
    feedback.forget_step()
    feedback.take_step()
    assert torch.equal(feedback.left["w"], torch.ones(2, 3))


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_other_numbers_of_ranks_take_over_the_mean_residual(ranks: int) -> None:
    layout = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    rows = torch.randn(3, 2, 3, 4, 5)
    found = []
    for _ in range(ranks):
        feedback = ErrorFeedback()
        feedback.load({"step": 7, "left": {"w": rows}, "basis": {}}, {"w": layout})
        assert feedback.step == 7
        assert feedback.left["w"].stride() == layout.stride()
        found.append(feedback.left["w"])
    torch.testing.assert_close(mean(found).float(), rows.mean(0))


def test_single_rank_steps_by_what_is_left_once() -> None:
    plan = CompressionPlan(kind="topk", min_size=1)
    session = Session(WorkerEnv(), torch.device("cpu"), None)
    scale = torch.tensor(8.0)
    gradients = FedBackGradients(plan, session, seed=0, finds_unused=False, loss_scale=lambda: scale)
    layer = torch.nn.Linear(3, 1)
    gradients.follow(layer)
    gradients.load({"left": {"weight": torch.ones(2, 1, 3)}})
    for overflows in (True, False):
        layer.weight.grad, layer.bias.grad = torch.zeros(1, 3), torch.tensor([math.inf if overflows else 0.0])
        gradients.flush({})
        scale.fill_(1.0)  # the gradients are unscaled and clipped
        gradients.flush({})
        assert layer.weight.grad.tolist() == [[8.0] * 3]
        gradients.commit()
        scale.fill_(8.0)
        assert bool(gradients.feedback.left["weight"].any()) == overflows, "the step is not taken"


def test_the_same_ranks_take_their_own_rows_exactly() -> None:
    kept = []
    for rank in range(3):
        feedback = ErrorFeedback()
        feedback.follow({"w": torch.zeros(4)})
        feedback.keep("w", torch.randn(4))
        feedback.take_step()
        kept.append(feedback.state(rank, 3)["left"]["w"])
    assert [shard.pieces[0][0] for shard in kept] == [row_box(rank, (3, 4)) for rank in range(3)]
    again = ErrorFeedback()
    again.load({"step": 1, "left": {"w": kept[1]}}, {"w": torch.zeros(4)})
    assert isinstance(kept[1], TensorShard)
    assert torch.equal(again.left["w"], kept[1].pieces[0][1][0])


def gradients() -> Iterator[torch.Tensor | None]:
    torch.manual_seed(0)
    yield torch.randn(20, 30).T  # not contiguous
    yield None
    yield torch.randn(3)  # a tenth of which is no number
    yield torch.randn(16, 16).to(torch.bfloat16)
    yield torch.randn(5, 5, dtype=torch.float64)
    yield torch.zeros(0)
    yield torch.tensor(2.0)


@pytest.mark.parametrize("kind", KINDS)
def test_compressed_gradients_keep_shapes_and_types(kind: str) -> None:
    given = list(gradients())
    before = [None if one is None else one.clone() for one in given]
    found = distributed.GradientCompression(kind=kind).compress_gradients(given)
    for one, kept, now in zip(given, before, found, strict=True):
        assert (now is None) == (one is None)
        if one is not None and kept is not None and now is not None:
            assert (now.shape, now.dtype) == (one.shape, one.dtype)
            assert torch.equal(one, kept), "the gradient itself was changed"


def test_default_keeps_the_largest_tenth_and_at_least_one() -> None:
    compression = comm.GradientCompression(compression_ratio=0.1)
    whole = torch.arange(-10.0, 10.0).view(4, 5)
    found = compression.compress_gradients([whole, torch.tensor([0.5, -2.0])])
    assert found[0] is not None
    assert found[1] is not None
    assert found[0].nonzero().tolist() == [[0, 0], [0, 1]]
    assert found[1].tolist() == [0.0, -2.0]
    assert all(a is b for a, b in zip(compression.decompress_gradients(found), found, strict=True))


def test_unknown_kinds_and_gradients_are_refused() -> None:
    with pytest.raises(ConfigError, match="take one of"):
        comm.GradientCompression(kind="gzip")
    for ratio in (0.0, -1.0, 1.5, math.nan):
        with pytest.raises(ConfigError, match="compression_ratio"):
            comm.GradientCompression(ratio)
    for bad in (torch.ones(3, dtype=torch.int64), torch.ones(3).to_sparse()):
        with pytest.raises(ConfigError, match="gradient 0 is"):
            comm.GradientCompression().compress_gradients([bad])


def test_a_block_of_signs_takes_a_bit_each_and_a_scale() -> None:
    assert reduce("onebit", draw(2)).sent < 2 * (sum(map(math.prod, SHAPES.values())) + 2 * BLOCK) / 8 * 1.1


def test_model_of_small_tensors_is_said_not_to_be_compressed() -> None:
    session = Session(WorkerEnv(world_size=2, local_world_size=2), torch.device("cpu"), None)
    plan = CompressionPlan("topk", 0.1, 4, 1000)
    gradients = FedBackGradients(plan, session, seed=0, finds_unused=False, loss_scale=lambda: None)
    chosen = []
    for width in (20, 200):
        gradients.follow(torch.nn.Linear(20, width))
        chosen.append(gradients.decision().choice)
    assert chosen == ["of 2 gradients 0 are compressed", "of 2 gradients 1 are compressed"]
