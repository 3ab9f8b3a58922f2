"""Parameters in bf16: they learn as fp32 ones do, lose no small step, and are no matter to checkpoints and the user."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distributed import Trainer
from distributed.checkpoint.restore.restoring import restore
from distributed.core.env import WorkerEnv, worker_env
from distributed.core.errors import TaskError
from distributed.core.mesh import MeshSpec
from distributed.core.plan import BatchPlan, LoraPlan, MemoryPlan, OptimizerPlan, Plan, PrecisionPlan, SpeedPlan
from distributed.data.loading.loader import Microbatch
from distributed.runtime.session import Session
from distributed.strategies.replicated import Replicated
from distributed.strategies.speed.bf16_parameters import Bf16Parameters, round_at_random
from distributed.testing import run_ranks
from distributed.train.task import Task
from tests.meshes import make_data, make_model, save_state

KINDS = ("fp32", "compensated", "stochastic")
LOW = KINDS[1:]


@contextmanager
def training(kind: str, module: nn.Module | None = None, **task: Any) -> Iterator[Replicated]:
    """One process with bf16 autocast, as each kind of parameters has it."""
    session = Session.open(WorkerEnv(), device="cpu", collectives="gloo", timeout_s=60)
    session.seed(0)
    optimizer = OptimizerPlan(learning_rate=task.pop("rate", 0.01), clip_norm=task.pop("clip_norm", 1.0))
    plan = Plan(
        run_dir="",
        batch=BatchPlan(8, 1, 1),
        precision=PrecisionPlan("bf16"),
        optimizer=optimizer,
        speed=SpeedPlan(parameters=kind),
        memory=task.pop("memory", MemoryPlan()),
    )
    strategy = Replicated(plan)
    strategy.setup(Task(module or make_model(), nn.CrossEntropyLoss(), **task), session)
    try:
        yield strategy
    finally:
        strategy.close()


def steps(strategy: Replicated, first: int, last: int) -> list[float]:
    ids, targets = make_data(80).tensors
    found = []
    for step in range(first, last):
        rows = slice(8 * (step % 10), 8 * (step % 10) + 8)
        found.append(float(strategy.train_step([Microbatch((ids[rows], targets[rows]), 1.0, 8)]).loss))
    return found


def weights(strategy: Replicated) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in strategy.state()["model"].items()}


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(
        one[name].dtype == two[name].dtype and torch.equal(one[name], two[name]) for name in one
    )


def test_bf16_parameters_learn_as_fp32_do() -> None:
    found = {}
    for kind in KINDS:
        with training(kind) as strategy:
            kinds = {parameter.dtype for parameter in strategy.module.parameters()}
            assert kinds == ({torch.float32} if kind == "fp32" else {torch.float32, torch.bfloat16})
            found[kind] = steps(strategy, 0, 30)
    assert found["fp32"][-1] < found["fp32"][0] - 1
    for kind in LOW:
        assert found[kind] == pytest.approx(found["fp32"], abs=0.03)


def test_model_is_restored_in_fp32_with_its_own_parameters() -> None:
    for kind in LOW:
        module = make_model(tied=True)
        before = dict(module.named_parameters())
        with training(kind, module) as strategy:
            assert module.head.weight is module.tokens.weight
            assert module.head.weight.dtype == torch.bfloat16
            assert module.norm.weight.dtype == torch.float32  # few numbers, in which digits count
            steps(strategy, 0, 2)
            expected = weights(strategy)
        after = dict(module.named_parameters())
        assert all(after[name] is parameter for name, parameter in before.items())
        assert same(dict(module.state_dict()), expected)
        assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
        assert all(parameter.grad is None for parameter in module.parameters())
        places = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
        assert len(places) == len(list(module.parameters()))  # as safetensors wants them, which saves them afterwards


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 3), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > 1:
            raise RuntimeError("on purpose")
        return self.layer(x)


@pytest.mark.parametrize("kind", LOW)
def test_model_is_restored_after_a_failure(kind: str) -> None:
    module, micro = Failing(), Microbatch((torch.ones(2, 4), torch.tensor([0, 1])), 1.0, 2)
    own = module.layer.weight
    with training(kind, module) as strategy:
        strategy.train_step([micro])
        expected = weights(strategy)
        with pytest.raises(RuntimeError, match="on purpose"):
            strategy.train_step([micro])
    assert module.layer.weight is own
    assert same(dict(module.state_dict()), expected)


def moved(kind: str, rate: float, count: int) -> torch.Tensor:
    """How far weights of 1 come by steps of SGD that are `rate` long each: 0.0039 is half of what bf16 can tell."""
    module = nn.Linear(64, 64, bias=False)
    nn.init.ones_(module.weight)
    optimizer = torch.optim.SGD(module.parameters(), lr=rate)
    with training(kind, module, optimizer=optimizer, clip_norm=None) as strategy:
        assert strategy._low is not None
        for _ in range(count):
            for parameter in module.parameters():
                parameter.grad = torch.full_like(parameter, -1.0)
            strategy._low.take_gradients()
            strategy._update(False)
        return strategy.state()["model"]["weight"] - 1


def test_compensated_bf16_loses_no_small_step() -> None:
    found = moved("compensated", 1e-4, 100)
    assert torch.allclose(found, torch.full_like(found, 0.01), rtol=1e-3)


def test_stochastic_rounding_keeps_small_steps_on_average() -> None:
    found = moved("stochastic", 1e-4, 100)
    assert found.mean().item() == pytest.approx(0.01, rel=0.1)  # of 4096 weights: 5 deviations or so
    assert torch.equal(found + 1, (found + 1).bfloat16().float())


def test_stochastic_rounding_keeps_mean_and_special_values() -> None:
    torch.manual_seed(0)
    for value in (1.0 + 2**-10, -3.1415927, 1e-30, 65000.1):
        found = torch.full((100_000,), value)
        round_at_random(found)
        assert torch.equal(found, found.bfloat16().float())
        assert len(found.unique()) == 2
        gap = (found.max() - found.min()).item()
        assert abs(found.double().mean().item() - torch.tensor(value).item()) < 0.01 * gap
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.5, -1.5])
    found = special.clone()
    round_at_random(found)
    assert torch.equal(found.nan_to_num(7.0), special.nan_to_num(7.0))


@pytest.mark.parametrize("source", KINDS)
def test_bf16_checkpoints_hold_fp32_and_load_under_every_kind(source: str, tmp_path: Path) -> None:
    with training(source) as strategy:
        steps(strategy, 0, 3)
        saved = weights(strategy)
        save_state(strategy, strategy._session, str(tmp_path), 3)
        state = strategy.state()["optimizer"]["state"]
        assert {held["exp_avg"].dtype for held in state.values()} == {torch.float32}
        moments = {name: held["exp_avg"].clone() for name, held in state.items()}
        goes_on = steps(strategy, 3, 6)
    assert {value.dtype for value in saved.values()} == {torch.float32}
    for kind in KINDS:
        with training(kind) as strategy:
            found = restore(
                str(tmp_path), True, strategy._session, expected=strategy.state(), boxes=strategy.shard_ranges
            )
            assert found is not None
            assert not found.report.missing
            strategy.load_state(found.shared)
            now = weights(strategy)
            expected = {name: value.bfloat16().float() for name, value in saved.items()}
            low = {name for name, value in saved.items() if "norm" not in name}
            rounds = kind == "stochastic"
            assert same(now, {n: expected[n] if rounds and n in low else value for n, value in saved.items()})
            held = strategy.state()["optimizer"]["state"]
            assert same(moments, {name: one["exp_avg"] for name, one in held.items()})
            assert steps(strategy, 3, 6) == pytest.approx(goes_on, abs=0.02)


@pytest.mark.parametrize("kind", LOW)
def test_resumed_bf16_run_has_same_bytes(kind: str, tmp_path: Path) -> None:
    def run(folder: str, **more: Any) -> Path:
        options = {"batch_size": 8, "learning_rate": 0.01, "bf16_parameters": kind, "num_gpus": 1, "progress": False}
        trainer = Trainer(
            make_model(),
            loss_fn=nn.CrossEntropyLoss(),
            run_dir=str(tmp_path / folder),
            checkpoint_dir=str(tmp_path / folder / "checkpoints"),
            **options | more,
        )
        trainer.fit(make_data(32))
        ended.append({name: value.cpu().clone() for name, value in trainer.model.state_dict().items()})
        return tmp_path / folder / "checkpoints"

    ended: list[dict[str, torch.Tensor]] = []
    run("whole", max_steps=6, epochs=2)
    half = run("half", max_steps=3, epochs=2)
    run("rest", max_steps=6, epochs=2, resume_from_checkpoint=str(half))
    assert same(ended[0], ended[2])
    assert not same(ended[1], ended[2])


def train_on_ranks(kinds: tuple[str, ...]) -> dict[str, Any]:
    """Both ranks begin with weights of their own; what each ends with."""
    env = worker_env()
    assert env is not None
    session = Session.open(env, device="cpu", collectives="gloo", timeout_s=60)
    ids, targets = make_data(80).tensors
    found = {}
    for kind in kinds:
        module = make_model()
        if env.rank:
            nn.init.zeros_(module.head.weight)
        plan = Plan(
            run_dir="",
            batch=BatchPlan(4, 2, 1),
            mesh=MeshSpec(dp_replicate=2),
            precision=PrecisionPlan("bf16"),
            optimizer=OptimizerPlan(learning_rate=0.01, clip_norm=1.0),
            speed=SpeedPlan(parameters=kind),
        )
        strategy = Replicated(plan)
        strategy.setup(Task(module, nn.CrossEntropyLoss()), session)
        losses = []
        for step in range(10):
            session.seed_step(0, step)
            rows = slice(8 * step + 4 * env.rank, 8 * step + 4 * env.rank + 4)
            loss = torch.tensor(float(strategy.train_step([Microbatch((ids[rows], targets[rows]), 1.0, 4)]).loss))
            dist.all_reduce(loss)
            losses.append(loss.item() / 2)
        state = strategy.state()
        strategy.load_state(state)
        found[kind] = (losses, {name: value.clone() for name, value in state["model"].items()})
        strategy.close()
    return found


def test_two_bf16_ranks_stay_equal_and_match_one_process() -> None:
    first, second = run_ranks(train_on_ranks, 2, KINDS)
    with training("fp32") as strategy:
        alone = steps(strategy, 0, 10)
    for kind in KINDS:
        assert same(first[kind][1], second[kind][1]), kind
        assert first[kind][0] == pytest.approx(alone, abs=0.03), kind


def test_adapters_train_beside_frozen_layers_in_bf16() -> None:
    memory = MemoryPlan(lora=LoraPlan(rank=4, saves_alone=True))
    with training("compensated", memory=memory) as strategy:
        losses = steps(strategy, 0, 20)
        tree = strategy.state()
        assert all("lora" in name for name in tree["model"])
        strategy.load_state(tree)
    assert losses[-1] < losses[0]


def test_gradient_of_the_original_fp32_parameter_is_refused() -> None:
    module = nn.Linear(2, 2)
    own = module.weight
    low = Bf16Parameters(module, rounds=False)
    (module(torch.ones(1, 2).bfloat16()).sum() + (own**2).sum()).backward()
    with pytest.raises(TaskError, match="a gradient came to weight past the model"):
        low.take_gradients()


def test_lstm_flat_weights_become_bf16_and_are_restored() -> None:
    layer = nn.LSTM(4, 4)
    low = Bf16Parameters(layer, rounds=False)
    assert all(weight.dtype == torch.bfloat16 for weight in layer._flat_weights)
    low.close()
    assert all(weight.dtype == torch.float32 for weight in layer._flat_weights)


@pytest.mark.parametrize("name", ["register_hook", "register_post_accumulate_grad_hook"])
def test_gradient_hook_on_a_replaced_parameter_is_refused(name: str) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    own = module[0].weight
    getattr(module[1].weight, name)(lambda _: None)  # its parameters stay in their places
    handle = getattr(own, name)(lambda _: None)
    with pytest.raises(TaskError, match=r"hook on the gradient of 0\.weight") as caught:
        Bf16Parameters(module, rounds=False)
    assert caught.value.problems[0].why
    assert module[0].weight is own
    handle.remove()
    Bf16Parameters(module, rounds=False).close()


@pytest.mark.parametrize("kind", LOW)
def test_optimizer_over_some_parameters_moves_only_those(kind: str) -> None:
    module = make_model()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    optimizer = torch.optim.SGD(module.head.parameters(), lr=0.1)
    with training(kind, module, optimizer=optimizer) as strategy:
        losses = steps(strategy, 0, 4)
        after = weights(strategy)
    assert losses[-1] < losses[0]
    moved = {name for name in before if not torch.equal(after[name].bfloat16(), before[name].bfloat16())}
    assert moved == {name for name in before if name.startswith("head")}
