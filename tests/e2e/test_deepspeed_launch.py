"""DeepSpeed from every door: our command line, torchrun, DeepSpeed's launcher, the Trainer; and what each refuses."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from distributed import PyTorchDDPTrainer
from distributed.core.errors import PlanError
from distributed.launch.ports import free_port
from tests.conftest import DATA, clean_environ, cli, fresh_cli, run_warm
from tests.warm_python import SCRIPTS

EXAMPLE = Path(__file__).parents[2] / "examples" / "03-deepspeed"
SCRIPT = str(EXAMPLE / "deepspeed_train.py")
BIN = Path(sys.executable).parent
INSTALL = 'pip install "distributed-training[deepspeed]"'
HIDES_DEEPSPEED = """
import sys


class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "deepspeed":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Hidden())
"""


def call(folder: Path, *command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    how: dict[str, Any] = {"cwd": folder, "env": clean_environ(**environ), "timeout": 240}
    return subprocess.run(command, capture_output=True, text=True, **how)


def write(path: Path, content: Any) -> str:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_each_launcher_trains_the_example_to_the_same_loss(tmp_path: Path) -> None:
    small = ["--samples", "160", "--epochs", "1"]
    zero1, zero2 = (str(EXAMPLE / "configs" / f"zero{stage}_config.json") for stage in (1, 2))
    launchers = {
        "distributed": [
            *("train", "--script", SCRIPT, "--num-gpus", "2"),
            *("--deepspeed_config", zero1, "--run-dir", "distributed", "--", *small),
        ],
        "torchrun": [
            *(*SCRIPTS.command, str(BIN / "torchrun"), "--nproc-per-node", "2", "--master-port", str(free_port())),
            *("--no-python", *SCRIPTS.command, SCRIPT, "--deepspeed_config", zero1, "--run-dir", "torchrun", *small),
        ],
        "deepspeed": [
            *(*SCRIPTS.command, str(BIN / "deepspeed"), "--num_gpus=2", f"--master_port={free_port()}", SCRIPT),
            *("--deepspeed_config", zero2, "--run-dir", "deepspeed", *small),
        ],
    }
    losses = {}
    for name, command in launchers.items():
        done = cli(tmp_path, *command) if name == "distributed" else call(tmp_path, *command, OMP_NUM_THREADS="1")
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("loss on other text") == 1
        history = json.loads((tmp_path / name / "history.json").read_text())
        assert history["world_size"] == 2
        losses[name] = history["epochs"][-1]["metrics"]["val_loss"]
    assert list(losses.values()) == pytest.approx([losses["distributed"]] * 3, rel=1e-5)


def test_trainer_accepts_dict_and_deepspeed_config_object(tmp_path: Path) -> None:
    text = """
        import json
        from deepspeed import DeepSpeedConfig
        from distributed import PyTorchDDPTrainer

        zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
        micro = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": zero}
        if __name__ == "__main__":
            for name, ranks, given in (("dict", 2, {"zero_optimization": zero}), ("object", 1, DeepSpeedConfig(micro))):
                history = PyTorchDDPTrainer(
                    model=MyModel(), deepspeed_config=given, num_gpus=ranks, run_dir=name, max_steps=4, progress=False
                ).fit(train_loader)
        """
    run_warm(tmp_path, write(tmp_path / "script.py", DATA + textwrap.dedent(text)))
    for name, batch, ranks in (("dict", 16, 2), ("object", 8, 1)):
        plan = json.loads((tmp_path / name / "plan.json").read_text())
        assert (plan["strategy"], plan["batch"]["per_device"], plan["batch"]["ranks"]) == ("deepspeed", batch, ranks)
        assert plan["engine"]["config"]["zero_optimization"] == {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
        }


def test_missing_deepspeed_names_its_extra_before_start(tmp_path: Path, run_script: Any) -> None:
    hiding = tmp_path / "hiding"
    hiding.mkdir()
    write(hiding / "sitecustomize.py", HIDES_DEEPSPEED)
    script = write(tmp_path / "train.py", "raise SystemExit('started')")
    config = write(tmp_path / "ds.json", {"zero_optimization": {"stage": 2}})
    for words in (["--backend", "deepspeed"], ["--deepspeed-config", config]):
        done = fresh_cli(tmp_path, "train", "--script", script, "--num-gpus", "2", *words, PYTHONPATH=str(hiding))
        assert done.returncode == 4
        assert INSTALL in done.stderr
        assert "started" not in done.stdout + done.stderr
    done = run_script(
        """
        from distributed import PyTorchDDPTrainer
        PyTorchDDPTrainer(MyModel(), backend="deepspeed", num_gpus=2).fit(train_loader)
        """,
        PYTHONPATH=str(hiding),
    )
    assert "MissingExtraError" in done.stderr
    assert INSTALL in done.stderr
    assert not (tmp_path / "runs").exists()


def test_cli_lists_all_deepspeed_contradictions_before_start(tmp_path: Path) -> None:
    script = write(tmp_path / "train.py", "raise SystemExit('started')")
    content = {
        "train_micro_batch_size_per_gpu": 8,
        "train_batch_size": 17,
        "zero_optimization": {"stage": 2, "overlap_com": True},
        "bf16": {"enabled": True},
        "elasticity": {"enabled": True},
    }
    config = write(tmp_path / "ds.json", content)
    settings = ["zero_stage=3", "batch_size=4", "mixed_precision=fp16"]
    done = cli(tmp_path, "train", "--script", script, "--num-gpus", "2", "--deepspeed-config", config, *settings)
    assert done.returncode == 2
    for expected in (
        "batch_size=4 (command line), but ds.json says train_micro_batch_size_per_gpu=8",
        "zero_stage=3 (command line), but ds.json says zero_optimization.stage=2",
        "mixed_precision='fp16' (command line), but ds.json says bf16.enabled=true",
        "overlap_comm?",
        "elasticity cannot be used here",
        "train_batch_size=17 cannot be split",
    ):
        assert expected in done.stderr
    for text, expected in (("{", "line 1, column 2"), ("[]", "not an object"), (None, "No such file")):
        broken = str(tmp_path / "none.json") if text is None else write(tmp_path / "broken.json", text)
        done = cli(tmp_path, "train", "--script", script, "--deepspeed-config", broken)
        assert done.returncode == 2
        assert expected in done.stderr
    done = cli(tmp_path, "train", "--script", script, "--backend", "deepspeed", "zero_stage=0", "mixed_precision=fp16")
    assert done.returncode == 2
    assert "nothing to shard" in done.stderr
    assert "mixed_precision='fp16' with backend='deepspeed'" in done.stderr
    assert "device='cuda'" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_ranks_refuse_deepspeed_config_against_script(tmp_path: Path) -> None:
    script = """
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset
    from distributed import Trainer
    data = TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
    Trainer(nn.Linear(4, 2), batch_size=4, gradient_clipping=1.0).fit(data)
    """
    path = write(tmp_path / "train.py", textwrap.dedent(script))
    config = write(tmp_path / "ds.json", {"train_micro_batch_size_per_gpu": 8, "gradient_clipping": 0.5})
    done = cli(tmp_path, "train", "--script", path, "--deepspeed-config", config)
    assert done.returncode == 2
    assert "batch_size=4 (argument), but ds.json says train_micro_batch_size_per_gpu=8" in done.stderr
    assert "gradient_clipping=1.0 (argument), but ds.json says gradient_clipping=0.5" in done.stderr


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"offload_dir": "{tmp}/a-file"}, "cannot be written to"),
        ({"offload_dir": "{tmp}/a-file/below"}, "cannot be written to"),
        ({"offload_dir": "/proc/offload"}, "cannot be written to"),
        ({"offload_dir": "{tmp}/new", "deepspeed_config": {"zero_optimization": {"stage": 2}}}, "only ZeRO-3"),
        ({}, "without offload_dir"),
    ],
)
def test_trainer_refuses_bad_offload_dir_before_start(settings: dict[str, Any], expected: str, tmp_path: Path) -> None:
    (tmp_path / "a-file").write_text("")
    asked: dict[str, Any] = {"offload_optimizer": "nvme", "run_dir": str(tmp_path / "run")}
    if "deepspeed_config" not in settings:
        asked["zero_stage"] = 3
    for name, value in settings.items():
        asked[name] = value.format(tmp=tmp_path) if isinstance(value, str) else value
    trainer = PyTorchDDPTrainer(nn.Linear(4, 2), backend="deepspeed", num_gpus=2, batch_size=4, **asked)
    with pytest.raises(PlanError, match=expected):
        trainer.fit(TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,))))
    assert not (tmp_path / "run").exists()
