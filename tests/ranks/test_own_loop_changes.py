"""What a loop of the user's own changes between steps, as one process has it: what is trained, modes and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import distributed
from distributed.core.errors import CallbackError, PlanError, TaskError
from distributed.testing import run_ranks

SAMPLES, GLOBAL_BATCH, EPOCHS = 29, 8, 3


def problem() -> TensorDataset:
    x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(x, x[:, :4].argmax(1))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4)).double()
    model[0].requires_grad_(False)
    return model


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


def change(model: nn.Sequential, epoch: int) -> None:
    """As a fine-tuning does: BatchNorm is left as it is, layers are unfrozen, and others frozen."""
    if epoch == 1:
        model[0].requires_grad_(True)
        model[1].eval()
    if epoch == 2:
        model[3].requires_grad_(False)


def by_hand() -> torch.Tensor:
    model, (x, y) = net(), problem().tensors
    optimizer = sgd(model)
    for epoch in range(EPOCHS):
        change(model, epoch)
        for inputs, target in zip(x.split(GLOBAL_BATCH), y.split(GLOBAL_BATCH), strict=True):
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
            optimizer.zero_grad()
    return flat(model)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([value.double().flatten() for value in model.state_dict().values()])


def start(folder: str, ranks: int = 1, **settings: Any) -> tuple[Any, Any, Any, Any]:
    size = GLOBAL_BATCH // ranks // settings.get("gradient_accumulation_steps", 1)
    run = distributed.start(num_gpus=ranks, batch_size=size, epochs=EPOCHS, progress=False, run_dir=folder, **settings)
    model = net()
    return run, *run.prepare(model, sgd(model), DataLoader(problem(), batch_size=size))


def train(folder: str, ranks: int) -> tuple[torch.Tensor, str]:
    run, model, optimizer, loader = start(f"{folder}/whole", ranks)
    for epoch in run.epochs():
        change(model, epoch)
        for x, y in loader:
            run.backward(F.cross_entropy(model(x), y))
            run.step(optimizer)
    found = flat(model)
    run, model, optimizer, loader = start(f"{folder}/within", ranks)
    refused = ""
    for _ in run.epochs():
        try:
            for x, y in loader:
                run.backward(F.cross_entropy(model(x), y))
                run.step(optimizer)
                model[0].requires_grad_(True)
        except CallbackError as error:
            refused = str(error)
            break
    run.finish()
    return found, refused


@pytest.mark.parametrize("ranks", [1, 2])
def test_freezing_and_modes_in_a_loop_are_those_of_one_process(ranks: int, tmp_path: Path) -> None:
    """Several ranks agree on what is trained where a pass begins, and refuse a change within it."""
    found = [train(str(tmp_path), 1)] if ranks == 1 else run_ranks(train, ranks, str(tmp_path), ranks)
    for weights, refused in found:
        assert torch.allclose(weights, by_hand(), rtol=0, atol=1e-12)
        assert ("where the ranks do not meet" in refused) == (ranks > 1)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_dropped_within_a_step_are_missed(set_to_none: bool, tmp_path: Path) -> None:
    run, model, optimizer, loader = start(str(tmp_path / "run"), gradient_accumulation_steps=2)

    def loop() -> None:
        for _ in run.epochs():
            for x, y in loader:
                optimizer.zero_grad(set_to_none=set_to_none)
                run.backward(F.cross_entropy(model(x), y))
                run.step(optimizer)

    with pytest.raises(TaskError, match="leave zero_grad"), run:
        loop()


def test_second_pass_in_an_epoch_is_refused(tmp_path: Path) -> None:
    """It would have no batches. A look at the first one is no pass."""
    run, model, optimizer, loader = start(str(tmp_path / "run"))

    def loop() -> None:
        for _ in run.epochs():
            first = next(iter(loader))
            for at, (x, y) in enumerate(loader):
                assert at or torch.equal(x, first[0])
                run.backward(F.cross_entropy(model(x), y))
                run.step(optimizer)
            next(iter(loader))

    with pytest.raises(TaskError, match="second pass"), run:
        loop()
    assert run.history is None


def train_leaving(folder: str, is_left: bool, ranks: int, settings: dict[str, Any]) -> tuple[torch.Tensor, list[float]]:
    """Two steps an epoch; `is_left`: and a part of a third, of which all but its numbers is as if it were not."""
    run, model, optimizer, loader = start(folder, ranks, log_every_n_steps=1, **settings)
    accumulated = settings.get("gradient_accumulation_steps", 1)
    for epoch in run.epochs():
        model[1].eval()  # or BatchNorm would see the batch that is left
        model[0].requires_grad_(epoch > 0)
        for at, (x, y) in enumerate(loader):
            if at == 2 * accumulated and not is_left:
                break
            run.log(seen=1000.0 if at == 2 * accumulated else 1.0)
            run.backward(F.cross_entropy(model(x), y))
            if at == 2 * accumulated:
                break
            run.step(optimizer)
    return flat(model) if run.is_main else torch.empty(0), [record.metrics["seen"] for record in run.history.epochs]


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (1, {}),
        (2, {"gradient_accumulation_steps": 2}),
        (2, {"gradient_accumulation_steps": 2, "sharding": "grad_op"}),
    ],
)
def test_batch_left_before_its_step_leaves_nothing(ranks: int, settings: dict[str, Any], tmp_path: Path) -> None:
    """Neither its gradients nor its numbers are part of a step of the next epoch."""
    arguments = [(str(tmp_path / name), name == "left", ranks, settings) for name in ("left", "whole")]
    (left, seen), (whole, _) = (
        train_leaving(*given) if ranks == 1 else run_ranks(train_leaving, ranks, *given)[0] for given in arguments
    )
    assert torch.equal(left, whole)
    assert seen == [1.0] * EPOCHS


def test_pass_that_is_held_open_in_the_next_epoch_is_refused(tmp_path: Path) -> None:
    """The scope of its batch, with the precision and the hooks of a step, was not left."""
    run, model, optimizer, loader = start(str(tmp_path / "run"))
    held = []

    def loop() -> None:
        for _ in run.epochs():
            held.append(iter(loader))
            x, y = next(held[-1])
            run.backward(F.cross_entropy(model(x), y))
            run.step(optimizer)

    with pytest.raises(TaskError, match="second pass"), run:
        loop()


def test_training_data_after_the_run_is_refused(tmp_path: Path) -> None:
    run, model, optimizer, loader = start(str(tmp_path / "run"))
    for _ in run.epochs():
        for x, y in loader:
            run.backward(F.cross_entropy(model(x), y))
            run.step(optimizer)
    with pytest.raises(TaskError, match=r"outside of run\.epochs"):
        next(iter(loader))


@pytest.mark.parametrize(("second", "said"), [("training", "evaluation data"), ("evaluation", "two passes")])
def test_passes_at_a_time_are_refused(second: str, said: str, tmp_path: Path) -> None:
    """Which batches came together would depend on the number of ranks."""
    run = distributed.start(num_gpus=1, batch_size=8, progress=False, run_dir=str(tmp_path / "run"))
    model, data = net(), problem()
    one, other = DataLoader(data, batch_size=8), DataLoader(data, batch_size=4)
    model, optimizer, loader, one, other = run.prepare(model, sgd(model), DataLoader(data, batch_size=8), one, other)

    def loop() -> None:
        for _ in run.epochs():
            for (x, y), _ in zip(loader if second == "training" else one, other, strict=False):
                run.backward(F.cross_entropy(model(x), y))
                run.step(optimizer)

    with pytest.raises(TaskError, match=said), run:
        loop()


def test_models_of_one_optimizer_train_as_in_one_process(tmp_path: Path) -> None:
    """A part of the model in another object, and one that is not trained."""
    run = distributed.start(num_gpus=1, batch_size=8, epochs=1, progress=False, run_dir=str(tmp_path / "run"))
    trained = []
    for by_hand in (False, True):
        model, teacher = net(), net()
        head = nn.Linear(4, 4).double().requires_grad_(True)
        optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.3)
        loader: Any = DataLoader(problem(), batch_size=8)
        if not by_hand:
            *_, loader = run.prepare(model, head, teacher.eval(), optimizer, loader)
        for _ in range(1) if by_hand else run.epochs():
            for x, y in loader:
                loss = F.cross_entropy(head(model(x)), y) + F.mse_loss(head(model(x)), teacher.eval()(x))
                if by_hand:
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                else:
                    run.backward(loss)
                    run.step(optimizer)
        trained.append(torch.cat([flat(model), flat(head), flat(teacher)]))
    assert torch.allclose(*trained, rtol=0, atol=1e-12)
    run = distributed.start(num_gpus=1, batch_size=8, backend="fsdp", progress=False, run_dir=str(tmp_path / "sharded"))
    with pytest.raises(PlanError, match="several models"):
        run.prepare(net(), net(), DataLoader(problem(), batch_size=8))


def test_unfreezing_for_one_of_two_optimizers_is_refused(tmp_path: Path) -> None:
    """Its gradients were reduced by nobody, and dropped by nobody."""
    run = distributed.start(num_gpus=1, batch_size=8, progress=False, run_dir=str(tmp_path / "run"))
    model, head = net(), nn.Linear(4, 4).double()
    optimizer, of_head = sgd(model), sgd(head)
    *_, loader = run.prepare(model, head, optimizer, of_head, DataLoader(problem(), batch_size=8))

    def loop() -> None:
        for _ in run.epochs():
            for x, y in loader:
                run.backward(F.cross_entropy(head(model(x)), y))
                run.step(optimizer)
                of_head.zero_grad()
                model[0].requires_grad_(True)

    with pytest.raises(TaskError, match="unfrozen after the run had begun"), run:
        loop()
