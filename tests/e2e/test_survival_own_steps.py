"""A rank that is killed in a step of the user's own: the run ends with the bytes of the undisturbed one.

It dies between two optimizers of a step, between two calls of a manual one, in an evaluation of a closure, and in a
step that counts. What the survivor holds at that place is no state of a step boundary, but for the last.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from distributed import Task, Trainer

STEPS, FATAL = 8, 6  # the checkpoint before the fatal step is that of step 4
BCE = F.binary_cross_entropy_with_logits


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(4 * STEPS, 3, generator=generator), torch.randn(4 * STEPS, 4, generator=generator))


def networks() -> nn.Module:
    torch.manual_seed(3)
    generator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 3))
    return nn.ModuleDict({"generator": generator, "critic": nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))})


@dataclass
class Death:
    """The second rank kills itself once, at this call of it."""

    marker: str  # a file, which says that it is done; "": it never does
    calls: int = 0

    def come(self, fatal: int) -> None:
        self.calls += 1
        if self.marker and self.calls == fatal and dist.get_rank() == 1 and not Path(self.marker).exists():
            Path(self.marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)


def adversaries(model: Any) -> dict[str, Any]:
    return {
        "critic": torch.optim.SGD(model["critic"].parameters(), lr=0.1, momentum=0.9),
        "generator": torch.optim.Adam(model["generator"].parameters(), lr=0.01),
    }


class Phases(Task):
    """Dies in the phase of the second optimizer."""

    def __init__(self, death: Death) -> None:
        super().__init__(networks())
        self.death = death

    def configure_optimizers(self, model: Any) -> Any:
        return adversaries(model)

    def training_step(self, model: Any, batch: Any, optimizer: str) -> torch.Tensor:  # type: ignore[override]
        judged = model["critic"](model["generator"](batch[1]))
        if optimizer == "generator":
            self.death.come(FATAL)
            return BCE(judged, torch.ones_like(judged))
        return BCE(model["critic"](batch[0]), torch.ones_like(judged)) + BCE(judged, torch.zeros_like(judged))

    def state(self) -> dict[str, Any]:
        return {}


class Calls(Phases):
    """Dies between the steps of two optimizers."""

    manual_optimization = True

    def training_step(self, model: Any, batch: Any) -> None:  # type: ignore[override]
        self.zero_grad()
        judged = model["critic"](model["generator"](batch[1]).detach())
        self.backward(BCE(judged, torch.zeros_like(judged)))
        self.step("critic")
        self.death.come(FATAL)
        self.zero_grad()
        judged = model["critic"](model["generator"](batch[1]))
        self.backward(BCE(judged, torch.ones_like(judged)))
        self.step("generator")


class Evaluations(Task):
    """Dies in one of the evaluations that an optimizer makes in a step."""

    def __init__(self, death: Death) -> None:
        model = networks()["critic"]
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3, history_size=3)
        super().__init__(model, optimizer=optimizer)
        self.death = death

    def training_step(self, model: Any, batch: Any) -> tuple[torch.Tensor, int]:
        self.death.come(3 * FATAL)
        return F.mse_loss(model(batch[0]), batch[0].sum(1, keepdim=True)), len(batch[0])

    def state(self) -> dict[str, Any]:
        return {}


class Counts(Task):
    """Counts its steps, dies in one that it has counted already, and weighs its loss by the count."""

    steps = 0

    def __init__(self, death: Death) -> None:
        super().__init__(networks()["critic"])
        self.death = death

    def training_step(self, model: Any, batch: Any) -> tuple[torch.Tensor, int]:
        self.steps += 1
        self.death.come(FATAL)
        loss = F.mse_loss(model(batch[0]), batch[0].sum(1, keepdim=True))
        return loss * (1 + 1 / self.steps), len(batch[0])

    def state(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def train(make: Callable[[Death], Task], folder: Path, *, dies: bool) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The weights at the end, and from where the run recovered."""
    task = make(Death(str(folder / "died") if dies else ""))
    settings: dict[str, Any] = {
        "checkpoint_frequency": "4 steps",
        "checkpoint_async": False,
        "loss_weighting": "samples",
    }
    run_dir = folder / ("disturbed" if dies else "undisturbed")
    trainer = Trainer(task, num_gpus=2, batch_size=2, epochs=1, progress=False, run_dir=str(run_dir), **settings)
    history = trainer.fit(make_data())
    assert history.steps == STEPS
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    recovered = [Path(event["source"]).name for event in events if event["event"] == "Recovered"]
    return task.model.state_dict(), recovered


@pytest.mark.parametrize(
    ("make", "source"),
    [(Phases, "step-000004"), (Calls, "step-000004"), (Evaluations, "step-000004"), (Counts, "memory of rank 0")],
    ids=["phases", "calls", "evaluations", "counts"],
)
def test_rank_killed_in_own_step_ends_with_same_bytes(
    make: Callable[[Death], Task], source: str, tmp_path: Path
) -> None:
    wanted, undisturbed = train(make, tmp_path, dies=False)
    found, recovered = train(make, tmp_path, dies=True)
    assert undisturbed == []
    assert recovered == [source]
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
