"""Every strategy trains what one process trains: the loss of each step, the gradient's norm and the validation loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from distributed.checkpoint.reading import load
from distributed.cli.checkpoint_transfers import export_adapter
from tests.meshes import MESHES, Case, Trained, TrainedCases, train

STEPS = {"plain": 20, "deep": 20}  # every mesh; other ways to train on it show in 10
FP16 = {"mixed_precision": "fp16", "gradient_clipping": 1.0, "scaler_init_scale": 1024.0}
DEEP = ["pp_interleaved", "pp_zero_bubble"]  # two stages a rank, each with a block
# What is asked for, of which model, and on which meshes: one process, which they are compared with, comes by itself.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "plain": ({}, {}, [name for name in MESHES if name != "one" and name not in DEEP]),
    "deep": ({}, {"blocks": 4}, [*DEEP, "pp"]),
    "clipped": (
        {"gradient_clipping": 0.5, "accumulation": 2},
        {},
        ["fsdp_grad_op", "zero1", "tp", "pp", "3d"],
    ),
    "tied": ({}, {"tied": True}, ["fsdp_grad_op", "zero1", "tp", "pp"]),
    "meta": ({}, {"meta": True}, ["ddp", "fsdp", "tp", "3d"]),
    "recomputed": ({"activation_checkpointing": 2}, {}, ["fsdp_grad_op", "pp"]),
    "selective": ({"activation_checkpointing": "selective"}, {}, ["ddp", "tp"]),
    "bf16": ({"mixed_precision": "bf16"}, {}, ["fsdp", "tp", "cp", "pp"]),
    "fp16": (FP16, {}, ["fsdp_grad_op", "tp", "pp"]),
    "lora": ({"lora": {"rank": 4}}, {}, ["tp", "pp"]),
    "adapters": ({"lora": {"rank": 4}, "save_adapters_only": True}, {}, ["fsdp", "3d"]),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedCases:
    cases = {
        f"{way}/{mesh}": Case(mesh, settings | {"max_steps": STEPS.get(way, 10)}, model)
        for way, (settings, model, meshes) in WAYS.items()
        for mesh in ["one", *meshes]
    }
    return TrainedCases(cases, tmp_path_factory.mktemp("meshes"))


def of(*ways: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("way", "mesh"), [(way, mesh) for way in ways for mesh in WAYS[way][2]])


def assert_same(found: Trained, wanted: Trained, steps: int) -> None:
    assert len(wanted.losses) == steps
    assert found.losses == pytest.approx(wanted.losses, rel=1e-5)
    assert found.norms == pytest.approx(wanted.norms, rel=1e-4)
    assert found.validation == pytest.approx(wanted.validation, rel=1e-5)
    assert wanted.losses[-1] < wanted.losses[0], "it must have learned something"


@of("plain", "deep", "clipped", "tied", "meta", "recomputed", "selective", "lora", "adapters")
def test_it_trains_what_one_process_trains(way: str, mesh: str, trained: TrainedCases) -> None:
    assert_same(trained[f"{way}/{mesh}"], trained[f"{way}/one"], STEPS.get(way, 10))


@pytest.mark.parametrize("way", ["recomputed", "selective"])
def test_activation_checkpointing_changes_nothing(way: str, trained: TrainedCases) -> None:
    assert trained[f"{way}/one"].losses == trained["plain/one"].losses[:10]


@of("bf16")
def test_mixed_precision_stays_near_full_precision(way: str, mesh: str, trained: TrainedCases) -> None:
    assert trained[f"{way}/{mesh}"].losses == pytest.approx(trained["plain/one"].losses[:10], rel=0.03)


@of("fp16")
def test_fp16_with_a_scaler(way: str, mesh: str, trained: TrainedCases) -> None:
    found = trained[f"{way}/{mesh}"]
    assert found.losses[0] == pytest.approx(trained["plain/one"].losses[0], rel=0.01)
    assert found.losses[-1] < 0.9 * found.losses[0]


@of("lora", "adapters")
def test_adapters_are_saved_alone_where_that_is_asked(way: str, mesh: str, trained: TrainedCases) -> None:
    names = load(trained[f"{way}/{mesh}"].checkpoint, ranks=()).shared["model"].keys()
    assert all("lora_" in name for name in names) == (way == "adapters")


def test_adapters_of_a_mesh_are_those_of_peft(trained: TrainedCases, tmp_path: Path) -> None:
    checkpoint = trained["adapters/fsdp"].checkpoint
    export_adapter(checkpoint, str(tmp_path / "adapter"))
    written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(written) == len(load(checkpoint, ranks=()).shared["model"])


def test_ranks_that_fit_starts_train_what_one_process_trains(trained: TrainedCases, tmp_path: Path) -> None:
    assert_same(train("fsdp_grad_op", tmp_path / "run"), trained["plain/one"], STEPS["plain"])
