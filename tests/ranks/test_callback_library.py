"""EMA, SWA and Freeze against hand-written loops of one process, on 1, 2 and 3 ranks, and on every mesh."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.data import DataLoader, TensorDataset

from distributed import Callback, Trainer
from distributed.callbacks import EMA, SWA, EarlyStopping, Freeze, WeightAveraging
from distributed.checkpoint.restore.reading import load
from distributed.core.errors import CheckpointError, PlanError, TaskError
from distributed.testing import run_ranks
from tests.meshes import GLOBAL_BATCH, MESHES, make_data, make_model

EPOCHS, BATCH = 5, 12
State = dict[str, torch.Tensor]


def problem(samples: int = 50) -> TensorDataset:
    """The last step of an epoch is short."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 3, (samples,), generator=generator))


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8), nn.Linear(8, 3)
    return nn.Sequential(*layers).double()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def steps(trained: nn.Module, optimizer: torch.optim.Optimizer, **frozen: Any) -> Iterator[tuple[int, int]]:
    """A plain loop: (epoch, step) after each step; before each, `before(epoch, step)`."""
    step, before = 0, frozen.get("before", lambda epoch, step: None)
    for epoch in range(EPOCHS):
        for x, y in DataLoader(problem(), batch_size=BATCH):
            before(epoch, step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(trained(x), y).backward()
            nn.utils.clip_grad_norm_([p for p in trained.parameters() if p.grad is not None], 1.0)
            optimizer.step()
            step += 1
            yield epoch, step


def ema_by_hand(decay: float = 0.9, every: int = 1, **how: Any) -> tuple[State, State]:
    trained = model()
    average = AveragedModel(trained, multi_avg_fn=get_ema_multi_avg_fn(decay), **how)
    for _, step in steps(trained, sgd(trained.parameters())):
        if step % every == 0:
            average.update_parameters(trained)
    return trained.state_dict(), average.module.state_dict()


def swa_by_hand() -> tuple[State, State]:
    trained = model()
    average, optimizer = AveragedModel(trained), sgd(trained.parameters())
    rates, last = SWALR(optimizer, swa_lr=0.01, anneal_epochs=2), -(-len(problem()) // BATCH)
    for group in optimizer.param_groups:
        group["lr"] = 0.05
    for epoch, step in steps(trained, optimizer):
        if step % last == 0 and epoch >= 2:
            average.update_parameters(trained)
            rates.step()
    update_bn(DataLoader(problem(), batch_size=BATCH), average)
    return trained.state_dict(), average.module.state_dict()


def freeze_by_hand() -> tuple[State, State]:
    trained = model()

    def freeze(epoch: int, step: int) -> None:
        for name, parameter in trained.named_parameters():
            is_frozen = (
                (name[0] == "0" and epoch < 3) or (name[0] in "03" and epoch < 1) or (name[0] == "1" and step < 7)
            )
            parameter.requires_grad_(not is_frozen)

    for _ in steps(trained, sgd(trained.parameters()), before=freeze):
        pass
    return trained.state_dict(), {}


def freezing() -> list[Callback]:
    return [Freeze("0.*", until_epoch=3), Freeze(["3.*", "0.*"], until_epoch=1), Freeze("1.*", until_step=7)]


CASES: dict[str, tuple[Callable[[], tuple[State, State]], Callable[[], list[Callback]]]] = {
    "ema": (ema_by_hand, lambda: [EMA(0.9)]),
    "ema every third": (lambda: ema_by_hand(0.5, 3, use_buffers=True), lambda: [EMA(0.5, every=3, use_buffers=True)]),
    "swa": (swa_by_hand, lambda: [SWA(2, learning_rate=0.01, anneal_epochs=2)]),
    "swa evaluated": (swa_by_hand, lambda: [SWA(2, learning_rate=0.01, anneal_epochs=2, evaluates=True)]),
    "freeze": (freeze_by_hand, freezing),
}


def make_trainer(folder: str, callbacks: list[Callback], ranks: int, **more: Any) -> Trainer:
    options: dict[str, Any] = {"num_gpus": ranks, "batch_size": BATCH // ranks, "epochs": EPOCHS, "progress": False}
    options |= {"run_dir": folder, "checkpoint_dir": f"{folder}/checkpoints", "checkpoint_frequency": 1}
    options |= {"device": "cpu", "gradient_clipping": 1.0}
    return Trainer(model(), optimizer=sgd, callbacks=callbacks, **options | more)


def fit(folder: str, callbacks: list[Callback], ranks: int, **more: Any) -> tuple[State, State]:
    """The weights, and the averages where there are some."""
    trainer = make_trainer(folder, callbacks, ranks, **more)
    trainer.fit(DataLoader(problem(), batch_size=BATCH), DataLoader(problem(20), batch_size=5))
    averages = any(isinstance(callback, WeightAveraging) for callback in callbacks)
    return trainer.model.state_dict(), trainer.averaged_model().state_dict() if averages else {}


def fit_all(folder: str, ranks: int, **more: Any) -> dict[str, list[tuple[State, State]]]:
    """Each case whole, and resumed in the middle of its fourth epoch."""
    found = {}
    for name, (_, callbacks) in CASES.items():
        whole = fit(f"{folder}/{name}-whole", callbacks(), ranks, **more)
        fit(f"{folder}/{name}", callbacks(), ranks, max_steps=17, **more)
        again = fit(f"{folder}/{name}", callbacks(), ranks, resume_from_checkpoint=True, **more)
        found[name] = [whole, again]
    return found


def worst(one: State, other: State) -> float:
    """Of numbers that have a mean: torch would average counters too, and cut the result off."""
    assert one.keys() == other.keys()
    names = [name for name, value in one.items() if value.is_floating_point()]
    return max((float((one[name] - other[name]).abs().max()) for name in names), default=0.0)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.soak), 3])
def test_averages_and_freezing_match_hand_written_loops(ranks: int, tmp_path: Path) -> None:
    for found in run_ranks(fit_all, ranks, str(tmp_path), ranks):
        for name, (by_hand, _) in CASES.items():
            weights, averages = by_hand()
            whole, again = found[name]
            assert worst(whole[0], weights) < 1e-9, name
            assert worst(whole[1], averages) < 1e-9, name
            assert worst(whole[0], again[0]) == worst(whole[1], again[1]) == 0.0, f"{name} resumed has the same bytes"


def test_parent_of_ranks_has_averages_and_state_after_fit(tmp_path: Path) -> None:
    ema, stopping = EMA(0.9), EarlyStopping("val_loss", patience=1, min_delta=9.0)
    trainer = make_trainer(str(tmp_path / "run"), [ema, stopping], 2)
    history = trainer.fit(DataLoader(problem(), batch_size=BATCH), DataLoader(problem(20), batch_size=5))
    assert history.stopped == "stopped after epoch 2: val_loss has not improved for 1 epoch [EarlyStopping]"
    assert (ema.updates, stopping.waited, stopping.best) == (history.steps, 1, history["val_loss"][0])
    averaged = trainer.averaged_model()
    with torch.no_grad():
        x, y = problem(20).tensors
        assert history["val_loss"][1] == pytest.approx(nn.functional.cross_entropy(averaged.eval()(x), y).item())
    assert worst(averaged.state_dict(), trainer.model.state_dict()) > 1e-3
    trainer.save_model(tmp_path / "averaged.safetensors", averaged=True)
    trainer.save_model(tmp_path / "averaged.pt", averaged="EMA")
    assert worst(load_file(tmp_path / "averaged.safetensors"), averaged.state_dict()) == 0.0
    assert worst(torch.load(tmp_path / "averaged.pt"), averaged.state_dict()) == 0.0
    with pytest.raises(CheckpointError, match="has no 'SWA'"):
        trainer.averaged_model("SWA")
    ended = make_trainer(str(tmp_path / "run"), [EMA(0.9), copy.copy(stopping)], 1, resume_from_checkpoint=True)
    assert ended.fit(DataLoader(problem(), batch_size=BATCH), problem(20)).steps == history.steps, "it ends at once"


TWO = ("ddp", "zero1", "tp", "pp", "cp", "fsdp_grad_op")  # meshes of two ranks
MORE: dict[str, dict[str, Any]] = {
    "deepspeed": {"backend": "deepspeed", "zero_stage": 3},
    "horovod": {"backend": "horovod"},
    "bitwise": {"reproducible": "bitwise", "virtual_ranks": 2},
}


def mesh_settings(name: str) -> dict[str, Any]:
    return (
        MESHES[name].all_settings() if name in MESHES else {"num_gpus": 2, "batch_size": GLOBAL_BATCH // 2} | MORE[name]
    )


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def fit_meshes(folder: str, names: tuple[str, ...], **more: Any) -> dict[str, tuple[State, list[float]]]:
    """A run of each mesh that is resumed by the next one: the averages at its end, and the validation losses."""
    found = {}
    for name, other in zip(names, (*names[1:], names[0]), strict=True):
        for which, resumes, epochs in ((name, False, 1), (other, True, 2)):
            trainer = Trainer(
                make_model(),
                callbacks=[EMA(0.8)],
                loss_fn=nn.CrossEntropyLoss(),
                optimizer=momentum,
                epochs=epochs,
                progress=False,
                checkpoint_dir=f"{folder}/{name}",
                resume_from_checkpoint=resumes,
                **{"device": "cpu"} | mesh_settings(which) | more,
            )
            history = trainer.fit(make_data(), make_data(13))
        found[f"{name} → {other}"] = load(history.checkpoint, ranks=()).shared["copies"]["EMA"], history["val_loss"]
    return found


def average_of_meshes() -> tuple[State, list[float]]:
    trained = make_model()
    average = AveragedModel(trained, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    optimizer, losses = momentum(trained.parameters()), []
    for _ in range(2):
        for x, y in DataLoader(make_data(), batch_size=GLOBAL_BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(trained(x), y).backward()
            optimizer.step()
            average.update_parameters(trained)
        x, y = make_data(13).tensors
        with torch.no_grad():
            losses.append(nn.functional.cross_entropy(average(x), y).item())
    return average.module.state_dict(), losses


def assert_averages(found: dict[str, tuple[State, list[float]]], tolerance: float = 1e-6) -> None:
    averages, losses = average_of_meshes()
    for name, (copied, measured) in found.items():
        assert worst(copied, averages) < tolerance, name
        assert measured == pytest.approx(losses, abs=tolerance), f"{name} is validated with the averages"


def test_averages_of_each_mesh_go_on_under_the_next(tmp_path: Path) -> None:
    assert_averages(run_ranks(fit_meshes, 2, str(tmp_path), TWO)[0])


def test_averages_of_four_ranks_go_on_under_the_next(tmp_path: Path) -> None:
    assert_averages(run_ranks(fit_meshes, 4, str(tmp_path), ("pp_tp", "hybrid"))[0])


@pytest.mark.parametrize("engine", MORE)
def test_averages_of_each_engine_go_on_under_ddp(engine: str, tmp_path: Path) -> None:
    assert_averages(run_ranks(fit_meshes, 2, str(tmp_path), (engine, "ddp"))[0])


FREEZING: dict[str, dict[str, Any]] = {name: mesh_settings(name) for name in (*TWO, "horovod", "bitwise")}


def freeze_meshes(folder: str) -> dict[str, State]:
    """One block after the other is trained, and an embedding never."""
    found = {}
    for name, settings in FREEZING.items():
        trainer = Trainer(
            make_model(),
            callbacks=[Freeze("blocks.0.*", until_epoch=1), Freeze("head.*", until_step=3), Freeze("tokens.*")],
            loss_fn=nn.CrossEntropyLoss(),
            optimizer=decaying,
            epochs=2,
            gradient_clipping=0.5,
            progress=False,
            device="cpu",
            checkpoint_dir=f"{folder}/frozen-{name}",
            **settings,
        )
        found[name] = load(trainer.fit(make_data()).checkpoint, ranks=()).shared["model"]
    return found


def decaying(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


def frozen_by_hand() -> State:
    trained, step = make_model(), 0
    optimizer = decaying(trained.parameters())
    for epoch in range(2):
        for x, y in DataLoader(make_data(), batch_size=GLOBAL_BATCH):
            for name, parameter in trained.named_parameters():
                is_early = (name.startswith("blocks.0.") and epoch < 1) or (name.startswith("head.") and step < 3)
                parameter.requires_grad_(not is_early and not name.startswith("tokens."))
            optimizer.zero_grad()
            nn.functional.cross_entropy(trained(x), y).backward()
            nn.utils.clip_grad_norm_([p for p in trained.parameters() if p.grad is not None], 0.5)
            optimizer.step()
            step += 1
    return trained.state_dict()


def test_freezing_matches_a_hand_written_loop_on_every_mesh(tmp_path: Path) -> None:
    expected = frozen_by_hand()
    for name, weights in run_ranks(freeze_meshes, 2, str(tmp_path))[0].items():
        assert worst(weights, expected) < 1e-5, name


def test_averages_of_low_precision_weights_keep_their_digits(tmp_path: Path) -> None:
    trainer = Trainer(
        nn.Linear(2, 1).bfloat16(), callbacks=[EMA(0.99)], loss_fn=nn.MSELoss(), batch_size=4, progress=False
    )
    trainer.fit(TensorDataset(torch.ones(16, 2).bfloat16(), torch.zeros(16, 1).bfloat16()), run_dir=str(tmp_path))
    assert trainer.history is not None
    kept = load(trainer.history.checkpoint, ranks=()).shared["copies"]["EMA"]
    assert {value.dtype for value in kept.values()} == {torch.float32}
    assert {value.dtype for value in trainer.averaged_model().state_dict().values()} == {torch.bfloat16}


class Held(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(6, 3), nn.Linear(3, 3)
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.base(x))


class Unfreezes(Callback):
    def on_epoch_start(self, run: Any) -> None:
        run.model.requires_grad_(True)


@pytest.mark.parametrize(
    ("callback", "said"),
    [
        (lambda: EMA(1.0), "EMA(decay=1.0"),
        (lambda: SWA(-1), "start_epoch=-1"),
        (lambda: SWA(0, learning_rate=0.0), "learning_rate=0.0"),
        (lambda: EarlyStopping("val_margin"), "whether the least or the most val_margin is best"),
        (lambda: EarlyStopping(patience=0), "patience=0"),
        (lambda: Freeze("0.*", until_epoch=1, until_step=2), "until_step=2"),
        (lambda: Freeze("0.*", until_epoch=0), "until_epoch=0"),
    ],
)
def test_senseless_options_of_callbacks_are_refused(callback: Callable[[], Callback], said: str) -> None:
    with pytest.raises(TaskError) as refused:
        callback()
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("callback", "said", "settings"),
    [
        (Freeze("5.*"), "Freeze('5.*') matches no parameter", {}),
        (Freeze("encoder.*"), "do:  Freeze('0.weight'), say", {}),
        (Freeze("*"), "leaves nothing to train", {}),
        (Freeze("0.*"), "backend='deepspeed'", {"backend": "deepspeed"}),
        (SWA(9), "SWA(start_epoch=9), and the run has epochs=5", {}),
        (SWA(1), "reproducible='bitwise'", {"reproducible": "bitwise", "virtual_ranks": 4}),
        (EarlyStopping("val_loss"), "nothing is validated", {}),
    ],
)
def test_callbacks_that_cannot_work_are_refused_before_the_start(
    callback: Callback, said: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises((TaskError, PlanError)) as refused:
        make_trainer(str(tmp_path / "run"), [callback], 2, **settings).fit(DataLoader(problem(), batch_size=BATCH))
    assert said in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_unfreezing_what_no_optimizer_has_is_refused(tmp_path: Path) -> None:
    trainer = Trainer(Held(), callbacks=[Unfreezes()], batch_size=4, progress=False, run_dir=str(tmp_path / "run"))
    x, y = problem().tensors
    with pytest.raises(TaskError, match="the optimizer does not have it"):
        trainer.fit(TensorDataset(x.float(), y))
