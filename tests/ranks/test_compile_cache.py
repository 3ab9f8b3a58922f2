"""Compiled blocks train as plain ones do, and their code is kept: a second process of the same run compiles nothing."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.core.plan import BatchPlan, MemoryPlan, Plan
from distributed.strategies.model.compilation import compile_cache, compile_folder
from tests.conftest import run_python

FOLDER = "TORCHINDUCTOR_CACHE_DIR"
SCRIPT = """
import json, os, sys
import setuptools
import torch
from torch import nn
from torch._dynamo.utils import counters
from distributed import Trainer

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

data = torch.utils.data.TensorDataset(torch.randn(8, 8), torch.randn(8, 8))

def trained(**compiling):
    torch.manual_seed(0)
    settings = dict(num_gpus=1, batch_size=4, max_steps=2, progress=False)
    trainer = Trainer(Model(), **settings, **compiling)
    trainer.fit(data)
    return list(trainer.model.parameters())

plain = trained(run_dir=sys.argv[2] + "-plain")
compiled = trained(compile=True, compile_cache=sys.argv[1], run_dir=sys.argv[2], wrap_blocks=["layers.0"])
assert all(torch.allclose(ours, theirs, atol=1e-6) for ours, theirs in zip(compiled, plain, strict=True))
found = {kind: dict(counters[kind]) for kind in ("inductor", "aot_autograd")}
print(json.dumps(found | {"folder": os.environ.get("TORCHINDUCTOR_CACHE_DIR")}))
"""


def plan(**memory: object) -> Plan:
    return Plan(run_dir="", batch=BatchPlan(1), memory=MemoryPlan(compile=True, **memory))  # type: ignore[arg-type]


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs g++")
def test_second_process_compiles_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)

    def counted(run: str) -> dict[str, Any]:
        output = run_python(tmp_path, "train.py", str(tmp_path / "cache"), str(tmp_path / run))
        found: dict[str, Any] = json.loads(output.splitlines()[-1])
        return found

    first, second = counted("first"), counted("second")
    assert first["inductor"]["fxgraph_cache_miss"] > 0
    assert not str(first["folder"]).startswith(str(tmp_path))  # the process has its own again
    assert (tmp_path / "cache" / f"torch-{torch.__version__}").is_dir()
    assert second["aot_autograd"]["autograd_cache_hit"] == first["aot_autograd"]["autograd_cache_miss"]
    assert not second["aot_autograd"].get("autograd_cache_miss")
    assert not second["inductor"].get("fxgraph_cache_miss")


def test_compile_cache_is_in_given_or_user_cache_folder(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    version = f"torch-{torch.__version__}"
    assert compile_folder(plan(), environ) == tmp_path / "distributed-training" / "compile" / version
    assert compile_folder(plan(compile_cache=str(tmp_path / "own")), environ) == tmp_path / "own" / version


def test_compile_cache_of_the_environment_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path / "mine"))
    with compile_cache(plan(compile_cache=str(tmp_path / "other"))):
        assert os.environ[FOLDER] == str(tmp_path / "mine")


def test_torchs_default_cache_dir_is_replaced_for_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.setenv(FOLDER, default_cache_dir())
    with compile_cache(plan(compile_cache=str(tmp_path / "ours"))):
        assert os.environ[FOLDER].startswith(str(tmp_path / "ours"))
    assert os.environ[FOLDER] == default_cache_dir()


def test_plan_without_compile_sets_no_cache_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER, raising=False)
    with compile_cache(Plan(run_dir="", batch=BatchPlan(1))):
        assert FOLDER not in os.environ
