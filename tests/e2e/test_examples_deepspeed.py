"""examples/03-deepspeed, each script really run, on small settings."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.conftest import run_python, run_warm
from tests.warm_python import SCRIPTS

FOLDER = Path(__file__).parents[2] / "examples" / "03-deepspeed"
CONFIGS = sorted((FOLDER / "configs").glob("*.json"))


READ = """
import json, sys
from distributed.engines.deepspeed.ops import import_deepspeed

deepspeed = import_deepspeed("cpu")
print(json.dumps({path: int(deepspeed.DeepSpeedConfig(path).zero_config.stage) for path in sys.argv[1:]}))
"""


def test_deepspeed_accepts_the_example_configs(tmp_path: Path) -> None:
    (tmp_path / "read.py").write_text(READ)
    stages = json.loads(run_warm(tmp_path, "read.py", *map(str, CONFIGS)).splitlines()[-1])
    assert len(stages) == len(CONFIGS) > 0
    for config in CONFIGS:
        assert config.name == f"zero{stages[str(config)]}_config.json"
        assert "auto" not in config.read_text()  # which DeepSpeed alone could not fill in


def test_deepspeed_inference_on_checkpoint_matches_plain_torch(tmp_path: Path) -> None:
    small = ["--samples", "320", "--epochs", "2", "--run-dir", "run"]
    config = str(FOLDER / "configs" / "zero3_config.json")
    trained = run_warm(
        tmp_path, str(FOLDER / "deepspeed_train.py"), "--num-gpus", "2", "--deepspeed_config", config, *small
    )
    before, after = re.findall(r"loss on other text (\S+) to (\S+) in 20 steps", trained)[0]
    assert float(after) < float(before)
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert (plan["strategy"], plan["shard"]["kind"], plan["precision"]["kind"]) == ("deepspeed", "full", "bf16")

    inference = [str(FOLDER / "deepspeed_inference.py"), "run/checkpoints", "--count", "8"]
    alone = run_warm(tmp_path, *inference)
    assert "InferenceEngine on one rank" in alone
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "--no-python"]
    shared = run_warm(tmp_path, *torchrun, *SCRIPTS.command, *inference)
    assert "DeepSpeedEngine on 2 ranks" in shared
    held = {tuple(int(n.replace(",", "")) for n in two) for two in re.findall(r"holds (\S+) of (\S+) bytes", shared)}
    ((part, whole),) = held
    assert part == whole / 2
    for printed in (alone, shared):
        (difference,) = re.findall(r"largest difference to plain torch over 64 texts: (\S+)", printed)
        assert float(difference) < 1e-4
    assert alone.splitlines()[-1] == shared.splitlines()[-1]  # the same text


def test_offload_moves_optimizer_state_with_same_loss(tmp_path: Path) -> None:
    small = ["--steps", "2", "--batch-size", "1", "--offload-dir", str(tmp_path)]
    printed = run_python(tmp_path, str(FOLDER / "zero_offload.py"), *small)
    sections = re.split(r"^(?:on the device|in host memory|in files):$", printed, flags=re.MULTILINE)[1:]
    assert len(sections) == 3
    losses, states, files = [], [], []
    for section in sections:
        rows = re.findall(r"moments: ([\d,]+) bytes on cpu; files of all ranks: ([\d,]+) bytes", section)
        assert len(rows) == 2  # one a rank
        states.append({int(state.replace(",", "")) for state, _ in rows})
        files.append({int(count.replace(",", "")) for _, count in rows})
        losses.append(re.findall(r"loss (\S+) after 2 steps", section)[0])
    assert losses[0] == losses[1] == losses[2]
    assert states[0] == states[1]
    (held,) = states[0]
    assert held > 10**7
    assert max(states[2]) < 100
    assert files[:2] == [{0}, {0}]
    assert min(files[2]) > 2 * held  # the two ranks' masters and moments, and more
    assert not [path for path in tmp_path.iterdir() if path.name != "runs"]  # its files are gone
