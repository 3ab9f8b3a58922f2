"""Ctrl-C and NaN: all ranks end, what was trained is kept, and the message says where."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import textwrap
import time
from pathlib import Path

import pytest

from tests.conftest import DATA, Run, clean_environ
from tests.e2e.survival import processes_with
from tests.warm_python import SCRIPTS


@pytest.fixture
def run_script(tmp_path: Path) -> Run:
    """A script with a small problem before it."""

    def run(text: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "script.py").write_text(DATA + textwrap.dedent(text))
        command = [*SCRIPTS.command, "script.py"]
        return subprocess.run(command, cwd=tmp_path, env=clean_environ(), capture_output=True, text=True, timeout=180)

    return run


SLOW = """
import time
from distributed import PyTorchDDPTrainer


class Slow(MyModel):
    def forward(self, x):
        time.sleep(0.02)
        return super().forward(x)


model = Slow()
start = {name: value.clone() for name, value in model.state_dict().items()}
trainer = PyTorchDDPTrainer(model, num_gpus=RANKS, batch_size=16, epochs=10_000, run_dir="run")
try:
    trainer.fit(train_loader, val_loader)
except KeyboardInterrupt:
    changed = all(not torch.equal(start[k], v) for k, v in model.state_dict().items())
    print("kept", trainer.history.interrupted, trainer.history.steps > 0, changed, flush=True)
    raise
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_ctrl_c_ends_all_ranks_and_saves_a_checkpoint(ranks: int, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(DATA + textwrap.dedent(SLOW.replace("RANKS", str(ranks))))
    process = subprocess.Popen(
        [*SCRIPTS.command, "script.py"],
        cwd=tmp_path,
        env=clean_environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for_event(tmp_path / "run" / "events.jsonl", "StepEnded", process)
    everyone = [pid for pid in processes_with(str(tmp_path), tmp_path) if pid != process.pid]
    assert len(everyone) == (
        1 + ranks + 1 if ranks > 1 else 1
    )  # the script, and the process that ranks are forked from
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert "kept True True True" in out, out + err
    assert process.returncode != 0
    assert not set(everyone) & set(processes_with(str(tmp_path), tmp_path))
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*/manifest.json"))) == 1
    last = json.loads((tmp_path / "run" / "events.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["status"]) == ("RunEnded", "interrupted")


def wait_for_event(path: Path, kind: str, process: subprocess.Popen[str]) -> None:
    for _ in range(1200):
        if path.exists() and f'"event":"{kind}"' in path.read_text():
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    raise AssertionError(f"no {kind} came")


POISON = """
from distributed import PyTorchDDPTrainer

data = train_loader.dataset
data.tensors[0][137] = float("nan")
trainer = PyTorchDDPTrainer(MyModel(), num_gpus=2, batch_size=16, epochs=2, run_dir="run", **SETTINGS)
history = trainer.fit(train_loader)
print("finished", history.steps)
"""


def test_nan_loss_stops_the_run_naming_step_and_samples(run_script: Run, tmp_path: Path) -> None:
    result = run_script(POISON.replace("SETTINGS", "{}"))
    assert result.returncode != 0
    message = result.stderr[result.stderr.index("NonFiniteLossError") :]
    assert "the loss is nan at step" in message
    samples = message[message.index("samples [") + 9 :].partition("]")[0]
    assert 137 in [int(index) for index in samples.split(", ")]
    assert "on_nan=continue" in message
    assert message.count("the loss is nan at step") == 1


def test_nan_loss_continues_with_on_nan_continue(run_script: Run) -> None:
    result = run_script(POISON.replace("SETTINGS", "{'on_nan': 'continue'}"))
    assert "finished 14" in result.stdout, result.stderr


def test_failing_rank_is_reported_once_with_its_log(run_script: Run, tmp_path: Path) -> None:
    result = run_script("""
        import torch.distributed as dist
        from distributed import PyTorchDDPTrainer

        class Bad(MyModel):
            def forward(self, x):
                if dist.get_rank() == 1:
                    raise ValueError("rank one is unhappy")
                return super().forward(x)

        PyTorchDDPTrainer(Bad(), num_gpus=2, run_dir="run").fit(train_loader)
    """)
    assert result.returncode != 0
    text = result.stdout + result.stderr
    assert "rank 1" in text
    assert text.count('raise ValueError("rank one is unhappy")') == 1, text
    assert str(Path("run") / "attempts" / "0" / "rank-1.log") in text
    assert os.path.exists(tmp_path / "run" / "attempts" / "0" / "rank-1.log")
