"""A loop of the user's own: it trains what a hand-written loop of one process does, on any ranks and most meshes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import distributed
from distributed.core.errors import PlanError, TaskError
from distributed.testing import run_ranks

SAMPLES, GLOBAL_BATCH, EPOCHS = 53, 12, 2
TRAINED, EVALUATED = 50, 43  # the last of three ranks has none of the last step, and the second of two none at the end
Metrics = dict[str, float]


def problem(samples: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x[:samples], (x[:samples, :4].argmax(1)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.double()

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.norm(self.first(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.encode(x))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Its steps are as long as the gradients."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def weights_of(y: torch.Tensor) -> torch.Tensor:
    """How much each sample of a weighted loss counts."""
    return 1.0 + y.double()


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "weighted":
        each, weights = F.cross_entropy(model(x), y, reduction="none"), weights_of(y)
        return (each * weights).sum() / weights.sum()
    if kind == "twice":  # several calls, and of another method than forward
        return F.cross_entropy(model(x) + model(0.5 * x), y) + model.encode(x).pow(2).mean()  # type: ignore[operator]
    return F.cross_entropy(model(x), y)


def by_hand(
    kind: str, parts: int, clip: float | None, global_batch: int = GLOBAL_BATCH
) -> tuple[torch.Tensor, list[Metrics]]:
    """One process, with `parts` micro-batches a step."""
    model, data, held_out = Net(), problem(TRAINED), problem(EVALUATED)
    optimizer, found = optimizer_of(model), []
    for epoch in range(EPOCHS):
        order, epoch_loss = distributed_order(epoch), 0.0
        for start in range(0, TRAINED, global_batch):
            rows = order[start : start + global_batch]
            cuts = [rows[at : at + global_batch // parts] for at in range(0, len(rows), global_batch // parts)]
            whole = weights_of(data[rows][1]).sum() if kind == "weighted" else len(rows)
            for cut in cuts:
                x, y = data[cut]
                part = weights_of(y).sum() if kind == "weighted" else len(cut)
                loss = loss_of(model, x, y, kind) * part / whole
                loss.backward()
                epoch_loss += loss.item() * len(rows) / TRAINED
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            x, y = held_out[:]
            out = model(x)
            hits = (out.argmax(1) == y).double().mean().item()
            found.append({"loss": epoch_loss, "val_loss": F.cross_entropy(out, y).item(), "val_hits": hits})
        model.train()
    return flat(model), found


def distributed_order(epoch: int) -> list[int]:
    from distributed.data.order import shuffled_order

    return list(shuffled_order(TRAINED, 0, epoch))


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([value.double().flatten() for value in model.state_dict().values()])


def train(
    kind: str, run_dir: str, global_batch: int = GLOBAL_BATCH, **settings: Any
) -> tuple[torch.Tensor, list[Metrics], list[str]]:
    """The same by a run; on rank 0 the model is whole afterwards."""
    data = problem(TRAINED)
    accumulation = settings.get("gradient_accumulation_steps", 1)
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    size = global_batch // accumulation // (ranks // settings.get("tensor_parallel", 1))
    run = distributed.start(
        batch_size=size, epochs=EPOCHS, progress=False, run_dir=run_dir, log_every_n_steps=1, **settings
    )
    model = Net()
    optimizer = optimizer_of(model)
    model, optimizer, loader, val = run.prepare(
        model, optimizer, DataLoader(data, batch_size=size, shuffle=True), DataLoader(problem(EVALUATED), batch_size=7)
    )
    found, taken = [], 0
    for _ in run.epochs():
        seen = 0
        for x, y in loader:
            loss = loss_of(model, x, y, kind)
            weight = weights_of(y).sum().item() if kind == "weighted" else None
            run.backward(loss, weight)
            taken += run.step(optimizer)
            run.log(weight, twice=2 * loss)
        model.eval()
        with torch.no_grad():
            for x, y in val:
                out, seen = model(x), seen + len(y)
                run.log(val_loss=F.cross_entropy(out, y), val_hits=(out.argmax(1) == y).double().mean())
        found.append(dict(run.metrics))
        assert run.mean(seen) * ranks / settings.get("tensor_parallel", 1) == pytest.approx(EVALUATED)
    assert run.history is not None
    assert run.history.steps == taken == EPOCHS * -(-TRAINED // global_batch)
    last = run.history.epochs[-1].metrics
    if kind != "weighted":  # what is logged counts by its weight, and the loss of an epoch by samples
        assert last["twice"] == pytest.approx(2 * last["loss"])
    assert last["val_loss"] == found[-1]["val_loss"]
    for one, record in zip(found, run.history.epochs, strict=True):
        one["loss"] = record.metrics["loss"]
    return flat(model) if run.is_main else torch.empty(0), found, sorted(last)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("plain", {}),
    "clipped": ("plain", {"gradient_clipping": 0.05}),
    "weighted": ("weighted", {}),
    "twice": ("twice", {}),
    "accumulated": ("weighted", {"gradient_accumulation_steps": 2, "gradient_clipping": 0.05}),
}
MESHES: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp": ("plain", {"sharding": "full", "gradient_clipping": 0.05}),
    "fsdp-accumulated": ("weighted", {"sharding": "full", "gradient_accumulation_steps": 2}),
    "zero1": ("plain", {"zero_stage": 1}),
    "tensor": ("twice", {"tensor_parallel": 2, "tensor_parallel_plan": {"first": "column_gather"}}),
    "static": ("plain", {"static_graph": True}),
    "unused": ("plain", {"find_unused_parameters": True}),
}


def train_all(folder: str, cases: dict[str, Any]) -> dict[str, Any]:
    return {name: train(kind, f"{folder}/{name}", **settings) for name, (kind, settings) in cases.items()}


# Each way of a loop is trained by three ranks, some by one, and two train the meshes.
WORLDS: dict[int, dict[str, tuple[str, dict[str, Any]]]] = {
    1: {name: CASES[name] for name in ("weighted", "accumulated")},
    2: MESHES | {"accumulated": CASES["accumulated"]},
    3: CASES,
}


@pytest.fixture(scope="module", params=WORLDS)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What rank 0 of each world has trained."""
    folder = str(tmp_path_factory.mktemp("own-loop"))
    cases = WORLDS[request.param]
    if request.param == 1:
        return train_all(folder, cases)
    return run_ranks(train_all, request.param, folder, cases)[0]


def test_own_loop_trains_what_one_process_does(trained: dict[str, Any]) -> None:
    for name, (weights, metrics, names) in trained.items():
        kind, settings = (CASES | MESHES)[name]
        parts = settings.get("gradient_accumulation_steps", 1)
        expected, expected_metrics = by_hand(kind, parts, settings.get("gradient_clipping"))
        assert torch.allclose(weights, expected, rtol=0, atol=1e-9), name
        assert metrics == [pytest.approx(one, abs=1e-9) for one in expected_metrics], name
        assert names == ["loss", "twice", "val_hits", "val_loss"], name


def one_rank(run_dir: Path, *more: Any, **settings: Any) -> tuple[Any, ...]:
    run = distributed.start(num_gpus=1, batch_size=5, progress=False, run_dir=str(run_dir), **settings)
    model = Net()
    return run, *run.prepare(model, optimizer_of(model), DataLoader(problem(), batch_size=5), *more)


def test_broken_off_epoch_is_followed_by_the_next(tmp_path: Path) -> None:
    run, model, optimizer, loader = one_rank(tmp_path / "run", epochs=3)
    assert len(loader) == 11
    for _ in run.epochs():
        for taken, (x, y) in enumerate(loader):
            if taken == 2:
                break
            run.backward(F.cross_entropy(model(x), y))
            run.step(optimizer)
    assert run.history.steps == 6
    assert [record.samples for record in run.history.epochs] == [10, 10, 10]


@pytest.mark.parametrize(
    ("settings", "lengths"),
    [
        ({"gradient_accumulation_steps": 2}, [11, 11]),  # of six steps, the last with one
        ({"gradient_accumulation_steps": {0: 4, 1: 1}, "limit_train_batches": 2}, [8, 2]),
    ],
)
def test_length_is_that_of_the_pass(settings: dict[str, Any], lengths: list[int], tmp_path: Path) -> None:
    run, model, optimizer, loader = one_rank(tmp_path / "run", epochs=2, **settings)
    found = []
    for _ in run.epochs():
        found.append(len(loader))
        taken = 0
        for x, y in loader:
            run.backward(F.cross_entropy(model(x), y))
            run.step(optimizer)
            taken += 1
        assert taken == found[-1]
    assert found == lengths


def test_step_before_a_break_is_counted_and_saved(tmp_path: Path) -> None:
    run, model, optimizer, loader = one_rank(tmp_path / "run", epochs=2, log_every_n_steps=1)
    losses = []
    for _ in run.epochs():
        for x, y in itertools.islice(loader, 2):  # which leaves the pass after its second step
            losses.append(F.cross_entropy(model(x), y))
            run.backward(losses[-1])
            run.step(optimizer)
        for x, y in loader:  # goes on in the same epoch, behind them
            run.backward(F.cross_entropy(model(x), y))
            run.step(optimizer)
            if len(losses) == 4:
                break
    assert [record.samples for record in run.history.epochs] == [SAMPLES, 15]
    assert (run.history.steps, Path(run.history.checkpoint).name) == (14, "step-000014")


def test_evaluation_within_a_pass_is_measured_by_itself(tmp_path: Path) -> None:
    run = distributed.start(num_gpus=1, epochs=1, progress=False, run_dir=str(tmp_path / "run"), log_every_n_steps=1)
    model, loader = Net(), DataLoader(problem(), batch_size=5)
    model, optimizer, loader, same = run.prepare(model, optimizer_of(model), loader, loader)
    found = []
    for _ in run.epochs():
        for number, (x, y) in enumerate(loader):
            run.backward(F.cross_entropy(model(x), y))
            run.step(optimizer)
            if number in (3, 6):
                for _, y in same:
                    run.log(mean=y.double().mean(), rows=1.0 * len(y))
                found.append(run.metrics)
            run.log(number=number)
        run.log(outside=run.rank + 2.0)
    rows = [5.0] * 10 + [3.0]
    expected = problem().tensors[1].double().mean().item(), sum(size * size for size in rows) / SAMPLES
    assert [(one["mean"], one["rows"]) for one in found] == [pytest.approx(expected)] * 2
    metrics = run.history.epochs[-1].metrics
    assert metrics["outside"] == 2.0
    assert metrics["number"] == pytest.approx(sum(at * size for at, size in enumerate(rows)) / SAMPLES)


def test_tracked_objects_that_a_checkpoint_lacks_are_named(tmp_path: Path) -> None:
    def train(epochs: int, **tracked: Any) -> None:
        run = distributed.start(
            batch_size=20, epochs=epochs, progress=False, run_dir=str(tmp_path / "run"), resume_from_checkpoint=True
        )
        run.track(**tracked)
        model, optimizer, loader = run.prepare(model := Net(), optimizer_of(model), DataLoader(problem()))
        for _ in run.epochs():
            for x, y in loader:
                run.backward(F.cross_entropy(model(x), y))
                run.step(optimizer)

    schedule = torch.optim.lr_scheduler.StepLR(optimizer_of(Net()), 2)
    train(1, before=schedule)
    with pytest.warns(UserWarning, match="no state of after"), pytest.warns(UserWarning, match="state of before"):
        train(2, after=schedule)


def test_means_of_a_pass_that_is_broken_off_come_with_the_epoch(tmp_path: Path) -> None:
    run, model, optimizer, loader, val = one_rank(tmp_path / "run", DataLoader(problem(), batch_size=7), epochs=2)
    for epoch in run.epochs():
        for x, y in loader:
            run.backward(F.cross_entropy(model(x), y))
            run.step(optimizer)
        for taken, _ in enumerate(val):
            run.log(taken=taken)
            if epoch and taken == 2:
                break
        run.log(weight=2.0, sums=3.0)
        assert run.metrics.get("taken") == (None if epoch else pytest.approx((7 * sum(range(7)) + 4 * 7) / 53))
    assert (run.history["taken"][1], run.history["sums"]) == (1.0, [3.0, 3.0])


def test_loop_that_is_left_saves_when_it_is_finished(tmp_path: Path) -> None:
    with distributed.start(num_gpus=1, batch_size=5, epochs=9, progress=False, run_dir=str(tmp_path / "run")) as run:
        model = Net()
        model, optimizer, loader = run.prepare(model, optimizer_of(model), DataLoader(problem(), batch_size=5))
        for epoch in run.epochs():
            for x, y in loader:
                run.backward(F.cross_entropy(model(x), y))
                run.step(optimizer)
            if epoch == 1:
                break
    assert (run.history.steps, Path(run.history.checkpoint).name) == (22, "step-000022")
    with one_rank(tmp_path / "other")[0] as run:  # which only evaluates, for example
        with pytest.raises(TaskError, match=r"run\.finish"):
            run.finish()
    assert run.history is None


def test_one_rank_stops_and_saves_for_all(tmp_path: Path) -> None:
    """And what each rank gives to a mean counts by its weight, or not at all."""
    assert run_ranks(stopped_by_last_rank, 2, str(tmp_path / "run")) == [(5, 4, [2.5, 1.0])] * 2


def stopped_by_last_rank(run_dir: str) -> tuple[int, int, list[float]]:
    run = distributed.start(batch_size=4, epochs=3, progress=False, run_dir=run_dir, log_every_n_steps=1)
    model = Net()
    model, optimizer, loader = run.prepare(model, optimizer_of(model), DataLoader(problem(), batch_size=4))
    for _ in run.epochs():
        for number, (x, y) in enumerate(loader, 1):
            run.backward(F.cross_entropy(model(x), y))
            run.step(optimizer)
            if number == 3:
                means = [run.mean(1.0 + 2 * run.rank, weight=1 + 2 * run.rank), mean_of_first(run)]
            if run.rank == 1 and number == 4:
                run.save()
            if run.rank == 1 and number == 5:
                run.stop("enough")
    saved = sorted(Path(run.run_dir, "checkpoints").glob("step-*"))
    return run.history.steps, int(saved[0].name.partition("-")[2]), means


def mean_of_first(run: Any) -> float:
    return run.mean(math.nan if run.rank else 1.0, weight=0 if run.rank else 1)


def misuse(run: Any, model: Any, optimizer: Any, loader: Any, call: Callable[..., Any]) -> None:
    for _ in run.epochs():
        for x, y in loader:
            call(run, F.cross_entropy(model(x), y), optimizer)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda run, loss, optimizer: None, "did not call run.backward"),
        (lambda run, loss, optimizer: run.backward(loss), "did not call run.step"),
        (lambda run, loss, optimizer: run.step(optimizer), "before run.backward"),
        (lambda run, loss, optimizer: [run.backward(loss), run.step(optimizer), run.step()], "before the next batch"),
        (lambda run, loss, optimizer: [run.backward(loss), run.step(optimizer), run.backward(loss)], "after the batch"),
        (lambda run, loss, optimizer: [run.backward(loss), run.step(optimizer_of(Net()))], "not prepared"),
        (lambda run, loss, optimizer: run.track(late=optimizer), "after the first epoch"),
        (lambda run, loss, optimizer: run.prepare(Net()), "twice"),
        (lambda run, loss, optimizer: run.log(loss=loss), "cannot be called 'loss'"),
    ],
)
def test_misused_run_names_the_call(tmp_path: Path, call: Callable[..., Any], message: str) -> None:
    prepared = one_rank(tmp_path / "run")
    with pytest.raises(TaskError, match=message), prepared[0]:
        misuse(*prepared, call)


def test_run_refuses_what_it_cannot_prepare(tmp_path: Path) -> None:
    loader = DataLoader(problem(), batch_size=4)

    def prepare(*objects: Any, **settings: Any) -> None:
        run = distributed.start(num_gpus=1, batch_size=4, progress=False, run_dir=str(tmp_path / "run"), **settings)
        run.prepare(*objects)

    for objects, message in [
        ((Net(), loader, "text"), "got a str"),
        ((Net(),), "no DataLoader"),
        ((loader,), "no model"),
    ]:
        with pytest.raises(TaskError, match=message):
            prepare(*objects)
    with pytest.raises(PlanError, match="bitwise"):
        prepare(Net(), loader, reproducible="bitwise")
    with pytest.raises(PlanError, match="sanity_val_steps"):
        prepare(Net(), loader, loader, sanity_val_steps=3)
    auto = distributed.start(num_gpus=1, batch_size=4, run_dir=str(tmp_path / "auto"), compression="auto")
    with pytest.raises(PlanError, match="compression='auto'"):
        auto.prepare(Net(), loader)
    with pytest.raises(TaskError, match=r"run\.prepare"):
        distributed.start(num_gpus=1, progress=False).step()
