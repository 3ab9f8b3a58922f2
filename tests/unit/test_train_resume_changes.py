"""What a resumed run has changed since its checkpoint: what is refused, what is told, and what nobody need know."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import nn

from distributed.core.config import DistributedConfig
from distributed.core.errors import CheckpointError, ConfigError
from distributed.core.plan import BatchPlan, Plan
from distributed.strategies.model.optimizer_state import load_named_state, match_groups, named_state, optimizer_kind
from distributed.train.resume.certificate import Verdict
from distributed.train.resume.changes import SETTINGS, Effect, changes, unknown
from distributed.train.resume.groups import other_groups, other_optimizer, schedule_in_own_order
from distributed.train.resume.resuming import resume_from

MIDDLE = {"samples_in_epoch": 16, "steps_in_epoch": 2}
BETWEEN = {"samples_in_epoch": 0, "steps_in_epoch": 0}
RUN = {
    "shuffle": True,
    "sampler": "",
    "loss": {"name": "MSELoss", "state": {"": "0"}, "options": {"reduction": "mean"}},
    "optimizer": "SGD",
    "scheduler": "",
    "total_steps": 8,
    "data": {"the class of dataset": "Files", "dataset.names": "64 ab"},
}


def meta(settings: dict[str, Any] | None = None, samples: int | None = 64, **more: Any) -> dict[str, Any]:
    run = RUN | {name: more.pop(name) for name in list(more) if name in RUN}
    plan = replace(Plan("", BatchPlan(8)), **more)
    asked = DistributedConfig(**settings or {}).model_dump(mode="json")
    about = {"samples": samples, "global_batch": plan.batch.global_batch, "division": plan.division}
    return {"settings": asked, "plan": asdict(plan), "device": "cpu", "torch": "2.13", "run": run} | about


def found(before: dict[str, Any], now: dict[str, Any], progress: dict[str, int] = MIDDLE) -> dict[str, Effect]:
    return {change.name: change.effect for change in changes(before, now, progress, path="step-000002")}


def test_every_setting_has_a_declared_effect_on_resume() -> None:
    assert DistributedConfig.model_fields.keys() == SETTINGS.keys()


STREAM: dict[str, Any] = {"samples": None, "shuffle": None}
BREAKING: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("seed", {}, {"seed": 1}),
    ("seed", STREAM, STREAM | {"seed": 1}),
    ("shuffle", {}, {"shuffle": False}),
    ("sampler", {}, {"sampler": "WeightedRandomSampler"}),
    ("data", {}, {"samples": 65}),
    ("data", STREAM, {"shuffle": None}),
    ("data", {}, {"data": {"dataset.names": "64 cd"}}),
    ("batch", {}, {"batch": BatchPlan(5)}),
    ("batch", STREAM, STREAM | {"batch": BatchPlan(16)}),
    ("iterable_split", STREAM, STREAM | {"iterable_split": "dataset"}),
    (
        "ranks",
        STREAM | {"iterable_split": "dataset"},
        STREAM | {"iterable_split": "dataset", "batch": BatchPlan(4, ranks=2)},
    ),
    ("loss", {}, {"loss": RUN["loss"] | {"name": "L1Loss"}}),  # type: ignore[operator]
    ("loss", {}, {"loss": RUN["loss"] | {"state": {"": "1"}}}),  # type: ignore[operator]
    ("optimizer", {}, {"optimizer": "AdamW"}),
    ("scheduler", {}, {"scheduler": "StepLR"}),
]


@pytest.mark.parametrize(("name", "before", "now"), BREAKING)
def test_change_of_order_data_or_optimizer_breaks_the_resume(
    name: str, before: dict[str, Any], now: dict[str, Any]
) -> None:
    assert found(meta(**before), meta(**now))[name] is Effect.BREAKS
    always = name in ("data", "loss", "optimizer", "scheduler")
    assert (found(meta(**before), meta(**now), BETWEEN).get(name) is Effect.BREAKS) == always


@pytest.mark.parametrize(
    ("name", "now"),
    [
        ("batch", {"batch": BatchPlan(16)}),
        ("mixed_precision", {"settings": {"mixed_precision": "bf16"}}),
        ("gradient_clipping", {"settings": {"gradient_clipping": 1.0}}),
        ("reproducible", {"batch": BatchPlan(8, leaves=8)}),
        ("reduction of the loss", {"loss": RUN["loss"] | {"options": {"reduction": "sum"}}}),  # type: ignore[operator]
    ],
)
def test_change_that_makes_another_run_is_reported(name: str, now: dict[str, Any]) -> None:
    assert found(meta(), meta(**now)) == {name: Effect.DIFFERS}


def test_epoch_ended_by_a_short_batch_resumes_with_any_batch() -> None:
    """Its evaluation is still due, and no samples are."""
    end = {"samples_in_epoch": 61, "steps_in_epoch": 8}
    assert found(meta(samples=61), meta(samples=61), end) == {}
    assert found(meta(samples=61), meta(samples=61, batch=BatchPlan(16)), end) == {"batch": Effect.DIFFERS}
    assert found(meta(), meta(), end)["batch"] is Effect.BREAKS


def test_seed_without_shuffle_and_more_steps_under_decay_differ() -> None:
    assert found(meta(shuffle=False), meta(shuffle=False, seed=1)) == {"seed": Effect.DIFFERS}
    assert found(meta(), meta(total_steps=80, epochs=10, settings={"epochs": 10, "log_every_n_steps": 1})) == {}
    cosine = replace(Plan("", BatchPlan(8)).schedule, kind="cosine")
    assert found(meta(schedule=cosine), meta(schedule=cosine, total_steps=80)) == {"steps in all": Effect.DIFFERS}


def test_checkpoint_without_run_facts_counts_as_unchanged() -> None:
    older = {name: value for name, value in meta().items() if name not in ("run", "torch")}
    assert found(older, meta(shuffle=False, optimizer="AdamW")) == {}
    assert unknown(older) == ["shuffle", "sampler", "data", "loss", "optimizer", "scheduler"]


def test_data_fingerprints_missing_on_one_side_are_not_compared() -> None:
    assert found(meta(data={}), meta()) == {}
    assert found(meta(), meta(data={"dataset.labels": "64 cd"})) == {}


def tree(groups: list[dict[str, Any]], schedule: dict[str, Any], **progress: int) -> dict[str, Any]:
    position = {"epoch": 0, "step": 2} | MIDDLE | progress
    return {"optimizer": {"state": {}, "param_groups": groups}, "schedule": schedule, "progress": position}


def resume(before: dict[str, Any], now: dict[str, Any], saved: dict[str, Any], *allowed: str, **more: Any) -> Any:
    how = {"groups": [{"params": ["w", "b"], "lr": 0.1}], "schedule": {"peaks": [0.1]}, "own_rates": False}
    return resume_from(saved, before, now, path="step-000002", allowed=allowed, **how | more)


PLAIN = [{"params": ["w", "b"], "lr": 0.1}]


def test_all_refused_changes_are_listed_and_can_be_allowed() -> None:
    saved, now = tree(PLAIN, {"peaks": [0.1]}), meta(seed=1, shuffle=False, samples=70)
    with pytest.raises(CheckpointError) as refused:
        resume(meta(), now, saved)
    assert [problem.do.rpartition("allow_change=")[2].partition(",")[0] for problem in refused.value.problems] == [
        "seed",
        "shuffle",
        "data",
    ]
    with pytest.raises(CheckpointError, match="allow_change=data"):
        resume(meta(), now, saved, "seed", "shuffle")
    resuming = resume(meta(), now, saved, "seed", "shuffle", "data", "batch")
    assert [change.name for change in resuming.others] == ["seed", "shuffle", "data"]
    assert any("allow_change=batch has no effect" in line for line in resuming.lines)


def test_new_optimizer_starts_at_its_own_rate_with_past_decay() -> None:
    schedule = {"base_lrs": [0.1], "_last_lr": [0.01], "last_epoch": 2}
    saved = tree([{"params": ["w", "b"], "lr": 0.01, "initial_lr": 0.1}], schedule)
    how = {"groups": [{"params": ["w", "b"], "lr": 5.0, "initial_lr": 5.0}], "schedule": schedule | {"base_lrs": [5.0]}}
    stepped = {"scheduler": "StepLR"}
    resuming = resume(meta(**stepped), meta(optimizer="AdamW", **stepped), saved, "optimizer", **how)
    assert "optimizer" not in resuming.tree
    assert resuming.tree["schedule"] == {"base_lrs": [5.0], "_last_lr": [0.01], "last_epoch": 2}
    assert resuming.decays == (pytest.approx(0.1),)


def test_checkpoints_optimizer_options_are_kept_with_a_notice() -> None:
    saved = tree([{"params": ["w", "b"], "lr": 0.1, "weight_decay": 0.5}], {"peaks": [0.1]})
    mine = {"groups": [{"params": ["w", "b"], "lr": 0.2, "weight_decay": 0.0}], "schedule": {"peaks": [0.2]}}
    kept = resume(meta(), meta(), saved, **mine)
    assert [(change.name, change.effect) for change in kept.changes] == [
        ("learning rate", Effect.KEPT),
        ("weight_decay", Effect.KEPT),
    ]
    assert not kept.others
    assert resume(meta(), meta(), saved, own_rates=True, **mine).others


GROUPS = [
    {"params": ["0.weight", "1.weight"], "weight_decay": 0.5, "lr": 0.1},
    {"params": ["0.bias", "1.bias"], "weight_decay": 0.0, "lr": 0.2},
]


def test_param_groups_are_matched_by_their_parameters() -> None:
    assert match_groups(GROUPS, [["1.bias", "0.bias"], ["0.weight", "1.weight"]]) == [1, 0]
    apart = [["0.weight"], ["0.bias", "1.bias"], ["1.weight"]]
    assert match_groups(GROUPS, apart) == [0, 1, 0], "what was one group has its options in both"
    own = [{"params": names} for names in (["0.weight", "0.bias"], ["1.weight", "1.bias"])]
    change = other_groups(GROUPS, own, {})
    assert change is not None
    assert (change.name, change.effect) == ("groups", Effect.BREAKS)
    fewer = other_groups(GROUPS, [{"params": ["0.weight"]}], {})
    assert fewer is not None
    assert fewer.name == "optimizer"


def test_scheduler_state_follows_reordered_param_groups() -> None:
    own = GROUPS[::-1]
    inner = {"base_lrs": [0.1, 0.2], "last_epoch": 3}
    state = {"_schedulers": [inner], "_milestones": [3, 5], "_last_lr": [0.05, 0.1]}
    moved = schedule_in_own_order(state, GROUPS, own)
    assert moved["_last_lr"] == [0.1, 0.05]
    assert moved["_schedulers"][0]["base_lrs"] == [0.2, 0.1]
    assert moved["_milestones"] == [3, 5]
    change = other_groups(GROUPS, own, {"temperatures": [1.0, 2.0]})
    assert change is not None
    assert change.effect is Effect.BREAKS
    in_order = other_groups(GROUPS, GROUPS, {"temperatures": [1.0, 2.0]})
    assert in_order is None


def make_groups(model: nn.Sequential, *, reverse: bool) -> torch.optim.SGD:
    layers = [model[0], model[1]]
    groups = [
        {"params": [layer.weight for layer in layers], "weight_decay": 0.5},
        {"params": [layer.bias for layer in layers], "weight_decay": 0.0},
    ]
    return torch.optim.SGD(groups[::-1] if reverse else groups, lr=0.01, momentum=0.9)


def test_weight_decay_stays_with_the_weights_in_reordered_groups() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    one, other = make_groups(model, reverse=False), make_groups(model, reverse=True)
    model(torch.ones(1, 2)).sum().backward()
    one.step()
    load_named_state(other, model, named_state(one, model))
    assert [group["weight_decay"] for group in other.param_groups] == [0.0, 0.5]
    for parameter in model.parameters():
        assert torch.equal(one.state[parameter]["momentum_buffer"], other.state[parameter]["momentum_buffer"])


def test_optimizer_kind_is_found_by_its_options() -> None:
    parameters = [nn.Parameter(torch.zeros(1))]
    adam, adamw = torch.optim.Adam(parameters), torch.optim.AdamW(parameters, foreach=True)
    assert [optimizer_kind(one) for one in (adam, adamw)] == ["Adam", "AdamW"]

    def groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        return optimizer.state_dict()["param_groups"]

    assert other_optimizer(groups(adam), groups(adamw)) == "", "it does not show"
    assert "betas" in other_optimizer(groups(adam), groups(torch.optim.SGD(parameters)))
    assert "betas" in other_optimizer(groups(adam), groups(torch.optim.RMSprop(parameters)))


def test_verdict_over_no_steps_is_neither_pass_nor_fail() -> None:
    nothing = Verdict(0, why="no step was recorded", changed=("seed 0 → 1",))
    assert nothing.passed is None
    assert "PASS" not in str(nothing)
    assert "seed 0 → 1" in str(nothing)
    assert Verdict(2).passed is True
    assert Verdict(0, "model", 4, 1).passed is False, "the state of the checkpoint itself differs"


def test_allow_change_needs_a_known_name_and_a_resume() -> None:
    assert DistributedConfig(allow_change=["seed"], resume_from_checkpoint=True).allow_change == ["seed"]
    with pytest.raises(ConfigError, match="did you mean seed"):
        DistributedConfig(allow_change="sead", resume_from_checkpoint=True)
    with pytest.raises(ConfigError, match="nothing is resumed"):
        DistributedConfig(allow_change="seed")
