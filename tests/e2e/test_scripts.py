"""Scripts as people have them do the same under `distributed train` as under torchrun: exit code, losses, files.

Those of `make test` are launched from warm processes, all of them in `make soak` as users launch them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts.launches import Launch, Script, ours, ours_warm, outcome, torchrun, torchrun_warm

_NANO = "config/train_tiny.py"
_CLM = ("--output_dir=clm", "--do_train", "--do_eval", "--use_cpu", "--report_to=none", "--disable_tqdm=true")
_CLM_ON = "--resume_from_checkpoint=clm/checkpoint-4"
_CLM += ("--per_device_train_batch_size=8", "--logging_steps=1", "--save_steps=4")

QUICK = (
    Script("pytorch/mnist.py", runs=(("--epochs", "1", "--save-model"),)),
    Script("pytorch/snapshot_trainer.py", runs=(("3", "2"), ("5", "2"))),
    Script("pytorch/nano_gpt", run="train.py", runs=((_NANO,),)),
    Script("sharded/fsdp2.py", runs=(("--mixed-precision",),)),
    Script("config/dataclass_arguments.py", runs=(("--lr", "0.05", "--name", "mine"),)),
    Script("process/open_files.py"),
    Script("process/log_file.py"),
    Script("process/raises.py", codes=(1, 1)),
)
REST = (
    Script("pytorch/imagenet.py", runs=(("--epochs", "1"), ("--resume", "checkpoint.pth.tar"), ("-e",))),
    Script("pytorch/char_gpt", run="main.py", runs=((), ("trainer.max_epochs=2",))),
    Script("pytorch/nano_gpt", run="train.py", runs=((_NANO,), (_NANO, "--init_from=resume", "--max_iters=9"))),
    Script("pytorch/uneven_inputs.py"),
    Script("pytorch/zero_redundancy.py"),
    Script("pytorch/comm_hook.py"),
    Script("sharded/fsdp2.py", runs=((), ("--mixed-precision",))),
    Script("sharded/fsdp1_t5.py"),
    Script("sharded/tensor_parallel.py"),
    Script("sharded/pipeline.py"),
    Script("sharded/checkpoint_dcp.py", runs=((), ()), by_size=(".metadata",)),  # with a random identifier
    Script("sharded/async_checkpoint.py", by_size=(".metadata",)),
    Script("rpc/parameter_server.py"),
    Script("rpc/remote_references.py"),
    Script("accelerate/gradient_accumulation.py"),
    Script(
        "accelerate/checkpointing.py",
        runs=(("--checkpointing_steps=4",), ("--resume_from_checkpoint=saved/step_4", "--num_epochs=2")),
    ),
    Script("accelerate/early_stopping.py"),
    Script("accelerate/local_sgd.py"),
    Script("accelerate/tracking.py", by_size=("events.out.tfevents*",)),
    Script("accelerate/memory.py"),
    Script(
        "huggingface/run_clm.py",
        runs=((*_CLM, "--max_steps=6"), (*_CLM, _CLM_ON)),
        by_name=("trainer_state.json",),
    ),
    Script("huggingface/lora.py", by_size=("adapter_config.json",)),  # with the members of a set, in any order
    Script("lightning/trainer.py", by_name=("epoch=1.ckpt", "last.ckpt")),
    Script("lightning/fabric.py", runs=((), ())),
    Script(
        "config/hydra_app",
        run="train.py",
        runs=((), ("optimizer=adam", "epochs=3", "+seed=1")),
        by_size=("train.log",),
        by_name=("hydra.yaml",),
    ),
    Script("config/local_rank_argument.py"),
    Script("deepspeed/zero.py", runs=((), ("--resume",))),
    Script("process/dataloader_workers.py"),
    Script("process/summary_writer.py", by_size=("events.out.tfevents*",)),
    Script("process/recorded.py", codes=(1, 1)),
    Script("process/exits_on_one_rank.py", codes=(3, 1)),
    Script("process/standard_input.py"),
    Script("process/spawns.py", runs=(("2",),), ranks=1),
    Script("process/changes_directory.py"),
    Script("process/store.py"),
)


def compare(script: Script, folder: Path, ours: Launch, theirs: Launch) -> None:
    here = outcome(script, folder / "ours", ours)
    for attempt in range(3):  # ranks of torchrun now and then abort or hang in gloo's destructor, when all is done
        there = outcome(script, folder / f"torchrun-{attempt}", theirs)
        if not there.has_crashed:
            break
    assert {here.codes, there.codes} == {(code,) * len(script.runs) for code in script.codes}, (
        here.output + there.output
    )
    assert here.losses, here.output
    assert here.losses == there.losses
    assert here.files == there.files


@pytest.mark.parametrize("script", QUICK, ids=lambda script: script.name)
def test_script_does_the_same_as_under_torchrun(script: Script, tmp_path: Path) -> None:
    compare(script, tmp_path, ours_warm, torchrun_warm)


@pytest.mark.soak
@pytest.mark.timeout(4000)
@pytest.mark.parametrize("script", [*QUICK, *REST], ids=lambda script: script.name)
def test_script_does_the_same_as_users_launch_it(script: Script, tmp_path: Path) -> None:
    compare(script, tmp_path, ours, torchrun)
