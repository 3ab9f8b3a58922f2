"""HorovodTrainer scales the learning rate, but not under Adasum, whoever asks for that."""

from __future__ import annotations

import json
from typing import Any

import pytest
from torch import nn

from distributed import HorovodTrainer
from distributed.core.env import OVERRIDES

ADASUM = {"gradient_reduction": "adasum"}


def scaling(given: dict[str, Any], fitted: dict[str, Any]) -> str:
    return HorovodTrainer(nn.Linear(4, 2), num_gpus=2, **given)._merge(fitted).lr_scaling


def test_learning_rate_is_scaled_unless_adasum_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert scaling({}, {}) == "linear"
    assert scaling(ADASUM, {}) == "none"
    assert scaling({"config": ADASUM}, {}) == "none"
    assert scaling({}, ADASUM) == "none"
    assert scaling(ADASUM, {"gradient_reduction": "average"}) == "linear"
    monkeypatch.setenv(OVERRIDES, json.dumps({"gradient_reduction": ["adasum", "command line"]}))
    assert scaling({}, {}) == "none"


def test_explicit_lr_scaling_is_kept_under_adasum() -> None:
    assert scaling(ADASUM | {"lr_scaling": "linear"}, {}) == "linear"
    assert scaling(ADASUM, {"lr_scaling": "sqrt"}) == "sqrt"
