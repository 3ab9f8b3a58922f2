"""DeepSpeed's pieces that need no ranks: ranges as boxes, compiled ops, what is refused, what the user gets back."""

from __future__ import annotations

import fcntl
import itertools
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distributed.core.env import WorkerEnv
from distributed.core.errors import CheckpointError, PlanError, TaskError
from distributed.core.plan import Plan
from distributed.engines.deepspeed.engine import DeepSpeedEngine
from distributed.engines.deepspeed.flat_ranges import fill_range, range_boxes, range_shard
from distributed.engines.deepspeed.ops import check_ops, needed_ops, ops_folder
from distributed.runtime.session import Session
from distributed.runtime.tensor_shard import TensorShard, box_size
from distributed.train.task import Task
from tests.zero import Rank, make_tied, plan_for

VARIABLES = ("LOCAL_RANK", "DS_ACCELERATOR", "TORCH_EXTENSIONS_DIR")
SHAPES = [(), (1,), (7,), (3, 5), (1, 4), (5, 1), (2, 3, 4), (3, 1, 2, 5)]


@pytest.mark.parametrize("shape", SHAPES)
def test_shard_ranges_of_a_flat_range_cover_it_in_order(shape: tuple[int, ...]) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for start, stop in itertools.combinations_with_replacement(range(whole.numel() + 1), 2):
        boxes = range_boxes(shape, start, stop)
        found = [whole[tuple(slice(a, b) for a, b in box)].reshape(-1) for box in boxes]
        assert torch.cat([*found, torch.empty(0)]).tolist() == list(range(start, stop))
        assert sum(map(box_size, boxes)) == stop - start
        assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_flat_ranges_round_trip_through_any_sharding() -> None:
    random.seed(0)
    for shape in SHAPES:
        whole = torch.randn(shape)
        size = whole.numel()
        cuts = sorted({0, size, *(random.randint(0, size) for _ in range(3))})
        parts = [range_shard(shape, a, whole.reshape(-1)[a:b]) for a, b in itertools.pairwise(cuts)]
        together = TensorShard(shape, whole.dtype, tuple(piece for part in parts for piece in part.pieces))
        start = random.randint(0, size)
        for value in (whole, together):
            target = torch.full((size - start,), torch.nan)
            fill_range(target, start, value)
            assert torch.equal(target, whole.reshape(-1)[start:])


def test_filling_a_range_from_incomplete_shards_raises() -> None:
    half = range_shard((4,), 0, torch.zeros(2))
    with pytest.raises(AssertionError, match="2 of 4"):
        fill_range(torch.empty(4), 0, half)


def test_ops_folder_is_versioned_unless_the_user_chose_one() -> None:
    ours = ops_folder({"XDG_CACHE_HOME": "/cache"})
    assert ours.parent == Path("/cache/distributed-training/deepspeed-ops")
    assert torch.__version__ in ours.name
    assert ops_folder({"TORCH_EXTENSIONS_DIR": "/mine"}) == Path("/mine")


def test_missing_compiler_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"no C\+\+ compiler") as error:
        check_ops(("async_io",), {"TORCH_EXTENSIONS_DIR": str(tmp_path), "CXX": "no-such-compiler"})
    assert "apt-get install g++ libaio-dev" in str(error.value)
    check_ops((), {"CXX": "no-such-compiler"})


def test_missing_libaio_headers_are_named(tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)
    with pytest.raises(PlanError, match="headers of libaio"):
        check_ops(("async_io",), {"TORCH_EXTENSIONS_DIR": str(tmp_path), "CXX": str(compiler)})


def test_loading_an_op_waits_for_its_builder_not_a_stale_lock(tmp_path: Path) -> None:
    try:
        check_ops(("async_io",))
    except PlanError:
        pytest.skip("the operator async_io needs g++ and libaio")
    folder = ops_folder(os.environ)
    left = folder / "async_io" / "lock"  # as a compiler that was killed leaves it
    left.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "distributed.engines.deepspeed.ops"]
    with open(folder / "building-async_io.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        loading = subprocess.Popen(
            command, env=os.environ | {"DS_ACCELERATOR": "cpu"}, stdout=subprocess.PIPE, text=True
        )
        with pytest.raises(subprocess.TimeoutExpired):
            loading.communicate(timeout=8)
        left.touch()
    assert "ready" in loading.communicate(timeout=600)[0]  # where it was not built before, it is now
    assert not left.exists()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, ("async_io",)),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, ()),
        ({"zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}, ()),
        ({"zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW"}}, ("fused_adam",)),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "optimizer": {"type": "Adam"}},
            ("cpu_adam",),
        ),
    ],
)
def test_needed_ops_follow_the_deepspeed_config(config: dict[str, Any], expected: tuple[str, ...]) -> None:
    assert needed_ops(config) == expected


def check(model: nn.Module, optimizer: Any = None, **settings: Any) -> None:
    plan = plan_for(WorkerEnv(), model, backend="deepspeed", **settings)
    DeepSpeedEngine(plan).check(Task(model, nn.CrossEntropyLoss(), optimizer=optimizer))


def test_optimizers_unsupported_by_zero_are_refused_by_name() -> None:
    model = make_tied()
    trained = [p for p in model.parameters() if p.requires_grad]
    for optimizer in (torch.optim.LBFGS(trained), torch.optim.SparseAdam(trained), torch.optim.Adafactor(trained)):
        with pytest.raises(TaskError, match=type(optimizer).__name__):
            check(model, optimizer)
    halves = [{"params": trained[:1]}, {"params": trained[1:]}]
    with pytest.raises(TaskError, match="Adagrad with several"):
        check(model, torch.optim.Adagrad(halves))
    check(model, torch.optim.AdamW(trained))


def with_zero(plan: Plan, source: str, **values: Any) -> Plan:
    config = plan.engine["config"]
    zero = config["zero_optimization"] | values
    return replace(plan, engine={"config": config | {"zero_optimization": zero}, "source": source})


def test_values_deepspeed_rejects_are_named_before_start() -> None:
    wrong = {
        "zero_optimization": {"reduce_bucket_size": "x", "overlap_comm": "perhaps"},
        "comms_logger": {"enabled": "maybe"},
        "flops_profiler": 3,
    }
    with pytest.raises(PlanError) as refused:
        check(make_tied(), deepspeed_config=wrong)
    assert {problem.what.removeprefix("deepspeed_config: ") for problem in refused.value.problems} == {
        'zero_optimization.reduce_bucket_size="x"',
        'zero_optimization.overlap_comm="perhaps"',
        'comms_logger.enabled="maybe"',
        "flops_profiler=3",
    }
    assert "valid integer" in str(refused.value)
    check(make_tied(), deepspeed_config={"zero_optimization": {"reduce_bucket_size": 1000}})


@pytest.mark.parametrize(("source", "error"), [("", ValueError), ("ds.json", PlanError)])
def test_failed_setup_leaves_the_users_optimizer_unchanged(source: str, error: type[Exception]) -> None:
    model = make_tied()
    fixed, inner = list(model.fixed.parameters()), list(model.inner.parameters())
    optimizer = torch.optim.AdamW([*fixed, *inner], lr=0.01)
    model.inner(torch.ones(7)).sum().backward()
    optimizer.step()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    moments = {parameter: state["exp_avg"].clone() for parameter, state in optimizer.state.items()}
    assert len(moments) == 2
    plan = with_zero(plan_for(WorkerEnv(), model, backend="deepspeed"), source, reduce_bucket_size="x")
    session = Session.open(WorkerEnv(), device="cpu", collectives="gloo", timeout_s=60)
    engine = DeepSpeedEngine(plan)
    with pytest.raises(error, match="reduce_bucket_size"):
        engine.setup(Task(model, nn.CrossEntropyLoss(), optimizer=optimizer), session)
    engine.close()
    assert optimizer.param_groups[0]["params"] == [*fixed, *inner]
    assert optimizer.state.keys() == moments.keys()
    assert all(torch.equal(optimizer.state[parameter]["exp_avg"], value) for parameter, value in moments.items())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_models_unsupported_by_deepspeed_are_refused() -> None:
    with pytest.raises(TaskError, match="meta device"):
        check(nn.Linear(2, 2, device="meta"))
    with pytest.raises(TaskError, match="the parameter weight is float64"):
        check(nn.Linear(2, 2).double())
    with pytest.raises(TaskError, match="0 has sparse gradients"):
        check(nn.Sequential(nn.Embedding(3, 2, sparse=True)))
    with pytest.raises(TaskError, match="1 is a BatchNorm layer"):
        check(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), mixed_precision="bf16")


@pytest.mark.parametrize("kind", ["z2", "z3", "z3_bf16"])
def test_model_and_optimizer_are_restored_with_trained_weights(kind: str) -> None:
    model, environ = make_tied(), [os.environ.get(name) for name in VARIABLES]
    linear = torch.nn.functional.linear
    before = {name: value.clone() for name, value in model.state_dict().items()}
    notes = [set(vars(owner)) for owner in (*model.modules(), *model.parameters())]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    rank = Rank(kind, model, own=optimizer)
    rank.steps(3)
    trained = {name: value.clone() for name, value in rank.strategy.state()["model"].items()}
    rank.strategy.close()
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], trained[name]) for name in after)
    assert not torch.equal(after["inner.weight"], before["inner.weight"])
    assert [set(vars(owner)) for owner in (*model.modules(), *model.parameters())] == notes
    assert [os.environ.get(name) for name in VARIABLES] == environ
    assert not torch.distributed.is_initialized()
    assert torch.nn.functional.linear is linear  # stage 3 has one of its own
    assert optimizer.param_groups[0]["params"] == [p for p in model.parameters() if p.requires_grad]
    assert optimizer.state[model.inner.weight]["step"] == 3
    assert optimizer.state[model.inner.weight]["exp_avg"].shape == model.inner.weight.shape
    again = Rank(kind, model, own=optimizer)  # also by DeepSpeed
    again.steps(1)
    again.strategy.close()
    assert optimizer.state[model.inner.weight]["step"] == 4
    model(torch.zeros(1, 5, dtype=torch.int64)).sum().backward()
    optimizer.step()


def test_state_with_differing_step_counts_is_refused() -> None:
    rank = Rank("z2", make_tied())
    rank.steps(1)
    tree = rank.strategy.state()
    tree["optimizer"]["state"]["inner.bias"]["step"] = torch.tensor(7.0)
    with pytest.raises(CheckpointError, match="'step' of the optimizer"):
        rank.strategy.load_state(tree)
    del tree["model"]["factor"]
    with pytest.raises(CheckpointError, match="another model"):
        rank.strategy.load_state(tree)
    rank.strategy.close()


def test_deepspeeds_own_optimizer_is_saved_like_torchs() -> None:
    given = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01, "torch_adam": True}}}
    trees = []
    for kind, more in (("z2", {"deepspeed_config": given}), ("plain", {})):
        model = make_tied()
        rank = Rank(kind, model, **more)
        rank.steps(2)
        trees.append(rank.strategy.state())
        rank.strategy.close()
    one, other = (tree["optimizer"]["state"] for tree in trees)
    assert list(one) == list(other)
    for name in one:
        assert list(one[name]) == list(other[name])
        assert all(torch.allclose(one[name][key], other[name][key], atol=1e-6) for key in one[name])


@pytest.mark.parametrize("kind", ["z1", "z3"])
def test_param_groups_with_frozen_parameters_keep_their_order(kind: str, tmp_path: Path) -> None:
    def three_groups(model: Any) -> torch.optim.Optimizer:
        groups = [[model.fixed.weight], model.inner.parameters(), [model.fixed.bias, model.factor]]
        rates = (0.1, 0.2, 0.3)
        return torch.optim.SGD([{"params": g, "lr": r} for g, r in zip(groups, rates, strict=True)], momentum=0.5)

    folder = str(tmp_path / "saved")
    model = make_tied()
    rank = Rank("plain", model, own=three_groups(model))
    rank.steps(2)
    rank.save(folder, 2)
    expected = rank.strategy.state()
    model = make_tied()
    rank = Rank(kind, model, own=three_groups(model))
    rank.load(folder)
    found = rank.strategy.state()
    assert [group["lr"] for group in found["optimizer"]["param_groups"]] == [0.1, 0.2, 0.3]
    assert found["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]
    for name in ("inner.weight", "factor"):
        assert torch.equal(
            found["optimizer"]["state"][name]["momentum_buffer"],
            expected["optimizer"]["state"][name]["momentum_buffer"],
        )
    rank.steps(1)
    rank.strategy.close()
