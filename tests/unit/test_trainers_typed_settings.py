"""Settings as typed keywords: complete, current, and refused by mypy where they are wrong."""

from __future__ import annotations

import inspect
import runpy
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from distributed import DistributedConfig, HorovodTrainer, PyTorchDDPTrainer, RayTrainer, Trainer
from distributed.core.settings.typed import Settings

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "distributed"
TRAINERS = {
    "Trainer": "trainers/trainer.py",
    "PyTorchDDPTrainer": "trainers/ddp.py",
    "HorovodTrainer": "engines/horovod/trainer.py",
    "RayTrainer": "engines/ray/trainer.py",
    "TensorFlowDistributedTrainer": "engines/tensorflow/trainer.py",
    "DistributedConfig": "core/config.py",
}


def test_typed_settings_file_is_current_and_complete() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "generate_settings.py"))
    assert (SOURCE / "core" / "settings" / "typed.py").read_text() == made["render_types"](), (
        "run: python docs/generate_settings.py"
    )
    assert set(Settings.__annotations__) == set(DistributedConfig.model_fields)


def test_mypy_refuses_wrong_settings(tmp_path: Path) -> None:
    calls = []
    for name in TRAINERS:
        model = "" if name == "DistributedConfig" else "model, "
        calls += [
            f'{name}({model}num_gpus=2, epochs=3, learning_rate=1, lora={{"rank": 4}}, run_dir=Path("runs"))',
            f"{name}({model}num_gpu=2)  # wrong",
            f'{name}({model}num_gpus="two")  # wrong',
            f'{name}({model}lr_schedule="cosinus")  # wrong',
        ]
    for name in list(TRAINERS)[:-1]:
        calls += [f'{name}(model).fit(data, max_steps=5, optimizer="sgd")', f"{name}(model).fit(data, step=5)  # wrong"]
    names = ", ".join(TRAINERS)
    head = f"from pathlib import Path\nfrom typing import Any\n\nfrom distributed import {names}\n\n"
    script = tmp_path / "script.py"
    script.write_text(head + "model: Any = None\ndata: Any = None\n" + "\n".join(calls) + "\n")
    files = [
        SOURCE / "__init__.py",
        SOURCE / "core" / "settings" / "typed.py",
        SOURCE / "trainers" / "options.py",
        *(SOURCE / path for path in TRAINERS.values()),
    ]
    # What is not named, torch above all, is skipped: these types do not depend on it, and it takes minutes.
    alone = ["--config-file=", "--follow-imports=skip", "--cache-dir", str(tmp_path / "cache"), "--no-error-summary"]
    command = [sys.executable, "-m", "mypy", *alone, str(script), *map(str, files)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={"MYPYPATH": str(ROOT / "src"), "PATH": ""}
    )
    found = {int(line.split(":")[1]) for line in done.stdout.splitlines() if line.startswith(f"{script}:")}
    lines = script.read_text().splitlines()
    assert found == {number for number, line in enumerate(lines, 1) if "# wrong" in line}, done.stdout + done.stderr


@pytest.mark.parametrize("trainer", [Trainer, PyTorchDDPTrainer, HorovodTrainer, RayTrainer])
def test_trainer_signature_still_shows_its_arguments(trainer: type) -> None:
    shown = set(inspect.signature(trainer).parameters)
    options = get_type_hints(trainer.__init__).get("options")  # keywords that an editor completes as well
    shown |= set() if options is None else set(get_type_hints(get_args(options)[0]))
    assert {"model", "config", "loss_fn", "optimizer", "scheduler", "metrics"} < shown
