"""What DeepSpeed alone has saved becomes a checkpoint of ours, byte for byte, without DeepSpeed and running no code."""

from __future__ import annotations

import builtins
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distributed import Trainer
from distributed.checkpoint.exchange.catalog import open_one
from distributed.checkpoint.exchange.importing import import_weights
from distributed.checkpoint.exchange.safe_unpickle import Inert, InertFile, Stored
from distributed.checkpoint.restore.reading import load, verify
from distributed.core.errors import CheckpointError, ConfigError
from distributed.testing import run_ranks
from tests import deepspeed_folders
from tests.conftest import clean_environ
from tests.deepspeed_folders import (
    FOLDERS,
    GLOBAL_BATCH,
    MORE_STEPS,
    RANKS,
    STEPS,
    TELLING,
    UNIVERSAL,
    Model,
    make_data,
)

TAG = f"global_step{STEPS}"
WITH_ZERO = [name for name in FOLDERS if name != "stage0"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All folders, written once by DeepSpeed on two processes that know nothing of this library."""
    pytest.importorskip("deepspeed", reason="the folders to import are written by DeepSpeed itself")
    out = tmp_path_factory.mktemp("deepspeed")
    done = subprocess.run(
        [sys.executable, str(deepspeed_folders.__file__), str(out)],
        env=clean_environ(DS_ACCELERATOR="cpu"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return out


@pytest.fixture
def copy(folders: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A folder of a test's own, to damage."""

    def make(name: str) -> Path:
        return Path(shutil.copytree(folders / name, tmp_path / name))

    return make


def held(folders: Path, name: str, kind: str) -> dict[str, torch.Tensor]:
    """What the engine itself gave when it saved, by parameters' names."""
    found = load_file(folders / f"{name}.safetensors")
    return {key.partition("/")[2]: value for key, value in found.items() if key.startswith(f"{kind}/")}


def assert_same_bytes(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("name", [*WITH_ZERO, *(f"{name}-universal" for name in UNIVERSAL)])
def test_imported_weights_and_optimizer_match_the_engines(name: str, folders: Path, tmp_path: Path) -> None:
    done = import_weights(str(folders / name), str(tmp_path))
    assert done.path.endswith("step-000000"), "a run that goes on from it counts its own steps"
    assert done.with_optimizer
    assert not verify(done.path).problems
    state = load(done.path).shared
    source = name.removesuffix("-universal")
    weights = held(folders, source, "model")
    assert set(state["model"]) == set(weights) | {"head.weight"}
    assert state["model"]["head.weight"] is state["model"]["embed.weight"], "tied"
    assert_same_bytes(state["model"], weights)
    trained = [name for name, parameter in Model().named_parameters() if parameter.requires_grad]
    optimizer = state["optimizer"]
    told = source if source in TELLING else "stage3-bf16" if "bf16" in name else "stage1"  # the same training
    for key in ("exp_avg", "exp_avg_sq"):
        found = {name: values[key] for name, values in optimizer["state"].items()}
        wanted = held(folders, told, key)
        assert set(found) == set(wanted) == set(trained)
        if told == source:
            assert_same_bytes(found, wanted)
        for parameter in wanted:
            torch.testing.assert_close(found[parameter], wanted[parameter], rtol=2e-2, atol=1e-5)
    steps = [values["step"] for values in optimizer["state"].values()]
    assert all(step.dtype == torch.float32 and step.item() == STEPS for step in steps)
    assert len({step.data_ptr() for step in steps}) == len(steps), "each parameter counts for itself"
    groups = optimizer["param_groups"]
    assert sorted(name for group in groups for name in group["params"]) == sorted(trained)
    assert [group["lr"] for group in groups] == ([2e-3, 1e-2] if "bf16" in name else [1e-2])
    assert [group["weight_decay"] for group in groups] == ([0.1, 0.0] if "bf16" in name else [0.01])
    assert groups[0]["betas"] == (0.9, 0.999)


def test_import_of_stage_0_has_weights_only_with_a_note(folders: Path, tmp_path: Path) -> None:
    done = import_weights(str(folders / "stage0"), str(tmp_path))
    assert not done.with_optimizer
    assert "names" in done.note
    state = load(done.path).shared
    assert set(state) == {"model"}
    assert_same_bytes(state["model"], held(folders, "stage0", "model"))
    assert state["model"]["head.weight"] is state["model"]["embed.weight"]


def test_import_options_select_tag_step_and_prefix(folders: Path, tmp_path: Path) -> None:
    """One save of several, another step, the weights alone, other names."""
    alone = import_weights(str(folders / "stage2" / TAG), str(tmp_path), step=7, weights_only=True)
    assert alone.path.endswith("step-000007")
    assert set(load(alone.path).shared) == {"model"}
    shorter = import_weights(str(folders / "stage3"), str(tmp_path / "b"), strip_prefix="embed.")
    state = load(shorter.path).shared
    assert "weight" in state["model"]
    assert "weight" in state["optimizer"]["state"]
    assert "weight" in state["optimizer"]["param_groups"][0]["params"]
    for wrong in ({"key": "module"}, {"trust": True}):
        with pytest.raises(ConfigError, match="no effect"):
            import_weights(str(folders / "stage1"), str(tmp_path / "c"), **wrong)
    with pytest.raises(ConfigError, match="exists"):
        import_weights(str(folders / "stage1"), str(tmp_path / "b"))
    with pytest.raises(CheckpointError, match="its folder"):  # a rank's file has no more than its part
        import_weights(str(folders / "stage3" / TAG / "zero_pp_rank_0_mp_rank_00_model_states.pt"), str(tmp_path / "c"))
    with pytest.raises(CheckpointError, match="checkpoint import"):
        open_one(str(folders / "stage3"))


def test_checkpoint_commands_work_without_deepspeed(folders: Path, tmp_path: Path) -> None:
    script = """if True:
        import sys
        sys.modules["deepspeed"] = None  # any import of it fails
        from distributed.cli.main import app
        source, to = sys.argv[1:]
        for words in (["import", source, "--to", to], ["inspect", to, "--tensors"],
                      ["export", to, "--to", to + "/model.safetensors"], ["verify", to]):
            app(args=["checkpoint", *words], standalone_mode=False)
    """
    command = [sys.executable, "-c", script, str(folders / "stage3-bf16"), str(tmp_path / "ours")]
    done = subprocess.run(command, env=clean_environ(COLUMNS="200"), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "with the optimizer's state" in done.stdout
    assert "optimizer/state/embed.weight/exp_avg" in done.stdout
    assert "format: deepspeed" in done.stdout
    exported = load_file(tmp_path / "ours/model.safetensors")
    assert_same_bytes(exported, held(folders, "stage3-bf16", "model"))


def train_on(folder: str, cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, torch.Tensor]]:
    """The steps that DeepSpeed took after its save, on the same samples, from what was imported."""
    trained = {}
    for name, settings in cases.items():
        torch.manual_seed(9)
        rest = TensorDataset(*(column[STEPS * GLOBAL_BATCH :] for column in make_data().tensors))
        trainer = Trainer(
            Model(),
            loss_fn=nn.CrossEntropyLoss(),
            optimizer="adamw",
            learning_rate=1e-2,  # as in the other run: the rate is a setting
            num_gpus=RANKS,
            epochs=1,
            progress=False,
            run_dir=f"{folder}/run-{name}",
            checkpoint_dir=f"{folder}/run-{name}/checkpoints",
            **settings,
        )
        history = trainer.fit(DataLoader(rest, batch_size=GLOBAL_BATCH // RANKS, shuffle=False))
        trained[name] = load(history.checkpoint, ranks=()).shared["model"]
    return trained


def test_training_from_import_continues_as_deepspeed_does(folders: Path, tmp_path: Path) -> None:
    cases: dict[str, dict[str, Any]] = {}
    for name, settings in (("stage1", {}), ("stage2", {"backend": "fsdp"}), ("stage3", {"backend": "fsdp"})):
        done = import_weights(str(folders / name), str(tmp_path / name))
        cases[name] = {"resume_from_checkpoint": done.path} | settings
    for name, weights in run_ranks(train_on, RANKS, str(tmp_path), cases)[0].items():
        before, after = held(folders, name, "model"), held(folders, f"{name}-after", "model")
        assert sum(not torch.equal(before[key], after[key]) for key in after) == 5, "what is trained has moved"
        for key, value in after.items():
            torch.testing.assert_close(weights[key], value, rtol=1e-5, atol=1e-6, msg=f"{name}: {key}")
        assert (tmp_path / f"run-{name}/checkpoints/step-{MORE_STEPS:06d}").is_dir()


def test_missing_deepspeed_files_are_named(copy: Callable[[str], Path], tmp_path: Path) -> None:
    cases = [
        ("stage1", "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ("stage2-bf16", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"),
        ("stage2", "mp_rank_00_model_states.pt"),
        ("stage3", "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ("stage3-bf16", "zero_pp_rank_0_mp_rank_00_model_states.pt"),
        ("stage1-universal", "zero/middle.bias/fp32.pt"),
    ]
    for name, file in cases:
        folder = copy(name)
        (folder / TAG / file).unlink()
        with pytest.raises(CheckpointError, match="missing") as caught:
            import_weights(str(folder), str(tmp_path / "ours"))
        assert file in str(caught.value)
        shutil.rmtree(folder)
    folder = copy("stage3")
    for file in (folder / TAG).glob("*_optim_states.pt"):
        file.unlink()
    with pytest.raises(CheckpointError, match="2 of its files are missing"):
        import_weights(str(folder), str(tmp_path / "ours"))
    assert not (tmp_path / "ours").exists() or not list((tmp_path / "ours").glob("step-*"))


@pytest.mark.parametrize("stage", ["stage2", "stage3"])
def test_shards_of_different_saves_are_refused(stage: str, folders: Path, tmp_path: Path) -> None:
    for kind, why in (("world", "differing numbers of ranks"), ("short", "elements"), ("step", "different saves")):
        with pytest.raises(CheckpointError, match=why):
            import_weights(str(folders / f"{stage}-bad-{kind}"), str(tmp_path))
    assert not list(tmp_path.glob("step-*"))


def test_extra_duplicate_or_unsupported_rank_files_are_refused(copy: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copy("stage1") / TAG
    part = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    for name, why in (
        ("zero_pp_rank_2_mp_rank_00_optim_states.pt", "of a save by more"),
        ("bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "both of rank 1"),
        ("zero_pp_rank_1_mp_rank_01_optim_states.pt", "tensor parallelism"),
        ("layer_0_expert_1_mp_rank_00_model_states.pt", "experts or a pipeline"),
    ):
        shutil.copy(part, folder / name)
        with pytest.raises(CheckpointError, match=why):
            import_weights(str(folder), str(tmp_path / "ours"))
        (folder / name).unlink()


def test_latest_file_to_missing_or_outside_folder_is_refused(copy: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copy("stage2")
    (folder / "latest").write_text("global_step99")
    with pytest.raises(CheckpointError, match="global_step99") as caught:
        import_weights(str(folder), str(tmp_path / "ours"))
    assert TAG in str(caught.value), "what there is instead"
    for tag in (f"../{folder.name}/{TAG}", str(folder / TAG), "../../x", "", "..", f"{TAG}\0", "x" * 5000):
        (folder / "latest").write_text(tag)
        with pytest.raises(CheckpointError, match="not the name of a folder"):
            import_weights(str(folder), str(tmp_path / "ours"))


class Evil:
    def __init__(self, function: Any, *args: Any) -> None:
        self._call = (function, args)

    def __reduce__(self) -> Any:
        return self._call


def test_malicious_pickle_is_never_run(copy: Callable[[str], Path], tmp_path: Path) -> None:
    """Beside the weights it has no effect; in their place it is refused."""
    mark = tmp_path / "mark"
    evils = [
        Evil(os.system, f"touch {mark}"),
        Evil(builtins.eval, f"open({str(mark)!r}, 'w')"),
        Evil(builtins.exec, f"open({str(mark)!r}, 'w')"),
        Evil(subprocess.check_call, ["touch", str(mark)]),
        Evil(builtins.getattr, Evil(builtins.__import__, "os"), "system"),
        Evil(open, str(mark), "w"),
        Evil(Path.touch, Path(mark)),
    ]
    folder = copy("stage1")
    file = folder / TAG / "mp_rank_00_model_states.pt"
    sound = InertFile(file)
    module = {name: sound.tensor(value).clone() for name, value in sound.tree["module"].items()}
    plain = {key: sound.tree[key] for key in ("buffer_names", "shared_params", "global_steps")}
    plain["param_shapes"] = [dict(group) for group in sound.tree["param_shapes"]]
    for number, evil in enumerate(evils):
        torch.save(plain | {"module": module, "client": evil}, file)
        done = import_weights(str(folder), str(tmp_path / f"ours-{number}"))
        assert done.tensors == len(module)
        for bad in (
            plain | {"module": evil},
            plain | {"module": module, "param_shapes": evil},
            plain | {"module": module, "param_shapes": [{"embed.weight": evil}]},
            plain | {"module": module, "global_steps": evil},
            {"a": evil},
            evil,
        ):
            torch.save(bad, file)
            with pytest.raises(CheckpointError):
                import_weights(str(folder), str(tmp_path / "never"))
    assert not mark.exists()
    torch.load(file, weights_only=False)
    assert mark.exists(), "the last of them does run where it is let"


def test_files_with_false_tensor_metadata_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"

    def rebuilt(offset: Any, shape: Any, stride: Any) -> Evil:
        tensor = torch.arange(4.0)
        storage = torch.storage.TypedStorage(wrap_storage=tensor.untyped_storage(), dtype=tensor.dtype, _internal=True)
        return Evil(torch._utils._rebuild_tensor_v2, storage, offset, shape, stride, False, {})

    for offset, shape, stride in (
        (1, (4,), (1,)),
        (0, (2**40,), (1,)),
        (0, (2,), (4,)),
        (0, (2,), (-1,)),
        (-1, (2,), (1,)),
        (0, (2, 2), (1,)),
        (0, (2**40,), (0,)),
        ("0", (2,), (1,)),
    ):
        torch.save({"w": rebuilt(offset, shape, stride)}, path)
        with pytest.raises(CheckpointError, match="not a sound file"):
            InertFile(path)
    torch.save({"w": rebuilt(1, (3,), (1,)), "e": torch.empty(0, 3), "s": torch.ones(2).bfloat16()}, path)
    file = InertFile(path)
    assert file.tensor(file.tree["w"]).tolist() == [1.0, 2.0, 3.0]
    assert file.tensor(file.tree["e"]).shape == (0, 3)
    assert file.tensor(file.tree["s"]).dtype == torch.bfloat16
    for size in (0, 10, path.stat().st_size // 2):
        cut = tmp_path / "cut.pt"
        cut.write_bytes(path.read_bytes()[:size])
        with pytest.raises(CheckpointError, match="not a sound file"):
            InertFile(cut)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(torch.arange(4.0).numpy().tobytes(), torch.arange(4.0).flip(0).numpy().tobytes()))
    file = InertFile(path)
    with pytest.raises(CheckpointError, match="checksum"):
        file.tensor(file.tree["w"])
    torch.save({"w": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match="zip"):
        InertFile(path)


def test_pickle_with_huge_memo_index_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\x02]r\xff\xff\xff\x7f.")  # an empty list with the number 2**31 - 1
    with pytest.raises(CheckpointError, match="numbers 2147483647 things"):
        InertFile(tmp_path / "a.pt")


def test_safe_unpickle_keeps_unknown_objects_as_inert_data(tmp_path: Path) -> None:
    torch.save({"p": Path("x"), "m": nn.Linear(2, 2), "n": nn.Parameter(torch.ones(2))}, tmp_path / "a.pt")
    tree = InertFile(tmp_path / "a.pt").tree
    assert isinstance(tree["p"], Inert)
    assert tree["p"].args == ("x",)
    assert isinstance(tree["m"], Inert)
    assert isinstance(tree["n"], Stored)
