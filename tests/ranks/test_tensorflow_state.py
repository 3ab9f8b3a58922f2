"""A TensorFlow run's state at rest: the format that all engines share, written and read without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from distributed.checkpoint.restore.reading import load, verify
from distributed.checkpoint.storage.chunks import chunk_name
from tests.conftest import clean_environ, cli
from tests.warm_scripts import warm_tensorflow

SCRIPT = """
import json, sys
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import tensorflow as tf

from distributed.checkpoint.storage.chunks import chunk_name
from distributed.core.env import WorkerEnv
from distributed.core.errors import DistributedError
from distributed.core.plan import BatchPlan, CheckpointPlan, Plan
from distributed.engines.tensorflow.state import Checkpoints

place = Path(sys.argv[1])
said = {}


def variables(seed):
    draw = np.random.default_rng(seed)
    return {
        "model/dense/kernel": tf.Variable(draw.normal(size=(700, 400)).astype("float32")),
        "model/dense/bias": tf.Variable(draw.normal(size=400).astype(ml_dtypes.bfloat16)),
        "model/empty": tf.Variable(tf.zeros((0, 3))),
        "model/seed": tf.Variable(np.array([seed, 2], np.uint32)),
        "optimizer/iteration": tf.Variable(seed, dtype=tf.int64),
    }


def arrays(of):
    return {name: variable.numpy() for name, variable in of.items()}


def same(a, b):
    return all(a[name].dtype == b[name].dtype and a[name].tobytes() == b[name].tobytes() for name in a)


def plan(folder, run=None, batch=4, **more):
    at = CheckpointPlan(str(place / folder / "checkpoints"), **more)
    return Plan(str(place / (run or folder)), BatchPlan(batch), checkpoint=at, collective_timeout_s=0.2)


def position(step, **more):
    return {"epoch": 0, "step": step, "samples_in_epoch": 4 * step, "epochs": []} | more


def both(of_main, of_other, env=WorkerEnv(world_size=2)):
    # The main process and another one, which is told what the main one found.
    told = []
    main = Checkpoints(of_main, True, env, samples=64, spread=lambda number: told.append(number) or number)
    other = Checkpoints(of_other, False, replace(env, rank=1), samples=64, spread=lambda number: told.pop(0))
    return main, other


def refusal(call):
    try:
        call()
    except DistributedError as error:
        return str(error)
    return ""


# A run that is saved and resumed.
saved = variables(1)
first = Checkpoints(plan("a", keep_last=2, best="min:loss"), True, WorkerEnv(), samples=64)
said["nothing to resume"] = first.restore(saved) is None
for step, loss in ((1, 0.1), (2, 0.5), (3, 0.4), (4, 0.3)):
    saved["optimizer/iteration"].assign(step)
    first.save(step, arrays(saved), position(step), {"loss": loss})
first.close()
said["kept"] = sorted(path.name for path in (place / "a/checkpoints").glob("step-*"))
resumes = plan("a", keep_last=2, best="min:loss", resume=True)
other = variables(2)
again = Checkpoints(resumes, True, WorkerEnv(), samples=64)
said["position"] = again.restore(other)
said["same bytes"] = same(arrays(saved), arrays(other))
again.close()

# Two processes, of which the main one chooses; when nothing is left to train, nothing is waited for.
main, follower = both(*[plan("another", resume=str(place / "a/checkpoints"))] * 2)
main.restore(other)
said["others begin with"] = follower.restore(variables(2))["step"]
main.save(4, arrays(saved), position(4), wait=True)
said["nothing is left to wait for"] = refusal(lambda: follower.save(4, {}, {}, wait=True))
said["others wait in vain"] = refusal(lambda: follower.save(5, {}, {}, wait=True))
main.save(5, arrays(saved), position(5), wait=True)
follower.save(5, {}, {}, wait=True)
said["others wait for"] = follower.path.rpartition("/")[2]
main.close()
main, follower = both(resumes, plan("not shared", resume=True))
main.restore(other)
said["seen by one process alone"] = refusal(lambda: follower.restore(other))
main.close()

# What is not the same run.
def restoring(of, samples=64, **more):
    return refusal(lambda: Checkpoints(resumes, True, WorkerEnv(), samples=samples, **more).restore(of))

said["another shape"] = restoring(variables(1) | {"model/dense/bias": tf.Variable(tf.zeros(3, tf.bfloat16))})
said["another optimizer"] = restoring(variables(1) | {"optimizer/velocity": tf.Variable(1.0)})
said["other data"] = restoring(variables(1), samples=65)
said["a text"] = refusal(lambda: again.save(9, {"model/text": np.array(["x"])}, {}, wait=True))

# A restarted world takes its own newest one, a damaged one is passed over.
run = plan("b", resume=False)
writer = Checkpoints(run, True, WorkerEnv(), samples=64)
for step in (1, 2):
    saved["optimizer/iteration"].assign(step)
    saved["model/dense/kernel"].assign_add(tf.ones((700, 400)))
    writer.save(step, arrays(saved), position(step))
writer.close()
said["a fresh run does not resume"] = Checkpoints(run, False, WorkerEnv()).restore(other) is None
manifest = json.loads((place / "b/checkpoints/step-000002/manifest.json").read_text())
chunk = next(piece["refs"][0][0] for piece in manifest["shared"]["tensors"]["model/dense/kernel"]["pieces"])
path = place / "b/checkpoints" / chunk_name(chunk)
path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
restarted = Checkpoints(run, True, WorkerEnv(restarts=1), samples=64)
said["restarted from"] = restarted.restore(other)["step"]
said["passed over"] = restarted.skipped[0][0].rpartition("/")[2]
restarted.close()
main, follower = both(run, plan("b", run="on another host"), WorkerEnv(world_size=2, restarts=1))
main.restore(other)
said["restarted without the main one's folder from"] = follower.restore(other)["step"]
main.close()
(place / "b/launch.json").unlink()
said["not of this launch"] = Checkpoints(run, True, WorkerEnv(restarts=1), samples=64).restore(other) is None

# A second fit of a script, to which only a restarted world came.
later = Checkpoints(plan("fit-2"), True, WorkerEnv(restarts=1), samples=64)
later.save(3, arrays(saved), position(3), wait=True)
again = Checkpoints(plan("fit-2"), True, WorkerEnv(restarts=2), samples=64).restore(other)
said["restarted in a later fit from"] = again and again["step"]

# A stream finds its place by batches, which are not those of another size.
stream = Checkpoints(plan("stream"), True, WorkerEnv())
stream.save(3, arrays(saved), position(3, steps_in_epoch=3), wait=True)
wider = Checkpoints(plan("stream", batch=8, resume=True), True, WorkerEnv())
said["other batches of a stream"] = refusal(lambda: wider.restore(other))
stream.save(4, arrays(saved), position(4, steps_in_epoch=0), wait=True)
said["other batches in the next epoch"] = refusal(lambda: wider.restore(other))

# A save that fails is told, and the run goes on; the last one must be written.
told = []
full = plan("c")
(place / "c").mkdir()
(place / "c/checkpoints").write_text("a file where a folder should be")
bad = Checkpoints(full, True, WorkerEnv(), on_failed=lambda failed: told.append(str(failed)))
bad.save(1, arrays(saved), position(1))
said["the last save fails"] = refusal(lambda: bad.save(2, arrays(saved), position(2), wait=True))
said["told"] = len(told)
said["torch"] = "torch" in sys.modules
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one process has saved and restored, and what it said of it."""
    place = tmp_path_factory.mktemp("state")
    done = warm_tensorflow().run_code(place, SCRIPT, str(place), environ=clean_environ())
    assert done.returncode == 0, done.stderr
    (place / "said.json").write_text(done.stdout.splitlines()[-1])
    return place


@pytest.fixture(scope="module")
def said(place: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((place / "said.json").read_text())
    return found


def test_resumed_state_has_same_bytes_without_torch(said: dict[str, object]) -> None:
    assert said["nothing to resume"] is True
    assert said["same bytes"] is True
    assert said["position"] == {"epoch": 0, "step": 4, "samples_in_epoch": 16, "epochs": []}
    assert said["torch"] is False


def test_retention_keeps_the_newest_and_the_best(said: dict[str, object]) -> None:
    assert said["kept"] == ["step-000001", "step-000003", "step-000004"]


def test_resume_with_other_shapes_or_data_is_refused_by_name(said: dict[str, str]) -> None:
    assert "model/dense/bias is bfloat16 [400] in the checkpoint and bfloat16 [3] here" in said["another shape"]
    assert "optimizer/velocity is only in this run" in said["another optimizer"]
    assert "64 samples an epoch, this data has 65" in said["other data"]
    assert "model/text" in said["a text"]


def test_restarted_run_resumes_its_newest_sound_checkpoint(said: dict[str, object]) -> None:
    assert said["a fresh run does not resume"] is True
    assert said["restarted from"] == 1
    assert said["passed over"] == "step-000002"
    assert said["not of this launch"] is True


def test_main_process_chooses_the_checkpoint_for_all(said: dict[str, Any]) -> None:
    assert said["others begin with"] == 4
    assert "do not see the same checkpoints" in said["seen by one process alone"]
    assert said["restarted without the main one's folder from"] == 1


def test_other_processes_wait_for_the_checkpoint_if_one_is_due(said: dict[str, Any]) -> None:
    assert said["nothing is left to wait for"] == ""
    assert "step 5 is not there" in said["others wait in vain"]
    assert said["others wait for"] == "step-000005"


def test_later_fit_first_reached_by_a_restart_resumes_again(said: dict[str, Any]) -> None:
    assert said["restarted in a later fit from"] == 3


def test_stream_refuses_other_batch_size_in_mid_epoch_resume(said: dict[str, Any]) -> None:
    assert "3 batches of 4 into an epoch, and batches are of 8" in said["other batches of a stream"]
    assert said["other batches in the next epoch"] == ""


def test_failed_save_is_reported_and_failed_last_save_raises(said: dict[str, Any]) -> None:
    assert said["told"] == 1
    assert "cannot write" in said["the last save fails"]


def test_torch_loads_and_exports_tensorflow_checkpoint(place: Path) -> None:
    path = str(place / "a/checkpoints/step-000004")
    assert verify(path).problems == ()
    model = load(path).shared["model"]
    assert (model["dense/kernel"].shape, model["dense/bias"].dtype) == ((700, 400), torch.bfloat16)
    done = cli(place, "checkpoint", "export", "a", "--to", "weights.safetensors")
    assert done.returncode == 0, done.stderr
    exported = safetensors.torch.load_file(place / "weights.safetensors")
    assert sorted(exported) == ["dense/bias", "dense/kernel", "empty", "seed"]
    assert all(torch.equal(exported[name], model[name]) for name in exported)


def test_checkpoint_commands_work_on_tensorflow_checkpoints(place: Path) -> None:
    listed = cli(place, "checkpoint", "ls", "a")
    assert "ok" in listed.stdout
    shown = json.loads(cli(place, "checkpoint", "inspect", "a", "--json").stdout)
    assert "tensorflow" in shown["versions"]
    assert shown["progress"]["step"] == 4
    differs = cli(place, "checkpoint", "diff", "a/checkpoints/step-000003", "a/checkpoints/step-000004")
    assert "optimizer/iteration" in differs.stdout
    assert "dense/kernel" not in differs.stdout
    damaged = json.loads((place / "b/checkpoints/step-000002/manifest.json").read_text())
    chunk = damaged["shared"]["tensors"]["model/dense/kernel"]["pieces"][0]["refs"][0][0]
    verified = cli(place, "checkpoint", "verify", "b")
    assert verified.returncode == 5
    assert chunk_name(chunk).rpartition("/")[2][:12] in verified.stdout + verified.stderr
