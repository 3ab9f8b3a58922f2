"""The whole step as one CUDA graph: the same weights as eager steps, and every reason to stay eager is told."""

from __future__ import annotations

import ctypes
import json
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from distributed import Trainer
from distributed.checkpoint.restore.reading import load
from distributed.core.errors import DistributedError
from tests.conftest import clean_environ

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CAPTURED = "one CUDA graph from here on"


def rows(samples: int = 1000, width: int = 32) -> TensorDataset:
    x = torch.randn(samples, width, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long())


def mlp(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(dropout), nn.Linear(64, 4))


def normed() -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Unflatten(1, (2, 4, 4)), nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(128, 4))


def fit(folder: Path, model: nn.Module, data: Any = None, **settings: Any) -> tuple[Trainer, dict[str, Any], list[str]]:
    """The trainer, the weights, and what was said."""
    given = {"num_gpus": 1, "batch_size": 32, "epochs": 2, "log_every_n_steps": 10, "run_dir": folder} | settings
    names = ("optimizer", "scheduler", "loss_fn", "metrics")
    parts = {name: given.pop(name) for name in names if name in given}
    parts.setdefault("loss_fn", nn.CrossEntropyLoss())
    trainer = Trainer(model, **parts, **given)
    trainer.fit(data or DataLoader(rows(), shuffle=True, batch_size=given["batch_size"]))
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    said = [line["message"] for line in lines if line["event"] == "Warned"]
    return trainer, {name: value.float() for name, value in model.state_dict().items()}, said


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


KINDS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], float]] = {
    "sgd": (mlp, {"optimizer": sgd}, 1e-5),
    "adamw_with_a_schedule": (mlp, {"lr_schedule": "cosine", "warmup_steps": 5, "learning_rate": 0.01}, 1e-4),
    "not_fused": (mlp, {"learning_rate": 0.01, "fused_optimizer": False}, 1e-4),
    "a_scheduler_of_torch": (
        mlp,
        {
            "optimizer": sgd,
            "scheduler": lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 50),
            "scheduler_interval": "step",
        },
        1e-5,
    ),
    "accumulation_and_clipping": (
        mlp,
        {"optimizer": sgd, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5},
        1e-5,
    ),
    "targets": (mlp, {"optimizer": sgd, "loss_weighting": "targets"}, 1e-5),
    "dropout": (lambda: mlp(0.3), {"optimizer": sgd}, 1e-5),
    "batchnorm_of_images": (normed, {"optimizer": sgd}, 1e-4),
    "bf16": (mlp, {"optimizer": sgd, "mixed_precision": "bf16"}, 1e-2),
    "fp16": (mlp, {"optimizer": sgd, "mixed_precision": "fp16", "gradient_clipping": 1.0}, 1e-2),
    "bf16_parameters": (mlp, {"optimizer": sgd, "bf16_parameters": True}, 1e-2),
    "stochastic": (mlp, {"optimizer": sgd, "bf16_parameters": "stochastic"}, 1e-1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_captured_and_eager_runs_end_with_the_same_weights(kind: str, tmp_path: Path) -> None:
    make, settings, tolerance = KINDS[kind]
    _, eager, _ = fit(tmp_path / "eager", make(), capture=False, **settings)
    _, captured, said = fit(tmp_path / "captured", make(), capture=True, **settings)
    assert any(CAPTURED in line for line in said), said
    for name, value in eager.items():
        assert torch.allclose(captured[name], value, atol=tolerance, rtol=tolerance), name


def test_steps_with_loader_batches_are_captured(tmp_path: Path) -> None:
    """Not from tensors of a dataset that lies on the device, but copied for each step."""

    def loader() -> Any:
        return DataLoader([rows()[n] for n in range(1000)], shuffle=True, batch_size=32, num_workers=2)

    _, eager, _ = fit(tmp_path / "eager", mlp(), loader(), capture=False, optimizer=sgd)
    _, captured, said = fit(tmp_path / "captured", mlp(), loader(), capture=True, optimizer=sgd)
    assert any(CAPTURED in line for line in said), said
    assert all(torch.allclose(captured[name], value, atol=1e-5) for name, value in eager.items())


CALLS = [0]


class Warmup:
    """A model's state in an object, which a graph would never call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> float:
        self.calls += 1
        return 0.0 if self.calls < 20 else 1.0


class Odd(nn.Module):
    """A model that does in `forward` what a graph cannot repeat."""

    def __init__(self, does: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(32, 64), nn.Linear(64, 4)
        self.does = does
        self.count = 0
        self.hidden = ctypes.c_int(0)  # which nobody sees into, but the comparison
        self.warmup, self.nested, self.number = Warmup(), {"a": {"t": 0}}, np.int64(0)
        self.state = torch.zeros((), device="cuda")
        self.register_buffer("mean", torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.does == "waits" and x.sum().item() > 1e9:
            x = x * 2
        if self.does == "draws" and random.random() < 0:
            x = x * 2
        if self.does == "counts":
            self.count += 1
        if self.does == "hides":
            self.hidden.value += 1
            x = x * (1 + self.hidden.value)
        if self.does == "global":
            CALLS[0] += 1
        if self.does == "object":
            x = x + self.warmup() * x.square()
        if self.does == "nested":
            self.nested["a"]["t"] += 1
        if self.does == "numpy":
            self.number += 1
        if self.does == "in_place":
            self.state.add_(1)
        if self.does == "replaces":
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        if self.does == "stops":
            torch.cuda.synchronize()
        return self.last(x.relu())


def hooked() -> nn.Module:
    model = mlp()
    model[0].register_forward_hook(lambda *given: None)
    return model


def sgd_with_a_tensor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=torch.tensor(0.05), fused=True)


class OwnSgd(torch.optim.SGD):
    __module__ = "mine"


def measured_on_the_host(outputs: torch.Tensor, target: torch.Tensor) -> float:
    return float((outputs.argmax(1) == target).float().mean())


def cycled(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=100)


def with_names(samples: list[Any]) -> dict[str, Any]:
    x, y = default_collate(samples)
    return {"input": x, "target": y, "names": {"a", "b"}}


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = mlp()

    def forward(self, input: torch.Tensor, names: Any = None) -> torch.Tensor:
        return self.inner(input)


def shapes() -> Any:
    """Batches of many shapes: of sequences as long as their first sample says."""

    def collate(samples: list[Any]) -> Any:
        x, y = default_collate(samples)
        return x[:, : 16 + int(y.sum()) % 12], y

    return DataLoader(rows(2000), shuffle=True, batch_size=32, collate_fn=collate)


class AnyWidth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.last = nn.Linear(1, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x.mean(1, keepdim=True))


class Busy(nn.Module):
    """Computes for long what is launched at once."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.last = nn.Linear(32, 4)
        self.register_buffer("large", torch.randn(6000, 6000) / 6000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.large
        for _ in range(8):
            made = made @ self.large
        return self.last(x) + made.mean()


REASONS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "waits": (lambda: Odd("waits"), {}, "waits for the device at "),
    "draws": (lambda: Odd("draws"), {}, "draws from the generator of random"),
    "counts": (lambda: Odd("counts"), {}, "counts in Python: model.count changes"),
    "object": (lambda: Odd("object"), {}, "counts in Python: model.warmup.calls changes"),
    "nested": (lambda: Odd("nested"), {}, "counts in Python: model.nested['a']['t'] changes"),
    "numpy": (lambda: Odd("numpy"), {}, "counts in Python: model.number changes"),
    "global": (lambda: Odd("global"), {}, "CALLS[0] changes"),
    "in_place": (lambda: Odd("in_place"), {}, "changes the tensor model.state in place"),
    "replaces": (lambda: Odd("replaces"), {}, "puts another tensor in the place of model.mean"),
    "hooks": (hooked, {}, "a hook of the module 0 would not be called"),
    "rate_in_a_tensor": (mlp, {"optimizer": sgd_with_a_tensor}, "its learning rate is a tensor"),
    "hides": (lambda: Odd("hides"), {}, "captured, its loss is"),
    "stops": (lambda: Odd("stops"), {}, "CUDA refused it"),
    "own_optimizer": (mlp, {"optimizer": lambda p: OwnSgd(p, lr=0.05)}, "OwnSgd may keep numbers in Python"),
    "sgd_not_fused": (mlp, {"fused_optimizer": False}, "SGD reads its rate on the host"),
    "momentum_changes": (
        mlp,
        {"scheduler": cycled, "scheduler_interval": "step"},
        "momentum changes from step to step",
    ),
    "metrics_on_the_host": (mlp, {"metrics": {"mine": measured_on_the_host}}, "where it is measured, it waits"),
    "not_tensors": (Named, {"data": "names"}, "its batches hold a set"),
    "many_shapes": (AnyWidth, {"data": "shapes", "epochs": 4}, "more than 8 shapes of steps"),
    "busy": (Busy, {"capture": "auto", "mixed_precision": "bf16"}, "after the host has launched all"),
}


@pytest.mark.parametrize("reason", REASONS)
def test_uncapturable_step_is_reported_and_trains_eagerly(reason: str, tmp_path: Path) -> None:
    make, settings, expected = REASONS[reason]
    settings = {"optimizer": sgd, "capture": True} | settings
    kind = settings.pop("data", "")

    def data() -> Any:
        if kind == "names":
            return DataLoader(rows(), shuffle=True, batch_size=32, collate_fn=with_names)
        return shapes() if kind == "shapes" else None

    random.seed(0)
    _, eager, _ = fit(tmp_path / "eager", make(), data(), **settings | {"capture": False})
    random.seed(0)
    _, found, said = fit(tmp_path / "found", make(), data(), **settings)
    assert any(expected in line for line in said), said
    if reason == "waits":
        assert any("test_capture_gpu.py" in line for line in said), said
    if reason != "hides":  # whose forward was called once more, for the graph
        assert all(torch.allclose(found[name], value, atol=1e-5) for name, value in eager.items())


def test_warm_up_counter_in_an_object_advances_every_step(tmp_path: Path) -> None:
    model = Odd("object")
    fit(tmp_path, model, capture="auto", optimizer=sgd)
    assert model.warmup.calls == 64


class Moved(nn.Module):
    """A factor that somebody else moves: in an attribute, or where no look sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.beta, self.hidden = mlp(), 1.0, ctypes.c_int(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * (self.beta if self.hidden.value < 100 else 2 * self.beta)


def moving(move: Callable[[int], None]) -> Callable[[torch.optim.Optimizer], Any]:
    """A scheduler that leaves the rate alone and moves something else."""

    def rate(count: int) -> float:
        move(count)
        return 1.0

    return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


def test_change_between_epochs_is_captured_again(tmp_path: Path) -> None:
    found: dict[bool, dict[str, Any]] = {}
    for capture in (False, True):
        model = Moved()
        scheduler = moving(lambda count, model=model: setattr(model, "beta", 1.0 + (count > 1)))  # type: ignore[misc]
        settings: dict[str, Any] = {"optimizer": sgd, "scheduler": scheduler, "scheduler_interval": "epoch"}
        _, found[capture], said = fit(tmp_path / str(capture), model, capture=capture, epochs=4, **settings)
    assert any(CAPTURED in line for line in said), said
    assert any("captured again" in line and "model.beta changes" in line for line in said), said
    assert all(torch.allclose(found[True][name], value, atol=1e-5) for name, value in found[False].items())


def test_change_between_steps_prevents_capture(tmp_path: Path) -> None:
    model = Moved()
    scheduler = moving(lambda count: setattr(model, "beta", 1.0 + count / 100))
    _, _, said = fit(tmp_path, model, capture=True, optimizer=sgd, scheduler=scheduler, scheduler_interval="step")
    assert any("between two steps" in line and "model.beta changes" in line for line in said), said


def test_graph_that_goes_stale_unseen_stops_the_run(tmp_path: Path) -> None:
    """After 100 steps the model does something else, because of what nobody sees: neither goes on nor is saved."""
    model = Moved()
    scheduler = moving(lambda count: setattr(model.hidden, "value", count))
    settings: dict[str, Any] = {"optimizer": sgd, "scheduler": scheduler, "scheduler_interval": "step", "epochs": 10}
    with pytest.raises(DistributedError, match="no longer the model's") as stopped:
        fit(tmp_path, model, capture=True, **settings)
    last_good = int(re.findall(r"checkpoint of step (\d+) or before", str(stopped.value))[0])
    assert 16 <= last_good <= 100
    events = (tmp_path / "events.jsonl").read_text()
    assert "model.hidden" in events
    assert "cannot be seen" in events


SCRIPT = """
import sys, torch
from torch import nn
from torch.utils.data import DataLoader
from distributed import Trainer
from tests.gpu.test_capture_gpu import mlp, rows
folder, number = sys.argv[1:]
trainer = Trainer(mlp(0.2), loss_fn=nn.CrossEntropyLoss(), learning_rate=0.01, lr_schedule="cosine", num_gpus=1,
                  batch_size=32, epochs=40, capture=True, mixed_precision="bf16", run_dir=f"{folder}/run-{number}",
                  checkpoint_dir=f"{folder}/kept", checkpoint_frequency="100 steps", resume_from_checkpoint=True,
                  progress=False)
trainer.fit(DataLoader(rows(), shuffle=True))
"""


def has_record_to_compare(folder: Path) -> bool:
    """Whether the step after the newest checkpoint was recorded, with which a resume is compared."""
    saved = [int(path.parent.name.removeprefix("step-")) for path in folder.glob("kept/step-*/manifest.json")]
    return bool(saved) and any((folder / "kept").rglob(f"rank-0-step-{max(saved) + 1}.json"))


def kill_with_record(process: subprocess.Popen[bytes], folder: Path) -> None:
    """It must not save another checkpoint between the look and the kill."""
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and process.poll() is None:
        process.send_signal(signal.SIGSTOP)
        if has_record_to_compare(folder):
            break
        process.send_signal(signal.SIGCONT)
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def test_killed_captured_run_resumes_with_same_bytes(tmp_path: Path) -> None:
    def start(name: str, number: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / name), str(number)]
        return subprocess.Popen(command, env=clean_environ())

    assert start("whole", 0).wait(300) == 0
    killed = start("killed", 0)
    kill_with_record(killed, tmp_path / "killed")
    assert start("killed", 1).wait(300) == 0
    paths = [str(sorted((tmp_path / name / "kept").glob("step-*"))[-1]) for name in ("whole", "killed")]
    whole, resumed = (load(path).shared["model"] for path in paths)
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())
    events = (tmp_path / "killed" / "run-1" / "events.jsonl").read_text()
    assert CAPTURED in events
    assert '"passed":true' in events.replace(" ", "")
