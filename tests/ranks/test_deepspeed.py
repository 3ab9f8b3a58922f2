"""DeepSpeed behind our seam: every ZeRO stage trains as DDP and as one process do, and each rank holds its part."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distributed.core.errors import TaskError
from distributed.engines.deepspeed.offload import files_of
from distributed.runtime.tensor_shard import TensorShard
from distributed.testing import run_ranks
from tests.meshes import make_model
from tests.zero import Rank, make_normed, make_tied, make_wide

STEPS = 10
STAGES = ["z1", "z2", "z3", "z1_cpu", "z2_cpu", "z3_cpu"]
RECIPES: dict[str, dict[str, Any]] = {
    "adamw_schedule": {"lr_schedule": "cosine", "warmup_steps": 3, "weight_decay": 0.1},
    "sgd_accumulation_clipping": {
        "optimizer": "sgd",
        "momentum": 0.9,
        "learning_rate": 0.1,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.3,
    },
    "targets": {"loss_weighting": "targets", "gradient_accumulation_steps": 2, "gradient_clipping": 0.3},
}


ALL = [(recipe, kind) for recipe in RECIPES for kind in ["plain", *STAGES]]
# Where a stage offloads, it is trained by one of the recipes; by all of them in `make soak`.
OFFLOADED = [("adamw_schedule", "z1_cpu"), ("sgd_accumulation_clipping", "z2_cpu"), ("targets", "z3_cpu")]
USUAL = [pair for pair in ALL if not pair[1].endswith("_cpu") or pair in OFFLOADED]
FEATURES: dict[str, tuple[Any, dict[str, Any]]] = {
    "recompute": (make_model, {"activation_checkpointing": True}),
    "recompute_selective": (make_model, {"activation_checkpointing": "selective"}),
    "lora": (make_model, {"lora": True}),
    "lora_alone": (make_model, {"lora": True, "save_adapters_only": True}),
    "batchnorm": (make_normed, {"gradient_accumulation_steps": 2}),
}
WIDE = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.5, "learning_rate": 0.001}
WIDER = 17000  # a rank's half of each of its two matrices in bf16 has more than 1 MiB


def train(kind: str, model: nn.Module, steps: int = STEPS, **settings: Any) -> dict[str, Any]:
    """The losses, the norms and what of the weights this rank has, by their boxes."""
    rank = Rank(kind, model, **settings)
    curve = rank.steps(steps)
    weights = {name: pieces(value) for name, value in rank.strategy.state()["model"].items()}
    walk = os.walk(settings.get("offload_dir", "/none"))  # it does not mind that the other rank takes folders away
    files = [name for _, _, names in walk for name in names if name.endswith(".swp")]
    rank.strategy.close()
    return {"curve": curve, "weights": weights, "files": files}


def pieces(value: torch.Tensor | TensorShard) -> list[tuple[Any, torch.Tensor]]:
    if isinstance(value, TensorShard):
        return [(box, tensor.clone()) for box, tensor in value.pieces]
    return [(tuple((0, n) for n in value.shape), value.clone())]


def train_all(pairs: list[tuple[str, str]]) -> dict[tuple[str, str], Any]:
    return {
        (recipe, kind): train(kind, make_tied(), **RECIPES[recipe] | {"ignored": recipe == "targets"})
        for recipe, kind in pairs
    }


def assemble(parts: list[dict[str, list[tuple[Any, torch.Tensor]]]], shapes: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Whole tensors out of what each rank has; an element that nobody has is NaN."""
    whole = {name: torch.full(shape, torch.nan, dtype=torch.float64) for name, shape in shapes.items()}
    for part in parts:
        for name, held in part.items():
            for box, tensor in held:
                whole[name][tuple(slice(start, stop) for start, stop in box)] = tensor.double()
    return whole


def train_special(folder: str) -> dict[str, Any]:
    """What needs a model or a setting of its own."""
    disk = {"offload_optimizer": "nvme", "offload_parameters": "nvme", "offload_dir": folder}
    low = {"mixed_precision": "bf16"}
    return {
        "wide": train("plain", make_wide(), 5, **WIDE),
        "wide_disk": train("z3", make_wide(), 5, **WIDE | disk),
        "wide_bf16": train("z3", make_wide(WIDER), 3, **WIDE | low),
        "wide_bf16_disk": train("z3", make_wide(WIDER), 3, **WIDE | low | disk),
        "bf16": train("plain", make_tied(), **low),
        "bf16_z1": train("z1", make_tied(), **low),
        "bf16_z2": train("z2", make_tied(), **low),
        "bf16_z3": train("z3", make_tied(), **low),
        "files_after": files_after(folder),
        "given_back": {kind: give_back(kind) for kind in ("z2_bf16", "z3", "z3_bf16", "z3_cpu")},
        "kept": refusals(),
        "begins": {kind: begins_with(kind) for kind in ("z1", "z3", "z2_bf16")},
        "features": {
            (feature, kind): train(kind, FEATURES[feature][0](), 4, **FEATURES[feature][1])
            for feature in FEATURES
            for kind in ("plain", "z1", "z2", "z3")
        },
        "bytes": {kind: held_bytes(kind) for kind in ("plain", "z3")},
        "imported": sorted({"deepspeed", "mlflow"} & sys.modules.keys()),
    }


def files_after(folder: str) -> list[str]:
    """What is there once every rank has taken its own away."""
    dist.barrier()
    return os.listdir(folder)


def give_back(kind: str) -> dict[str, Any]:
    """What a script has of its model after a run that ended well, and whether another one can begin with it."""
    model = make_tied()
    rank = Rank(kind, model)
    first, *_ = rank.steps(3)
    masters = {name: pieces(value) for name, value in rank.strategy.state()["model"].items()}
    rank.strategy.finish()
    rank.strategy.close()
    found = {name: value.clone() for name, value in model.state_dict().items()}
    return {"masters": masters, "model": found, "losses": (first[0], Rank("plain", model).steps(1)[0][0])}


def refusals() -> list[str]:
    """What is said of a model that a failed run has left in parts."""
    model, said = make_tied(), []
    rank = Rank("z3", model)
    rank.steps(1)
    rank.strategy.close()
    for kind in ("plain", "fsdp", "z1", "z3"):
        with pytest.raises(TaskError) as refused:
            Rank(kind, model)
        said.append(refused.value.problems[0].what)
    return said


def begins_with(kind: str) -> bool:
    """Whether a rank whose model has other values begins with those of rank 0."""
    model = make_tied()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    if dist.get_rank() == 1:
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.add_(1)
    strategy = Rank(kind, model).strategy
    found = {name: pieces(value) for name, value in strategy.state()["model"].items()}
    strategy.close()
    return all(
        torch.equal(expected[name][tuple(slice(a, b) for a, b in box)], tensor)
        for name, held in found.items()
        for box, tensor in held
    )


def held_bytes(kind: str) -> dict[str, int]:
    """Of what this rank keeps between the backward pass and the step, from the tensors' own sizes."""
    keeps_nothing = {"deepspeed_config": {"zero_optimization": {"stage3_param_persistence_threshold": 0}}}
    rank = Rank(kind, make_wide(), **keeps_nothing if kind == "z3" else {})
    seen: dict[str, int] = {}

    def look(*_: Any) -> None:
        strategy = rank.strategy
        if kind == "plain":
            seen["parameters"] = size_of(strategy.module.parameters())
            seen["gradients"] = size_of(p.grad for p in strategy.module.parameters())
        else:
            zero = strategy._engine.optimizer
            held = [tensor for p in strategy.module.parameters() for tensor in (p.data, p.ds_tensor.data)]
            seen["parameters"] = size_of([*held, *zero.fp32_partitioned_groups_flat])
            gathered = [p.grad for p in strategy.module.parameters() if p.grad is not None]
            seen["gradients"] = size_of([*gathered, zero.grad_partitions_flat_buffer])
        state = [value for held in strategy.optimizer.state.values() for value in held.values()]
        seen["optimizer"] = size_of(value for value in state if value.numel() > 1)

    rank.steps(1)
    stepped = rank.strategy.optimizer if kind == "plain" else rank.strategy._engine.optimizer
    own = stepped.step
    stepped.step = lambda *args: (look(), own(*args))[1]
    rank.steps(1)
    rank.strategy.close()
    return seen


def size_of(tensors: Any) -> int:
    """In bytes, of memory that is counted once, however many tensors show it."""
    memory = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(memory.values())


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, str], Any]:
    return train_all([(recipe, "plain") for recipe in RECIPES])


@pytest.fixture(scope="module")
def together() -> list[dict[tuple[str, str], Any]]:
    """All runs of two ranks in one pair of processes."""
    return run_ranks(train_all, 2, USUAL)


@pytest.fixture(scope="module")
def special(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("disk")
    left = files_of(str(folder), "unused") / "zero_stage_3" / "rank7"  # of a larger world that was killed
    left.mkdir(parents=True)
    (left / "exp_avg-0.swp").touch()
    return run_ranks(train_special, 2, str(folder))


@pytest.fixture(scope="module")
def together_all() -> list[dict[tuple[str, str], Any]]:
    return run_ranks(train_all, 2, ALL)


SHAPES = {name: value.shape for name, value in make_tied().state_dict().items()}


@pytest.mark.parametrize(("recipe", "kind"), USUAL)
def test_every_zero_stage_matches_ddp_and_one_process(recipe: str, kind: str, alone: Any, together: Any) -> None:
    assert_equal(recipe, kind, alone, together)


@pytest.mark.soak
@pytest.mark.parametrize(("recipe", "kind"), ALL)
def test_every_stage_of_every_recipe_equals_one_process(recipe: str, kind: str, alone: Any, together_all: Any) -> None:
    assert_equal(recipe, kind, alone, together_all)


def assert_equal(recipe: str, kind: str, alone: Any, together: Any) -> None:
    one, ranks = alone[recipe, "plain"], [rank[recipe, kind] for rank in together]
    losses, norms = zip(*ranks[0]["curve"], strict=True)
    alone_losses, alone_norms = zip(*one["curve"], strict=True)
    assert list(losses) == pytest.approx(list(alone_losses), rel=1e-5)
    assert list(norms) == pytest.approx(list(alone_norms), rel=1e-4)
    assert losses[-1] < losses[0]
    found, expected = assemble([rank["weights"] for rank in ranks], SHAPES), assemble([one["weights"]], SHAPES)
    for name in found:
        assert torch.allclose(found[name], expected[name], rtol=1e-5, atol=2e-6), name


def test_optimizer_state_on_disk_trains_the_same(special: Any) -> None:
    shapes = {name: value.shape for name, value in make_wide().state_dict().items()}
    plain, disk = ([rank[kind] for rank in special] for kind in ("wide", "wide_disk"))
    expected, found = (assemble([rank["weights"] for rank in ranks], shapes) for ranks in (plain, disk))
    assert {"exp_avg", "exp_avg_sq"} <= {name.partition("-")[0] for name in disk[0]["files"]}
    assert [rank["files_after"] for rank in special] == [[], []]
    assert disk[0]["curve"] == [pytest.approx(step, rel=1e-5) for step in plain[0]["curve"]]
    for name in found:
        assert torch.allclose(found[name], expected[name], rtol=1e-5, atol=2e-6), name


def test_bf16_parameters_on_disk_train_the_same(special: Any) -> None:
    shapes = {name: value.shape for name, value in make_wide(WIDER).state_dict().items()}
    memory, disk = ([rank[kind] for rank in special] for kind in ("wide_bf16", "wide_bf16_disk"))
    expected, found = (assemble([rank["weights"] for rank in ranks], shapes) for ranks in (memory, disk))
    assert any("param" in name for name in disk[0]["files"])
    assert disk[0]["curve"] == [pytest.approx(step, rel=1e-5) for step in memory[0]["curve"]]
    for name in found:
        # Where a gradient is next to nothing, Adam's step of up to 0.001 shows how it was rounded: 13 of 1,088,000 did.
        apart = ~torch.isclose(found[name], expected[name], rtol=1e-5, atol=2e-6)
        assert apart.double().mean() < 1e-4, name
        assert torch.allclose(found[name], expected[name], rtol=1e-5, atol=5e-5), name


@pytest.mark.parametrize("kind", ["z2_bf16", "z3", "z3_bf16", "z3_cpu"])
def test_model_after_a_run_has_the_whole_master_weights(kind: str, special: Any) -> None:
    ended = [rank["given_back"][kind] for rank in special]
    expected = assemble([rank["masters"] for rank in ended], SHAPES)
    for rank in ended:
        assert rank["model"].keys() == expected.keys()
        for name, value in rank["model"].items():
            assert value.shape == SHAPES[name], name
            assert torch.equal(value.double(), expected[name]), name
    before, after = ended[0]["losses"]  # of the same batch, the second in a run with another engine
    assert after < before


def test_model_left_sharded_by_failed_run_is_refused(special: Any) -> None:
    assert [rank["kept"] for rank in special] == [["an earlier fit has sharded this model"] * 4] * 2


@pytest.mark.parametrize("kind", ["bf16_z1", "bf16_z2", "bf16_z3"])
def test_bf16_is_close_to_ddp_with_fp32_master_weights(kind: str, special: Any) -> None:
    plain, low = ([rank[name] for rank in special] for name in ("bf16", kind))
    assert [loss for loss, _ in low[0]["curve"]] == pytest.approx([loss for loss, _ in plain[0]["curve"]], rel=2e-2)
    expected, found = (assemble([rank["weights"] for rank in ranks], SHAPES) for ranks in (plain, low))
    for name in ("inner.weight", "tokens.weight"):
        assert torch.allclose(found[name], expected[name], atol=5e-2), name
        assert not torch.equal(found[name], found[name].bfloat16().double()), f"{name} has the bits of bf16 only"
    assert torch.equal(found["fixed.weight"], expected["fixed.weight"])


def test_zero3_on_two_ranks_holds_half_of_the_state_each(special: Any) -> None:
    for rank in special:
        whole, part = rank["bytes"]["plain"], rank["bytes"]["z3"]
        for what in ("parameters", "gradients", "optimizer"):
            assert part[what] <= whole[what] / 2 + 64, what  # padding
            assert part[what] > whole[what] * 0.49, what


def test_ranks_of_deepspeed_do_without_mlflow(special: Any) -> None:
    """DeepSpeed imports it, where it is installed, which takes seconds."""
    assert [rank["imported"] for rank in special] == [["deepspeed"]] * 2


def test_every_rank_starts_with_rank_0s_weights(special: Any) -> None:
    assert [rank["begins"] for rank in special] == [{"z1": True, "z3": True, "z2_bf16": True}] * 2


@pytest.mark.parametrize("kind", ["z1", "z2", "z3"])
@pytest.mark.parametrize("feature", FEATURES)
def test_model_features_match_ddp_under_zero(feature: str, kind: str, special: Any) -> None:
    plain, zero = ([rank["features"][feature, name] for rank in special] for name in ("plain", kind))
    assert zero[0]["curve"] == [pytest.approx(step, rel=1e-4) for step in plain[0]["curve"]]
    assert zero[0]["weights"].keys() == plain[0]["weights"].keys()
    shapes = {name: held[0][1].shape for name, held in plain[0]["weights"].items()}
    expected, found = (assemble([rank["weights"] for rank in ranks], shapes) for ranks in (plain, zero))
    for name in found:
        assert torch.allclose(found[name], expected[name], rtol=1e-4, atol=1e-5), name
