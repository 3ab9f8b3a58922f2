"""`fast_dev_run=true` on a command line tries a script as it is, also one that saves and resumes."""

from __future__ import annotations

import json
from pathlib import Path

from tests.conftest import DATA, cli

SCRIPT = (
    DATA
    + """
from distributed import Trainer

trainer = Trainer(MyModel(), epochs=30, checkpoint_dir="saved", resume_from_checkpoint=True, log_every_n_steps=5)
history = trainer.fit(train_loader, val_loader)
trainer.save_model("model.safetensors")
print("steps", history.steps, flush=True)
"""
)


def test_script_is_tried_by_one_word_of_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    launch = ("train", "--script", "train.py", "--num-gpus", "2", "--run-dir", "run", "fast_dev_run=true")
    done = cli(tmp_path, *launch)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("steps 1") == 2
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "run"}
    (tried,) = (tmp_path / "run" / "dev-runs").iterdir()
    assert json.loads((tried / "history.json").read_text())["checkpoint"] == ""
    whole = cli(tmp_path, *launch[:-1], "max_steps=2")  # in the directory that it was tried for
    assert whole.returncode == 0, whole.stdout + whole.stderr
    again = cli(tmp_path, *launch)
    assert again.returncode == 0, again.stdout + again.stderr
    assert len(list((tmp_path / "saved").glob("step-*"))) == 1
