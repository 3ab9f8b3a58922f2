"""Compressed gradients on real ranks: nothing is lost, whatever a step is made of, and less is sent.

The loss of `Straight` is linear in its weights, so its gradient does not depend on them. A compressed run then ends
where a dense one does, but for what it has not sent yet: its weights less the rate times the mean of what is left.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distributed
from distributed import Trainer
from distributed.checkpoint.restore.reading import load
from distributed.core.errors import NonFiniteLossError, TaskError
from distributed.runtime.abort.sockets import open_sockets
from distributed.testing import run_ranks

LOSSY = ("topk", "randomk", "powersgd", "int8", "onebit")
KINDS = ("fp16", "bf16", *LOSSY)
RATE, WIDTH, GLOBAL_BATCH = 0.5, 40, 12
_BYTES_SENT = struct.Struct("=200xQ")  # tcpi_bytes_sent of the kernel's TCP_INFO


class Straight(nn.Module):
    """Two matrices and a bias on every sample, and a third matrix on some batches."""

    def __init__(self, *, leaves_out: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(WIDTH, 30), nn.Linear(WIDTH, 30, bias=False)
        self.two.weight = nn.Parameter(self.two.weight.detach().t().contiguous().t())  # which DDP lays out otherwise
        self.seldom = nn.Linear(WIDTH, 30, bias=False) if leaves_out else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.one(x) + 2 * self.two(x)
        is_used = self.seldom is not None and bool(x[:, 0].sum() > 1)
        return found + self.seldom(x) if is_used else found  # type: ignore[misc]


class Along(nn.Module):
    """A loss that is linear in its input."""

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs * targets).sum(1).mean()


def straight_data(samples: int = 97) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(
        torch.randn(samples, WIDTH, generator=generator), torch.randn(samples, 30, generator=generator)
    )


def weighted_step(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    x, targets = batch
    weights = 0.1 + targets[:, 0].abs()
    return ((model(x) * targets).sum(1) * weights).sum() / weights.sum(), weights.sum()


def step_of_either(model: nn.Module, batch: Any, optimizer: str) -> torch.Tensor:
    x, targets = batch
    return Along()(model(x), targets)


def two_optimizers(model: Straight) -> dict[str, torch.optim.Optimizer]:
    return {
        "one": torch.optim.SGD(model.one.parameters(), RATE),
        "two": torch.optim.SGD(model.two.parameters(), RATE),
    }


# Of the loss and the bytes of a dense run: at most so much after three epochs on the digits.
BANDS = {
    "fp16": (1.05, 0.6),
    "bf16": (1.05, 0.6),
    "topk": (1.3, 0.35),
    "randomk": (2.0, 0.3),
    "powersgd": (1.3, 0.3),
    "int8": (1.1, 0.4),
    "onebit": (1.5, 0.25),
}
PLAIN: dict[str, Any] = {"loss_fn": Along(), "epochs": 2}
CASES: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "accumulation": PLAIN | {"gradient_accumulation_steps": 3},
    "weighted": {"training_step": weighted_step, "epochs": 2, "gradient_accumulation_steps": 2},
    # Its scale doubles every third step, until the gradient overflows and a step is skipped.
    "scaled": PLAIN
    | {"mixed_precision": "fp16", "scaler_init_scale": 2.0**12, "scaler_growth_interval": 3, "max_steps": 18},
    "unused": PLAIN | {"find_unused_parameters": True},
    "phases": {"training_step": step_of_either, "configure_optimizers": two_optimizers, "epochs": 2},
}
OF_KIND = {
    "plain": LOSSY,
    "accumulation": ("topk",),
    "weighted": ("int8", "topk"),
    "scaled": ("onebit", "topk"),
    "unused": ("topk", "powersgd"),
    "phases": ("powersgd",),
}
IN_BF16 = {"mixed_precision": "bf16", "bf16_parameters": True}
SMALL = {
    "topk": {"compression_ratio": 0.05},
    "randomk": {"compression_ratio": 0.05},
    "powersgd": {"compression_rank": 2},
}


def options_of(kind: str) -> dict[str, Any]:
    return SMALL.get(kind, {}) | ({"compression_min_size": 100} if kind in LOSSY else {})


def fit(case: str, kind: str, folder: str, **more: Any) -> dict[str, Any]:
    """A run of a case; what it ended with."""
    model, ranks = Straight(leaves_out=case == "unused"), more.pop("ranks", 2)
    options = CASES[case] | {"compression": kind} | options_of(kind) | more
    if "configure_optimizers" not in options:
        options["optimizer"] = torch.optim.SGD(model.parameters(), RATE)
    trainer = Trainer(
        model,
        batch_size=GLOBAL_BATCH // ranks,
        progress=False,
        checkpoint_frequency="4 steps",
        checkpoint_dir=folder,
        **options,
    )
    history = trainer.fit(straight_data())
    saved = load(history.checkpoint, ranks=()).shared
    return {
        "steps": history.steps,
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
        "left": saved.get("compression", {}).get("left", {}),
        "checkpoint": history.checkpoint,
        "certificates": certificates_of(history),
        "scale": saved.get("scaler", {}).get("scale"),
    }


def certificates_of(history: Any) -> list[str]:
    if dist.is_initialized() and dist.get_rank():
        return []  # rank 0 writes the events
    lines = Path(history.run_dir, "events.jsonl").read_text().splitlines()
    return [event["text"] for event in map(json.loads, lines) if event["event"] == "ResumeCompared"]


def earlier(checkpoint: str, step: int) -> str:
    return str(Path(checkpoint).with_name(f"step-{step:06d}"))


def own_loop(kind: str, folder: str) -> dict[str, Any]:
    """The weighted steps, in a loop of the user's own."""
    run = distributed.start(
        compression=kind,
        batch_size=3,
        gradient_accumulation_steps=2,
        epochs=2,
        checkpoint_dir=folder,
        checkpoint_frequency="4 steps",
        progress=False,
        **options_of(kind),
    )
    model = Straight()
    model, optimizer, loader = run.prepare(
        model, torch.optim.SGD(model.parameters(), RATE), DataLoader(straight_data(), batch_size=3, shuffle=True)
    )
    for _ in run.epochs():
        for batch in loader:
            run.backward(*weighted_step(model, batch))
            run.step(optimizer)
    assert run.history is not None
    saved = load(run.history.checkpoint, ranks=()).shared
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return {"weights": weights, "left": saved.get("compression", {}).get("left", {}), "steps": run.history.steps}


def run_cases(folder: str) -> dict[tuple[str, str], dict[str, Any]]:
    found = {}
    for case, kinds in OF_KIND.items():
        for kind in ("none", *kinds):
            found[case, kind] = fit(case, kind, f"{folder}/{case}-{kind}")
    for kind in ("none", "randomk"):
        found["own_loop", kind] = own_loop(kind, f"{folder}/own-{kind}")
    for kind in LOSSY:  # all that was saved at the eighth step comes to the same end
        path = earlier(found["plain", kind]["checkpoint"], 8)
        found["resumed", kind] = fit("plain", kind, f"{folder}/resumed-{kind}", resume_from_checkpoint=path)
    path = earlier(found["plain", "topk"]["checkpoint"], 8)
    found["changed", "int8"] = fit(
        "plain", "int8", f"{folder}/changed", resume_from_checkpoint=path, compression_min_size=10**6
    )
    return found


def assert_nothing_is_lost(found: dict[str, Any], dense: dict[str, Any]) -> None:
    assert found["left"], "nothing is left, so nothing was compressed"
    for name, weights in found["weights"].items():
        missing = found["left"][name].mean(0) if name in found["left"] else torch.zeros(())
        torch.testing.assert_close(weights - RATE * missing, dense["weights"][name], rtol=1e-4, atol=2e-4, msg=name)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    found: dict[tuple[str, str], dict[str, Any]] = run_ranks(run_cases, 2, str(tmp_path_factory.mktemp("cases")))[0]
    return found


@pytest.mark.parametrize(
    ("case", "kind"), [(case, kind) for case, kinds in OF_KIND.items() for kind in kinds] + [("own_loop", "randomk")]
)
def test_every_kind_of_step_applies_or_keeps_each_gradient(
    case: str, kind: str, cases: dict[tuple[str, str], dict[str, Any]]
) -> None:
    found, dense = cases[case, kind], cases[case, "none"]
    assert found["steps"] == dense["steps"]
    if case == "scaled":
        assert found["scale"] == dense["scale"] < 2.0**18, "no step was skipped"
    assert_nothing_is_lost(found, dense)
    if case == "unused":
        assert found["left"]["seldom.weight"].any()


@pytest.mark.parametrize("kind", LOSSY)
def test_resumed_run_has_the_same_bytes(kind: str, cases: dict[tuple[str, str], dict[str, Any]]) -> None:
    found, whole = cases["resumed", kind], cases["plain", kind]
    for part in ("weights", "left"):
        assert all(torch.equal(found[part][name], value) for name, value in whole[part].items()), part
    (certificate,) = found["certificates"]
    assert "PASS" in certificate


def test_what_one_kind_has_left_is_sent_by_another(cases: dict[tuple[str, str], dict[str, Any]]) -> None:
    found = cases["changed", "int8"]
    assert found["left"]
    assert not any(left.any() for left in found["left"].values()), "every tensor is sent whole now"
    assert_nothing_is_lost(found, cases["plain", "none"])


def go_on_with_three(folder: str, checkpoints: dict[str, str]) -> dict[str, dict[str, Any]]:
    return {
        kind: fit("plain", kind, f"{folder}/three-{kind}", ranks=3, resume_from_checkpoint=path)
        for kind, path in checkpoints.items()
    }


def test_other_numbers_of_ranks_lose_nothing(cases: dict[tuple[str, str], dict[str, Any]], tmp_path: Path) -> None:
    dense = cases["plain", "none"]
    checkpoints = {kind: earlier(cases["plain", kind]["checkpoint"], 8) for kind in LOSSY}
    for found in run_ranks(go_on_with_three, 3, str(tmp_path), checkpoints)[0].values():
        assert_nothing_is_lost(found, dense)
    path = checkpoints["topk"]
    alone = fit("plain", "topk", str(tmp_path / "one"), ranks=1, num_gpus=1, resume_from_checkpoint=path)
    for name, weights in alone["weights"].items():  # which sends nothing, and so keeps nothing
        torch.testing.assert_close(weights, dense["weights"][name], rtol=1e-4, atol=2e-4, msg=name)
    low = fit("plain", "topk", str(tmp_path / "low"), ranks=1, num_gpus=1, resume_from_checkpoint=path, **IN_BF16)
    assert not any(left.any() for left in low["left"].values()), "what steps are not the model's own parameters"
    for name, weights in low["weights"].items():
        torch.testing.assert_close(weights, dense["weights"][name], rtol=0.02, atol=0.1, msg=name)


def digits() -> TensorDataset:
    from sklearn.datasets import load_digits

    found = load_digits()
    return TensorDataset(torch.tensor(found.data, dtype=torch.float32) / 16, torch.tensor(found.target))


def bytes_sent() -> int:
    """By this process, over the connections that it has: the kernel's own count."""
    found = 0
    for descriptor in open_sockets().values():
        with socket.socket(fileno=os.dup(descriptor)) as one:
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                found += _BYTES_SENT.unpack_from(info.ljust(256, b"\0"))[0]
    return found


class Poisoned(torch.autograd.Function):
    """A weight, of whose gradient one number is NaN."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient[3, 5] = float("nan")
        return gradient


class Sick(Straight):
    """Its fourth gradient is not finite on rank 1."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        is_sick = self.calls == 4 and dist.get_rank() == 1
        weight = Poisoned.apply(self.two.weight) if is_sick else self.two.weight  # type: ignore[no-untyped-call]
        return self.one(x) + nn.functional.linear(x, weight)


class Turned(Straight):
    """With a complex parameter, whose gradient DDP gives as pairs of real numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.full((30,), 1j))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = (super().forward(x) * self.turn).abs()
        return found


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4, 30, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.words(x[:, 0].long() % 4)
        return found


def error_of(model: nn.Module, scale: float = 1.0, **settings: Any) -> Exception | None:
    x, targets = straight_data().tensors
    trainer = Trainer(
        model,
        loss_fn=nn.MSELoss(),
        optimizer=torch.optim.SGD(model.parameters(), 1e-9),
        **{"batch_size": 6, "progress": False} | settings,
    )
    try:
        trainer.fit(TensorDataset(x, targets * scale))
    except (NonFiniteLossError, TaskError) as error:
        return error
    return None


def learn() -> dict[str, Any]:
    """Each kind on a small task: its losses, and what this rank has sent, in bytes."""
    found: dict[str, Any] = {}
    for kind in ("none", *KINDS):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
        options = options_of(kind) | ({"compression_ratio": 0.1} if kind in ("topk", "randomk") else {})
        options |= {
            "compression": kind,
            "batch_size": 16,
            "epochs": 3,
            "progress": False,
        }
        optimizer, before = torch.optim.SGD(model.parameters(), 0.2), bytes_sent()
        history = Trainer(model, loss_fn=nn.CrossEntropyLoss(), optimizer=optimizer, **options).fit(digits())
        found[kind] = history["loss"][-1], bytes_sent() - before
    sick = {kind: error_of(Sick(), compression=kind, **options_of(kind)) for kind in ("none", "randomk")}
    large = {kind: error_of(Straight(), 1e9, compression=kind) for kind in ("fp16", "bf16")}
    sparse = error_of(Words(), compression="bf16")
    turned = error_of(Turned(), compression="int8", **options_of("int8"))
    return {"learned": found, "sick": sick, "large": large, "sparse": sparse, "turned": turned}


@pytest.fixture(scope="module")
def learned() -> dict[str, Any]:
    found: dict[str, Any] = run_ranks(learn, 2)[0]
    return found


def test_every_kind_learns_and_sends_less(learned: dict[str, Any]) -> None:
    dense, dense_bytes = learned["learned"]["none"]
    for kind, (most, most_bytes) in BANDS.items():
        loss, sent = learned["learned"][kind]
        assert loss < most * dense, (kind, loss, dense)
        assert sent < most_bytes * dense_bytes, (kind, sent, dense_bytes)


def test_nonfinite_gradient_is_reported_as_without_compression(learned: dict[str, Any]) -> None:
    """Also where its number is not among those that are sent."""
    dense, found = learned["sick"]["none"], learned["sick"]["randomk"]
    assert isinstance(dense, NonFiniteLossError)
    assert str(found) == str(dense)


def test_overflow_of_fp16_is_an_error_that_names_bf16(learned: dict[str, Any]) -> None:
    assert isinstance(learned["large"]["fp16"], TaskError)
    assert "compression='bf16'" in str(learned["large"]["fp16"])
    assert learned["large"]["bf16"] is None


def test_complex_parameters_are_trained(learned: dict[str, Any]) -> None:
    assert learned["turned"] is None


def test_sparse_gradients_are_refused(learned: dict[str, Any]) -> None:
    assert isinstance(learned["sparse"], TaskError)
    assert "words has sparse gradients" in str(learned["sparse"])
