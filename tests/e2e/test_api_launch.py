"""`fit` wherever a user may call it: a script with or without a guard, a REPL, a notebook, and inside any launcher."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import nbclient
import nbformat
import pytest

from distributed.core.plan import Plan
from tests.conftest import DATA, Run, clean_environ
from tests.warm_python import SCRIPTS

FIT = """
from distributed import PyTorchDDPTrainer

print("script body")
model = MyModel()
before = [p.clone() for p in model.parameters()]
trainer = PyTorchDDPTrainer(model=model, num_gpus=2, batch_size=16, epochs=3, learning_rate=0.02, run_dir="run")
history = trainer.fit(train_loader, val_loader)
assert trainer.model is model and not any(torch.equal(a, b) for a, b in zip(before, model.parameters()))
with torch.no_grad():
    x, y = val_loader.dataset.tensors
    accuracy = (model(x).argmax(1) == y).float().mean().item()
assert abs(accuracy - history["val_accuracy"][-1]) < 1e-6, (accuracy, history["val_accuracy"])
print(f"world {history.world_size} steps {history.steps} best {history.best_accuracy:.6f}")
"""


def facts(output: str) -> list[str]:
    """What each rank printed; under a launcher that is not ours, others may write into the same line."""
    return re.findall(r"world \d+ steps \d+ best \d\.\d{6}", output)


def test_fit_in_script_without_main_guard_runs_it_once(run_script: Run, tmp_path: Path) -> None:
    result = run_script(FIT)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("script body") == 1, "the ranks must not run the script again"
    assert facts(result.stdout)[0].startswith("world 2 steps 21")
    events = [json.loads(line)["event"] for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert events[0] == "RunStarted"
    assert events[-1] == "RunEnded"
    assert not list((tmp_path / "run").glob("payload*")), "the payload is removed after the run"


def test_ranks_import_module_beside_guarded_script(run_script: Run, tmp_path: Path) -> None:
    """The loss lives in a module beside the script: the ranks must find it."""
    (tmp_path / "losses.py").write_text(
        "import torch\n\n\ndef loss(o, y):\n    return torch.nn.functional.cross_entropy(o, y)\n"
    )
    body = FIT.replace("epochs=3", "epochs=3, loss_fn=loss").replace("\n", "\n    ")
    result = run_script(f"from losses import loss\nif __name__ == '__main__':\n    {body}")
    assert result.returncode == 0, result.stderr
    assert facts(result.stdout)[0].strip().startswith("world 2 steps 21")


def test_fit_trains_two_ranks_from_a_repl(tmp_path: Path) -> None:
    lines = "\n".join(line for line in (DATA + FIT).splitlines() if line.strip() or line == "")
    blocks = lines.replace("\nwith torch.no_grad", "\nif True:\n  with torch.no_grad").replace(
        "\n    x, y", "\n    x, y"
    )
    source = blocks.replace("class MyModel", "class MyModel") + "\n"
    command = [sys.executable, "-i", "-q"]
    text = f"exec({source!r}, globals())\n"  # what is typed becomes part of __main__, which no process can import
    result = subprocess.run(
        command, input=text, cwd=tmp_path, env=clean_environ(), capture_output=True, text=True, timeout=180
    )
    assert facts(result.stdout), result.stdout + result.stderr
    assert facts(result.stdout)[0].startswith("world 2 steps 21")


def test_fit_in_notebook_shows_one_progress_bar(tmp_path: Path) -> None:
    cells = [nbformat.v4.new_code_cell(DATA), nbformat.v4.new_code_cell(FIT)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(
        notebook, timeout=180, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    outputs = notebook.cells[1].outputs
    text = "".join(output.get("text", "") for output in outputs)
    assert facts(text)[0].startswith("world 2 steps 21")
    bars = [output for output in outputs if output.output_type in ("display_data", "update_display_data")]
    assert len(bars) == 1, "one progress bar, updated in place"


LAUNCHED = FIT.replace(', run_dir="run"', "").replace('print("script body")', "import os")


def same_everywhere(output: str, ranks: int) -> None:
    assert len(facts(output)) == ranks, output
    assert len(set(facts(output))) == 1, "the ranks disagree"
    assert facts(output)[0].startswith(f"world {ranks} steps 21")


@pytest.mark.parametrize(
    "launcher",
    [
        ["torchrun"],
        ["distributed", "train", "--num-gpus", "2", "--script"],
        [sys.executable, "-m", "distributed.cli", "train", "--num-gpus", "2", "--script"],
        [sys.executable, "-m", "distributed", "train", "--backend", "pytorch-ddp", "--num-gpus", "2", "--script"],
    ],
    ids=["torchrun", "distributed", "python -m distributed.cli", "python -m distributed"],
)
def test_fit_inside_launcher_joins_its_world(launcher: list[str], tmp_path: Path) -> None:
    if launcher == ["torchrun"]:
        module = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
        launcher = [*SCRIPTS.command, *module, *SCRIPTS.command]
    elif launcher[0] == "distributed":
        launcher = [str(Path(sys.executable).with_name(launcher[0])), *launcher[1:]]
    assert_joins(launcher, tmp_path)


def assert_joins(command: list[str], tmp_path: Path, **environ: str) -> None:
    (tmp_path / "train.py").write_text(DATA + textwrap.dedent(LAUNCHED))
    result = subprocess.run(
        [*command, "train.py"], cwd=tmp_path, env=clean_environ(**environ), capture_output=True, text=True, timeout=180
    )
    assert result.returncode == 0, result.stdout + result.stderr
    same_everywhere(result.stdout, 2)
    (run,) = (tmp_path / "runs").iterdir()  # all ranks share one run directory
    plan = Plan.from_json((run / "plan.json").read_text())
    assert (tmp_path / plan.run_dir, tmp_path / plan.checkpoint.dir) == (run, run / "checkpoints")


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun: install openmpi-bin")
def test_fit_inside_mpirun_joins_its_world(tmp_path: Path) -> None:
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", *SCRIPTS.command]
    assert_joins(command, tmp_path, OMP_NUM_THREADS="1")


def test_second_fit_in_one_world_continues_the_training(tmp_path: Path) -> None:
    script = DATA + textwrap.dedent("""
        from distributed import Trainer
        trainer = Trainer(MyModel(), batch_size=16, learning_rate=0.02)
        first = trainer.fit(train_loader, val_loader)
        second = trainer.fit(train_loader, val_loader, epochs=2)
        print("runs", first.run_dir != second.run_dir, second["val_loss"][-1] < first["val_loss"][-1])
    """)
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, "-m", "distributed", "train", "--num-gpus", "2", "--script", "train.py"]
    result = subprocess.run(command, cwd=tmp_path, env=clean_environ(), capture_output=True, text=True, timeout=180)
    assert result.stdout.count("runs True True") == 2, result.stdout + result.stderr
