"""Every strategy trains what one process trains: the loss of each step, the gradient's norm and the validation loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from distributed.checkpoint.restore.reading import load
from distributed.cli.checkpoint.transfers import export_adapter
from tests.meshes import EPOCHS, GLOBAL_BATCH, MESHES, Case, Trained, TrainedCases, train

STEPS = 6
SAMPLES = STEPS * GLOBAL_BATCH // EPOCHS
FP16 = {"mixed_precision": "fp16", "gradient_clipping": 1.0, "scaler_init_scale": 1024.0}
# What a run does beside its steps: with one way of training it is shown on every mesh.
BRIEF: dict[bool, dict[str, Any]] = {
    False: {"samples": SAMPLES},
    True: {"samples": SAMPLES, "certificate_steps": 0, "checkpoint_frequency": "1000 steps"},
}
LORA = {"lora": {"rank": 4}}
DEEP = ["pp_interleaved", "pp_zero_bubble"]  # two stages a rank, each with a block
# What is asked for, of which model, and on which meshes: one process, which they are compared with, comes by itself.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "plain": ({}, {}, [name for name in MESHES if name != "one" and name not in DEEP]),
    "deep": ({}, {"blocks": 4}, [*DEEP, "pp"]),
    "clipped": (
        {"gradient_clipping": 0.5, "accumulation": 2, "activation_checkpointing": 2},
        {},
        ["fsdp_grad_op", "zero1", "tp", "pp", "3d"],
    ),
    "tied": ({}, {"tied": True}, ["fsdp_grad_op", "zero1", "tp", "pp"]),
    "meta": ({"activation_checkpointing": "selective"}, {"meta": True}, ["ddp", "fsdp", "tp", "pp", "3d"]),
    "recomputed": ({"activation_checkpointing": 2}, {}, []),
    "selective": ({"activation_checkpointing": "selective"}, {}, []),
    "bf16": ({"mixed_precision": "bf16"}, {}, ["fsdp", "tp", "cp", "pp"]),
    "fp16": (FP16, {}, ["fsdp_grad_op", "tp", "pp"]),
    "lora": (LORA, {}, ["tp", "pp"]),
    "adapters": (LORA | {"save_adapters_only": True}, {}, ["fsdp_grad_op", "fsdp", "3d"]),
}
# Of these, those that are trained in `make soak`: every axis of each is here on fewer ranks, or with another one.
SOAK = {
    *(("plain", mesh) for mesh in ("dp_tp", "pp_tp", "3d_replicated")),
    *(("adapters", mesh) for mesh in ("fsdp", "3d")),
    *(("deep", "pp"), ("tied", "zero1"), ("meta", "3d")),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedCases:
    cases = {
        f"{way}/{mesh}": Case(mesh, BRIEF[way != "plain"] | settings, model, (way, mesh) in SOAK)
        for way, (settings, model, meshes) in WAYS.items()
        for mesh in [*([] if "mixed_precision" in settings else ["one"]), *meshes]
    }
    return TrainedCases(cases, tmp_path_factory.mktemp("meshes"))


def of(*ways: str) -> pytest.MarkDecorator:
    pairs = [(way, mesh) for way in ways for mesh in WAYS[way][2]]
    params = [pytest.param(*pair, marks=pytest.mark.soak if pair in SOAK else ()) for pair in pairs]
    return pytest.mark.parametrize(("way", "mesh"), params)


def assert_same(found: Trained, wanted: Trained) -> None:
    assert len(wanted.losses) == STEPS
    assert len(wanted.validation) == EPOCHS
    assert found.losses == pytest.approx(wanted.losses, rel=1e-5)
    assert found.norms == pytest.approx(wanted.norms, rel=1e-4)
    assert found.validation == pytest.approx(wanted.validation, rel=1e-5)
    assert wanted.losses[-1] < wanted.losses[0], "it must have learned something"


@of("plain", "deep", "clipped", "tied", "meta", "lora", "adapters")
def test_mesh_matches_one_process(way: str, mesh: str, trained: TrainedCases) -> None:
    assert_same(trained[f"{way}/{mesh}"], trained[f"{way}/one"])


@pytest.mark.parametrize("way", ["recomputed", "selective"])
def test_activation_checkpointing_changes_no_loss(way: str, trained: TrainedCases) -> None:
    assert trained[f"{way}/one"].losses == trained["plain/one"].losses


@of("bf16")
def test_bf16_on_a_mesh_is_close_to_fp32(way: str, mesh: str, trained: TrainedCases) -> None:
    assert trained[f"{way}/{mesh}"].losses == pytest.approx(trained["plain/one"].losses, rel=0.03)


@of("fp16")
def test_fp16_with_scaler_learns_on_a_mesh(way: str, mesh: str, trained: TrainedCases) -> None:
    found = trained[f"{way}/{mesh}"]
    assert found.losses[0] == pytest.approx(trained["plain/one"].losses[0], rel=0.01)
    assert found.losses[-1] < 0.9 * found.losses[0]


@of("lora", "adapters")
def test_adapter_checkpoint_holds_only_adapters_when_asked(way: str, mesh: str, trained: TrainedCases) -> None:
    names = load(trained[f"{way}/{mesh}"].checkpoint, ranks=()).shared["model"].keys()
    assert all("lora_" in name for name in names) == (way == "adapters")


def test_adapters_of_a_mesh_are_exported_for_peft(trained: TrainedCases, tmp_path: Path) -> None:
    checkpoint = trained["adapters/fsdp_grad_op"].checkpoint
    export_adapter(checkpoint, str(tmp_path / "adapter"))
    written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(written) == len(load(checkpoint, ranks=()).shared["model"])


def test_ranks_started_by_fit_match_one_process(trained: TrainedCases, tmp_path: Path) -> None:
    found = train("fsdp_grad_op", tmp_path / "run", samples=SAMPLES)
    assert_same(found, trained["plain/one"])
