"""Horovod trains what DDP and one process train; its traps, its knobs, and its checkpoints under the other engines.

All that two ranks over gloo can show is run in one world of them.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distributed import DistributedError, HorovodTrainer, Trainer
from distributed.checkpoint.format.tree import flatten
from distributed.checkpoint.restore.reading import load
from distributed.core.registry import is_installed
from distributed.testing import run_ranks

pytestmark = [
    pytest.mark.skipif(not is_installed("horovod.torch"), reason="Horovod is not built: make horovod"),
]
GLOBAL_BATCH, SEED, LEAST_STEPS = 12, 5, 20


class Branches(nn.Module):
    """A layer that only some samples use, one that none does, and a buffer that depends on the share."""

    def __init__(self) -> None:
        super().__init__()
        self.common, self.rare, self.never = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen = 0.9 * self.seen + x.detach().sum(0)
        rare = x[:, 0] > 1.5
        y = self.common(x + 0.01 * self.seen)
        return y + self.rare(x) * rare[:, None] if bool(rare.any()) else y


@dataclass(frozen=True)
class Case:
    optimizer: str = "sgd"
    samples: int = 97  # one more than eight global batches
    model: str = "mlp"
    accumulation: int = 1
    dtype: torch.dtype = torch.float64
    tolerance: float | None = 1e-10  # of one process; None: DDP itself has another result, with buffers of its own
    settings: tuple[tuple[str, Any], ...] = ()


CASES = {
    "sgd": Case(),
    "adamw": Case("adamw"),
    "accumulation_with_a_short_last_batch": Case(samples=101, accumulation=3),
    "clipping": Case("adamw", settings=(("gradient_clipping", 0.05),)),
    "batchnorm": Case(model="batchnorm", samples=103, accumulation=2),
    "weights_of_targets": Case(model="tokens", accumulation=2),
    "unused": Case("adamw", model="branches", settings=(("find_unused_parameters", True),), tolerance=None),
    "bf16": Case(dtype=torch.float32, settings=(("mixed_precision", "bf16"),), tolerance=2e-2),
    "fp16": Case(
        dtype=torch.float32,
        settings=(("mixed_precision", "fp16"), ("scaler_init_scale", 1024), ("gradient_clipping", 0.1)),
        tolerance=2e-2,
    ),
    "parameters_in_bf16": Case(dtype=torch.bfloat16, tolerance=5e-2),
}


def make_model(kind: str = "mlp", dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(7)
    models: dict[str, Any] = {
        "mlp": lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)),
        "batchnorm": lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)),
        "tokens": lambda: nn.Sequential(nn.Conv1d(6, 5, 3, padding=1)),
        "branches": Branches,
    }
    return models[kind]().to(dtype)


def make_data(case: Case) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    if case.model == "tokens":  # positions of a sequence, of which the ranks have unequal numbers
        y = torch.randint(0, 5, (case.samples, 9), generator=generator)
        y[torch.arange(9) >= torch.randint(1, 9, (case.samples, 1), generator=generator)] = -100
        return TensorDataset(torch.randn(case.samples, 6, 9, generator=generator, dtype=case.dtype), y)
    x = torch.randn(case.samples, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x.to(case.dtype), torch.randint(0, 3, (case.samples,), generator=generator))


def make_optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def fit(
    case: Case, backend: str, ranks: int, run_dir: str, **more: Any
) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = make_model(case.model, case.dtype)
    optimizer = make_optimizer(case.optimizer, model.parameters())
    settings = {"epochs": -(-LEAST_STEPS // -(-case.samples // (GLOBAL_BATCH * case.accumulation)))} | dict(
        case.settings
    )
    trainer = Trainer(
        model,
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        backend=backend,
        num_gpus=ranks,
        batch_size=GLOBAL_BATCH // ranks,
        gradient_accumulation_steps=case.accumulation,
        seed=SEED,
        check_replicas="parameters",  # one of the models has a buffer of each rank's own samples
        progress=False,
        run_dir=run_dir,
        **settings | more,
    )
    history = trainer.fit(DataLoader(make_data(case), batch_size=1, shuffle=True))
    return model, optimizer, history


def trained_state(case: Case, backend: str, ranks: int, run_dir: str, **more: Any) -> dict[str, torch.Tensor]:
    """Weights and what the user's optimizer object holds, after at least 20 steps."""
    model, optimizer, history = fit(case, backend, ranks, run_dir, **more)
    assert history.steps >= LEAST_STEPS
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            if isinstance(value, torch.Tensor):
                state[f"{key} of {name}"] = value.clone()
    return state


def equivalence(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        found[name] = {
            backend: trained_state(case, backend, 2, f"{folder}/{name}-{backend}")
            for backend in ("horovod", "pytorch-ddp")
        }
    found["compressed"] = trained_state(CASES["adamw"], "horovod", 2, f"{folder}/compressed", compression="fp16")
    return found


def long_sequences(folder: str) -> dict[str, list[float]]:
    """Losses of gradients that go over the wire in fp16, which ends at 65504, and of others: 8 × 4096 positions."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(32, 6, 4096, generator=generator)
    data = DataLoader(TensorDataset(100 * x, x[:, :5].argmax(1)), batch_size=1)
    found: dict[str, list[float]] = {}
    for compression in ("fp16", "none"):
        trainer = Trainer(
            make_model("tokens", torch.float32), loss_fn=nn.CrossEntropyLoss(), backend="horovod", batch_size=8,
            compression=compression, learning_rate=1e-3, optimizer="sgd", progress=False, epochs=4,
            run_dir=f"{folder}/long-{compression}",
        )  # fmt: skip
        found[compression] = trainer.fit(data)["loss"]
    return found


def traps(folder: str) -> dict[str, Any]:
    """AdamW's counter and weights around setup, and an optimizer that comes with state and a scheduler of its own."""
    import horovod.torch as hvd

    case = CASES["adamw"]
    data = DataLoader(make_data(case), batch_size=1, shuffle=True)
    model = make_model()
    optimizer = make_optimizer("adamw", model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    first: dict[str, torch.Tensor] = {}
    hook = model.register_forward_pre_hook(
        lambda m, _: first or first.update({k: v.clone() for k, v in m.state_dict().items()})
    )
    settings: dict[str, Any] = {"backend": "horovod", "batch_size": GLOBAL_BATCH // 2, "progress": False}
    trainer = Trainer(
        model, loss_fn=nn.CrossEntropyLoss(), optimizer=optimizer, scheduler=scheduler,
        scheduler_interval="step", run_dir=f"{folder}/traps-1", **settings,
    )  # fmt: skip
    trainer.fit(data, max_steps=1)
    hook.remove()
    one_step = [int(held["step"]) for held in optimizer.state.values()]
    rate = optimizer.param_groups[0]["lr"]
    trainer.fit(data, max_steps=2, run_dir=f"{folder}/traps-2")
    steps = [int(held["step"]) for held in optimizer.state.values()]
    return {
        "untouched before the first step": all(torch.equal(first[k], v) for k, v in make_model().state_dict().items()),
        "after one step": one_step,
        "rate after one step": rate,
        "after two more": steps,
        "left": not hvd.is_initialized(),
    }


def knobs(folder: str) -> dict[str, str]:
    """The timeline tells what was sent together, and how often Horovod looked. Its own knob stays set in a process."""
    case, told = CASES["sgd"], {name: f"{folder}/{name}.json" for name in ("default", "slow", "again")}
    slow = {"fusion_threshold_mb": 0, "cycle_time_ms": 25}
    os.environ["HOROVOD_TIMELINE_MARK_CYCLES"] = "1"
    for name, path in told.items():
        more = {} if name == "default" else slow
        fit(case, "horovod", 2, f"{folder}/knobs-{name}", max_steps=5, timeline=path, **more)
    del os.environ["HOROVOD_TIMELINE_MARK_CYCLES"]
    try:
        fit(case, "horovod", 2, f"{folder}/knobs-refused", max_steps=1)
    except DistributedError as refused:
        told["refusal"] = str(refused)
    return told


def unused_on_one_rank(folder: str) -> str:
    try:
        fit(Case(model="branches"), "horovod", 2, f"{folder}/missing", max_steps=1)
    except DistributedError as refused:
        return str(refused)
    except RuntimeError as lost:  # the other rank was first to refuse
        return type(lost).__name__
    return ""


def script_with_horovod(folder: str) -> dict[str, Any]:
    """`hvd.init()` first, as Horovod's scripts do; nobody has told it of the other rank."""
    import horovod.torch as hvd
    import torch.distributed as dist

    hvd.init()
    model = make_model()
    trainer = HorovodTrainer(
        model,
        make_optimizer("sgd", model.parameters()),
        nn.CrossEntropyLoss(),
        compression=hvd.Compression.fp16,
        verbose=False,
        batch_size=6,
        run_dir=f"{folder}/script",
    )
    history = trainer.fit(DataLoader(make_data(CASES["sgd"]), batch_size=1), epochs=1)
    plan = json.loads(Path(history.checkpoint).parents[1].joinpath("plan.json").read_text())
    return {
        "average": trainer.metric_average(float(dist.get_rank()), "rank"),
        "rate": trainer._task.optimizer.param_groups[0]["lr"],
        "engine": plan["engine"],
        "decisions": [decision["choice"] for decision in plan["decisions"]],
    }


def checkpoints(folder: str) -> dict[str, str]:
    """Runs that go on from each other's checkpoints, under three engines, and one that is not interrupted."""
    case = CASES["adamw"]

    def leg(name: str, backend: str, steps: int, source: str = "", **more: Any) -> str:
        resume = {"resume_from_checkpoint": source} if source else {}
        more |= {"checkpoint_dir": f"{folder}/{name}"}  # run_dir is the launcher's, and goes with the ranks
        history = fit(case, backend, 2, f"{folder}/{name}", epochs=5, max_steps=steps, **resume, **more)[2]
        return str(history.checkpoint)

    found = {"whole": leg("whole", "horovod", 30), "first": leg("first", "horovod", 10)}
    found["again"] = leg("again", "horovod", 30, found["first"])
    found["ddp"] = leg("ddp", "pytorch-ddp", 20, found["first"])
    found["back"] = leg("back", "horovod", 30, found["ddp"])
    found["fsdp"] = leg("fsdp", "fsdp", 10, found["first"])
    found["back from fsdp"] = leg("back-from-fsdp", "horovod", 10, found["fsdp"])
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found."""
    folder = str(tmp_path_factory.mktemp("horovod"))

    def all_of_it() -> dict[str, Any]:
        return {
            "equivalence": equivalence(folder),
            "long": long_sequences(folder),
            "traps": traps(folder),
            "script": script_with_horovod(folder),
            "checkpoints": checkpoints(folder),
            "missing": unused_on_one_rank(folder),
            "knobs": knobs(folder),
        }

    return run_ranks(all_of_it, 2)


@pytest.mark.parametrize("name", CASES)
def test_horovod_matches_ddp_and_one_process(name: str, found: list[dict[str, Any]], tmp_path: Path) -> None:
    case = CASES[name]
    alone = trained_state(case, "pytorch-ddp", 1, str(tmp_path))
    start = make_model(case.model, case.dtype).state_dict()
    assert any(not torch.equal(start[key], alone[key]) for key in start), "the reference did not train at all"
    for rank in found:
        state, ddp = rank["equivalence"][name]["horovod"], rank["equivalence"][name]["pytorch-ddp"]
        assert state.keys() == ddp.keys() == alone.keys()
        for key in state:
            torch.testing.assert_close(state[key], ddp[key], rtol=1e-12, atol=1e-12, msg=lambda m, k=key: f"{k}: {m}")
            if case.tolerance is not None:
                close = {"rtol": case.tolerance, "atol": case.tolerance}
                torch.testing.assert_close(state[key], alone[key], **close, msg=lambda m, k=key: f"{k}: {m}")


def test_horovod_ranks_hold_the_same_bytes(found: list[dict[str, Any]]) -> None:
    first, second = (rank["equivalence"] for rank in found)
    for name in CASES:
        differing = [k for k, v in first[name]["horovod"].items() if not torch.equal(v, second[name]["horovod"][k])]
        assert not differing, name


def test_fp16_compressed_gradients_are_close_but_not_equal(found: list[dict[str, Any]]) -> None:
    compressed, exact = found[0]["equivalence"]["compressed"], found[0]["equivalence"]["adamw"]["horovod"]
    assert not torch.equal(compressed["0.weight"], exact["0.weight"])
    for key in make_model().state_dict():
        torch.testing.assert_close(compressed[key], exact[key], rtol=2e-2, atol=2e-3)


def test_compressed_gradients_of_many_targets_do_not_overflow(found: list[dict[str, Any]]) -> None:
    losses = found[0]["long"]
    assert len(losses["none"]) == 4
    assert losses["none"][-1] < 0.9 * losses["none"][0], "it does not train at all"
    assert losses["fp16"] == pytest.approx(losses["none"], rel=1e-2)


def test_parameter_unused_on_all_ranks_is_unchanged(found: list[dict[str, Any]]) -> None:
    state = found[0]["equivalence"]["unused"]["horovod"]
    assert torch.equal(state["never.weight"], make_model("branches").state_dict()["never.weight"])
    assert not torch.equal(state["rare.weight"], make_model("branches").state_dict()["rare.weight"])


def test_missing_gradient_is_an_error_not_a_hang(found: list[dict[str, Any]]) -> None:
    told = [rank["missing"] for rank in found]
    assert all(told)
    assert any("got no gradient" in text and "find_unused_parameters" in text for text in told)


def test_horovod_setup_takes_no_optimizer_step(found: list[dict[str, Any]]) -> None:
    for rank in found:
        traps = rank["traps"]
        assert traps["untouched before the first step"]
        assert traps["after one step"] == [1, 1, 1, 1]
        assert traps["rate after one step"] == pytest.approx(0.005)  # the user's scheduler acts on what steps
        assert traps["after two more"] == [3, 3, 3, 3]
        assert traps["left"]


def test_timeline_shows_fusion_and_cycle_time_settings(found: list[dict[str, Any]]) -> None:
    told = found[0]["knobs"]
    assert "cannot be changed" in told.pop("refusal")
    events = {name: json.loads(Path(path).read_text()) for name, path in told.items()}

    def starts(name: str, what: str) -> list[float]:
        return [event["ts"] for event in events[name] if event.get("name") == what]

    def pause_ms(name: str) -> float:
        cycles = starts(name, "CYCLE_START")
        return statistics.median(later - sooner for sooner, later in itertools.pairwise(cycles)) / 1000

    singly = {f"allreduce.gradient.{name}" for name in ("0.weight", "0.bias", "2.weight", "2.bias")}
    for name, sent in (("default", {"allreduce.gradient.2.bias and 3 more"}), ("slow", singly), ("again", singly)):
        names = {event["args"].get("name", "") for event in events[name] if event.get("name") == "process_name"}
        assert {one for one in names if one.startswith("allreduce.gradient")} == sent
        assert len(starts(name, "ALLREDUCE")) >= 5 * len(sent)  # steps and buckets
        assert not starts(name, "MEMCPY_IN_FUSION_BUFFER"), "Horovod fused them by itself"
    assert pause_ms("slow") >= 24
    assert pause_ms("default") < pause_ms("slow")


def test_script_using_hvd_calls_trains_with_our_settings(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["script"]["average"] == 0.5
        assert rank["script"]["rate"] == pytest.approx(0.1)  # 0.05, scaled for two ranks
    assert found[0]["script"]["engine"]["compression"] == "fp16"
    assert "learning rate × 2" in found[0]["script"]["decisions"]


def test_horovod_checkpoints_load_under_ddp_and_fsdp_and_back(found: list[dict[str, Any]]) -> None:
    paths = found[0]["checkpoints"]
    tensors = {name: flatten(load(path, ranks=()).shared)[0] for name, path in paths.items()}

    def same(one: str, other: str) -> bool:
        return tensors[one].keys() == tensors[other].keys() and all(
            torch.equal(value, tensors[other][name]) for name, value in tensors[one].items()
        )

    assert same("whole", "again"), "a resumed run differs from one that was not interrupted"
    assert same("whole", "back"), "ten steps by DDP in between differ"
    assert same("first", "fsdp"), "FSDP2 did not save what it loaded"
    assert same("first", "back from fsdp")
    assert not same("first", "whole")
