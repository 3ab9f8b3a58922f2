"""What a step calls: nothing of a feature that the run does not have."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

import distributed
from distributed import Callback, Trainer

SOURCE = f"{Path(distributed.__file__).parent}/"
STEPS = 10  # that are counted, in the middle of an epoch
MOST_CALLS = 46  # of our functions in a step of one process; each takes about 0.1 µs, and what it does
OF_FEATURES = (
    "train/checks/anomalies.py",
    "train/callbacks/",
    "train/capture/",
    "train/evaluation.py",
    "train/given/optimizers.py",
    "train/given/step_results.py",
    "train/loop_parts/steering.py",
    "train/loop_parts/validation.py",
    "train/whole_set/",
    "strategies/checks/",
    "strategies/steps/copied_model.py",
    "strategies/joint_optimizer.py",
    "strategies/steps/manual_steps.py",
    "strategies/model/",
    "strategies/steps/phases.py",
    "strategies/steps/step_by_hand.py",
    "trainers/",
)


class CallCount:
    """A collate function that counts calls between two of its own, which lie whole steps apart."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._batches = 0

    def __call__(self, samples: list[Any]) -> Any:
        self._batches += 1
        if self._batches == 12:
            sys.setprofile(self._note)
        elif self._batches == 12 + STEPS:
            sys.setprofile(None)
        return default_collate(samples)

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(SOURCE):
            self.calls[f"{path.removeprefix(SOURCE)}:{frame.f_code.co_qualname}"] += 1


def calls_a_step(tmp_path: Path, **given: Any) -> Counter[str]:
    torch.manual_seed(0)
    count, data = CallCount(), TensorDataset(torch.randn(200, 4), torch.randint(0, 2, (200,)))
    loader = DataLoader(data, batch_size=5, shuffle=True, collate_fn=count)
    settings = {"epochs": 1, "progress": False, "log_every_n_steps": 1000, "run_dir": tmp_path / "run"} | given
    Trainer(nn.Linear(4, 2), loss_fn=nn.CrossEntropyLoss(), **settings).fit(loader)
    return count.calls


def test_step_calls_nothing_of_features_that_are_absent(tmp_path: Path) -> None:
    calls = calls_a_step(tmp_path)
    assert calls["strategies/replicated.py:Replicated.train_step"] == STEPS
    assert [name for name in calls if name.startswith(OF_FEATURES)] == []
    assert calls.total() <= MOST_CALLS * STEPS


def test_step_with_a_callback_calls_its_callback(tmp_path: Path) -> None:
    class Nothing(Callback):
        def on_step_end(self, run: Any) -> None: ...

    calls = calls_a_step(tmp_path, callbacks=[Nothing()])
    assert calls["train/callbacks/calls.py:Callbacks.step_ended"] == STEPS
