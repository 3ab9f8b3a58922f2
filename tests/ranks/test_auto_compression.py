"""compression="auto" on real ranks: off where the link is fast, on where it is slow, off again if training suffers.

The loss of `Sloped` is linear in its weights, so its gradient does not depend on them: a run in which nothing was lost
ends where one with whole gradients does. Links are slow by `SlowLink`, beside which this machine's noise is small.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distributed import Trainer
from distributed.checkpoint.restore.reading import load
from distributed.testing import run_ranks
from tests.slow_link import SlowLink

SLOW = 2e6  # bytes a second
WIDTH, OUT, GLOBAL_BATCH, RATE = 256, 320, 12, 1e-3
CHOSEN, COMPARED = 11, 23  # steps after which a slow link has been measured, and what was chosen compared
DOUBLED = "doubled"  # a file that says that a rank was killed before


class Sloped(nn.Module):
    """A matrix of 80,000 numbers, and a bias."""

    def __init__(self, pause_s: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.pause_s = nn.Linear(WIDTH, OUT), pause_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.pause_s)
        found: torch.Tensor = self.layer(x)
        return found


class Rising(nn.Module):
    """A loss that is linear in outputs, and rises with what targets say of their place in the order."""

    def __init__(self, rises_by: float = 0.0) -> None:
        super().__init__()
        self.rises_by = rises_by

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs * targets[:, :OUT]).sum(1).mean() / OUT + self.rises_by * targets[:, OUT].mean()


def in_order(samples: int, ranks: int = 2) -> DataLoader[Any]:
    """Each target's last number is 0 in the first quarter of samples, then 1, and then 2."""
    generator = torch.Generator().manual_seed(3)
    x, targets = torch.randn(samples, WIDTH, generator=generator), torch.randn(samples, OUT + 1, generator=generator)
    place = torch.arange(samples) / samples
    targets[:, OUT] = (place >= 0.25).float() + (place >= 0.5)
    return DataLoader(TensorDataset(x, targets), batch_size=GLOBAL_BATCH // ranks, shuffle=False)


def fit(kind: str, folder: str, *, link: float = 0.0, steps: int = 30, **more: Any) -> dict[str, Any]:
    model, ranks = Sloped(more.pop("pause_s", 0.0)), more.pop("ranks", 2)
    loss = Rising(more.pop("rises_by", 0.0))
    with SlowLink(link) if link else nullcontext():
        trainer = Trainer(
            model,
            loss_fn=loss,
            optimizer=torch.optim.SGD(model.parameters(), RATE),
            compression=kind,
            epochs=1,
            max_steps=steps,
            progress=False,
            checkpoint_frequency="4 steps",
            checkpoint_dir=folder,
            **more,
        )
        history = trainer.fit(in_order(GLOBAL_BATCH * 100, ranks))
    saved = load(history.checkpoint, ranks=()).shared
    return {
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
        "saved": saved.get("compression", {}),
        "checkpoint": history.checkpoint,
        **told(history.run_dir),
    }


def told(run_dir: str) -> dict[str, Any]:
    lines = [json.loads(line) for line in Path(run_dir, "events.jsonl").read_text().splitlines()]
    path = Path(run_dir, "compression.json")
    return {
        "warned": [event["message"] for event in lines if event["event"] == "Warned"],
        "certificates": [event["text"] for event in lines if event["event"] == "ResumeCompared"],
        "switches": json.loads(path.read_text())["switches"] if path.exists() else [],
    }


def earlier(checkpoint: str, step: int) -> str:
    return str(Path(checkpoint).with_name(f"step-{step:06d}"))


def run_cases(folder: str) -> dict[str, dict[str, Any]]:
    cases = {
        "fast": fit("auto", f"{folder}/fast", steps=14, pause_s=0.1),
        "fast none": fit("none", f"{folder}/fast-none", steps=14),
        "slow": fit("auto", f"{folder}/slow", link=SLOW),
        "slow none": fit("none", f"{folder}/slow-none"),
        "risen": fit("auto", f"{folder}/risen", link=SLOW, steps=90, rises_by=100.0),
        "risen none": fit("none", f"{folder}/risen-none", steps=90),
    }
    for step in (8, 16, 24):
        path = earlier(cases["slow"]["checkpoint"], step)
        found = fit("auto", f"{folder}/resumed-{step}", link=SLOW, resume_from_checkpoint=path)
        cases[f"resumed {step}"] = found
    path = earlier(cases["risen"]["checkpoint"], 88)
    cases["resumed off"] = fit("auto", f"{folder}/off", link=SLOW, steps=90, resume_from_checkpoint=path)
    return cases


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = run_ranks(run_cases, 2, str(tmp_path_factory.mktemp("auto")))[0]
    return found


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert all(torch.equal(found["weights"][name], value) for name, value in expected["weights"].items())


def test_fast_link_stays_with_whole_gradients(cases: dict[str, dict[str, Any]]) -> None:
    found = cases["fast"]
    (switch,) = found["switches"]
    assert switch["kind"] == "none"
    assert found["saved"]["auto"]["stage"] == "whole"
    (said,) = [text for text in found["warned"] if "compression='auto'" in text]
    assert "sends whole gradients" in said
    assert "Mbit/s" in said
    assert said.endswith("[compression]")
    assert_same(found, cases["fast none"])


def test_slow_link_turns_a_kind_on_and_loses_nothing(cases: dict[str, dict[str, Any]]) -> None:
    found = cases["slow"]
    first, compared = found["switches"]
    assert first["step"] == CHOSEN
    assert first["kind"] == compared["kind"] != "none"
    assert compared["step"] == COMPARED
    for part in ("predicted with bf16", "int8", "topk", "Mbit/s whole gradients are faster"):
        assert part in first["reason"]
    left = found["saved"]["left"]["layer.weight"]  # so it is a kind that keeps: bf16 sends too much here
    assert left.any(), "nothing is left, so nothing was compressed"
    for name, weights in found["weights"].items():
        missing = left.mean(0) if name == "layer.weight" else torch.zeros(())
        torch.testing.assert_close(weights - RATE * missing, cases["slow none"]["weights"][name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("step", [8, 16, 24])
def test_resumed_run_goes_on_with_what_was_chosen(step: int, cases: dict[str, dict[str, Any]]) -> None:
    found = cases[f"resumed {step}"]
    assert_same(found, cases["slow"])
    assert found["saved"]["auto"] == cases["slow"]["saved"]["auto"]
    assert [*found["switches"], *cases["slow"]["switches"][len(found["switches"]) :]] == cases["slow"]["switches"]
    said = "goes on with" if step > CHOSEN else f"after step {CHOSEN}"  # as it lies beside that checkpoint
    assert any(said in text for text in found["warned"])
    assert any("PASS" in text for text in found["certificates"])


def test_loss_that_rises_turns_compression_off_for_good(cases: dict[str, dict[str, Any]]) -> None:
    found = cases["risen"]
    last = found["switches"][-1]
    assert last["kind"] == "none"
    assert "twice in a row" in last["reason"]
    assert any("compression='auto' ends" in text for text in found["warned"])
    assert found["saved"]["auto"]["stage"] == "whole"
    assert not found["saved"]["left"]
    for name, weights in cases["risen none"]["weights"].items():  # what was left was sent before the end
        torch.testing.assert_close(found["weights"][name], weights, rtol=1e-4, atol=1e-6)
    assert_same(cases["resumed off"], found)
    assert not cases["resumed off"]["switches"]


def fit_with_three(folder: str, checkpoint: str) -> dict[str, dict[str, Any]]:
    fast: dict[str, Any] = {"ranks": 3, "pause_s": 0.1}
    return {
        "resumed": fit("auto", f"{folder}/resumed", steps=44, resume_from_checkpoint=checkpoint, **fast),
        "fast": fit("auto", f"{folder}/fast", steps=14, **fast),
        "fast none": fit("none", f"{folder}/fast-none", steps=14, ranks=3),
    }


def test_choice_of_other_ranks_is_made_again_and_loses_nothing(
    cases: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    """What both ranks have left is sent with the first gradients of three, and then the link is measured."""
    path = earlier(cases["slow"]["checkpoint"], 28)
    three = run_ranks(fit_with_three, 3, str(tmp_path), path)[0]
    found = three["resumed"]
    assert [switch["kind"] for switch in found["switches"]] == ["none"]
    assert found["saved"]["auto"]["ranks"] == 3
    assert not found["saved"]["left"]
    alone = fit("auto", str(tmp_path / "one"), ranks=1, num_gpus=1, steps=30, resume_from_checkpoint=path)
    for name, weights in cases["slow none"]["weights"].items():  # a single rank steps by what was left
        torch.testing.assert_close(alone["weights"][name], weights, rtol=1e-4, atol=1e-6)
    assert_same(three["fast"], three["fast none"])  # whose thirds are rounded as DDP rounds them


class Killed(Sloped):
    """Over a slow link; rank 1 dies in a forward pass of the first attempt."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.calls:
            SlowLink(SLOW).__enter__()
        self.calls = self.calls + 1
        marker = Path(self.folder, DOUBLED)
        if self.calls == 16 and os.environ["RANK"] == "1" and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


def fit_killed(folder: Path, chosen: Path | None = None) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """`chosen`: by another run, which is not killed."""
    (folder / "run").mkdir(parents=True)
    if chosen is not None:
        (folder / DOUBLED).touch()
        shutil.copy(chosen, folder / "run")
    model = Killed(str(folder))
    trainer = Trainer(
        model,
        loss_fn=Rising(),
        optimizer=torch.optim.SGD(model.parameters(), RATE),
        compression="auto",
        num_gpus=2,
        epochs=1,
        max_steps=28,
        checkpoint_frequency="8 steps",
        run_dir=str(folder / "run"),
        progress=False,
        sanity_val_steps=0,
    )
    history = trainer.fit(in_order(GLOBAL_BATCH * 100))
    return model.state_dict(), told(history.run_dir)


def test_killed_run_repeats_what_it_had_chosen(tmp_path: Path) -> None:
    """The newest checkpoint is older than the choice: what was chosen is read, and made after the same step."""
    weights, found = fit_killed(tmp_path / "killed")
    assert (tmp_path / "killed" / DOUBLED).exists()
    first, compared = found["switches"]
    assert (first["step"], compared["step"]) == (CHOSEN, COMPARED)
    assert first["kind"] == compared["kind"] != "none"
    expected, undisturbed = fit_killed(tmp_path / "whole", tmp_path / "killed" / "run" / "compression.json")
    assert undisturbed["switches"] == found["switches"]
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
    assert any("PASS" in text for text in found["certificates"])
