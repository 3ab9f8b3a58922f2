"""What decides whether a step may be captured: what is seen in Python, in the optimizer, and in two outcomes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from distributed.data.loading.loader import Microbatch
from distributed.data.loading.rows import RowBatch
from distributed.strategies.base import StepOutput
from distributed.train.capture.captured import NotCapturable, shape_of
from distributed.train.capture.checks import TensorUpdate, differs, hooks_of
from distributed.train.capture.places import Places
from distributed.train.capture.proofs import FACTOR, FIRST, Proofs, about_unseen, frozen
from distributed.train.capture.rates import Rates
from distributed.train.checks.reachable import changes, look

CPU = torch.device("cpu")


def hook(*given: Any) -> None:
    """Of a user."""


@pytest.mark.parametrize("where", ["module", "backward", "parameter", "accumulated", "optimizer"])
def test_hooks_that_prevent_capture_are_found(where: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert hooks_of(model, optimizer) == ""
    register = {
        "module": lambda: model[0].register_forward_pre_hook(hook),
        "backward": lambda: model[0].register_full_backward_hook(hook),
        "parameter": lambda: model[0].weight.register_hook(hook),
        "accumulated": lambda: model[0].weight.register_post_accumulate_grad_hook(hook),
        "optimizer": lambda: optimizer.register_step_post_hook(hook),
    }
    register[where]()
    assert hooks_of(model, optimizer).startswith("a hook of the ")


def outcome(act: Callable[[list[torch.Tensor]], None]) -> tuple[StepOutput, list[TensorUpdate]]:
    """Of one step of AdamW, whose counters change by one and whose weights hardly do."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(64, 64))
    optimizer = torch.optim.AdamW([weight], lr=1e-4)
    for _ in range(3):
        weight.grad = torch.randn(64, 64)
        optimizer.step()
    held = [weight, *optimizer.state[weight].values()]
    before = [tensor.detach().clone() for tensor in held]
    weight.grad = torch.randn(64, 64)
    act([weight])
    optimizer.step()
    return StepOutput(1.0), [TensorUpdate(now.detach() - was, was) for now, was in zip(held, before, strict=True)]


def test_step_with_negated_gradient_differs() -> None:
    right = outcome(lambda given: None)
    wrong = outcome(lambda given: given[0].grad.neg_())  # type: ignore[union-attr]
    assert differs(*right, *outcome(lambda given: None), "fp32") == ""
    assert "of 4 tensors of the state otherwise" in differs(*wrong, *right, "fp32")


@pytest.mark.parametrize(
    ("there", "kind", "same"), [(1.0001, "fp32", False), (1.0001, "bf16", True), (2.0, "bf16", False)]
)
def test_losses_are_compared_to_their_precision(there: float, kind: str, same: bool) -> None:
    changes = outcome(lambda given: None)[1]
    assert (differs(StepOutput(there), changes, StepOutput(1.0), changes, kind) == "") is same
    assert differs(StepOutput(float("nan")), changes, StepOutput(1.0), changes, kind) != ""


def test_tensors_that_eager_steps_do_not_repeat_prove_nothing() -> None:
    """A tensor that two eager steps change in different ways may be as far off; one that they change alike may not."""
    torch.manual_seed(0)
    steady, was = torch.randn(8), torch.ones(64)

    def changes(first: torch.Tensor) -> list[TensorUpdate]:
        return [TensorUpdate(first, was[:8]), TensorUpdate(1e-3 * torch.randn(64), was)]

    captured, eager, again = changes(steady), changes(steady), changes(steady)
    assert "changes 1 of 2 tensors" in differs(StepOutput(1.0), captured, StepOutput(1.0), eager, "fp32")
    assert differs(StepOutput(1.0), captured, StepOutput(1.0), eager, "fp32", again=again) == ""
    assert "changes 1 of 2" in differs(StepOutput(1.0), changes(-steady), StepOutput(1.0), eager, "fp32", again=again)
    far = [captured[0], TensorUpdate(10 * captured[1].by, was)]
    assert differs(StepOutput(1.0), far, StepOutput(1.0), eager, "fp32", again=again) != ""
    assert "its loss is" in differs(StepOutput(1.1), captured, StepOutput(1.0), eager, "fp32", again=again)


def test_graph_is_verified_at_growing_intervals() -> None:
    proofs, at = Proofs(), []
    for _ in range(5000):
        if proofs.is_due:
            at.append(proofs.replays)
            assert proofs.is_open
            proofs.passed()
            assert not proofs.is_open
        proofs.replayed()
    assert at == [FIRST * FACTOR**power for power in range(5)]


def test_stale_graph_error_names_the_sound_checkpoints() -> None:
    error = frozen("it counts in Python: model.t changes", last_good=64, step=256)
    assert error.exit_code == 2  # nobody tries again
    assert "model.t" in str(error)
    assert "capture=False, and resume from a checkpoint of step 64 or before" in str(error)
    assert "model.x" in about_unseen(["model.x (of type a.B)"])


def adam(**options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([nn.Parameter(torch.ones(2))], **{"lr": 0.1} | options)


def test_learning_rate_is_a_tensor_only_during_the_step() -> None:
    optimizer = adam()
    rates = Rates(optimizer, CPU)
    group = optimizer.param_groups[0]
    assert (rates.why_not, group["capturable"]) == ("", True)
    with rates.on_device():
        tensor = group["lr"]
        assert isinstance(tensor, torch.Tensor)
    assert group["lr"] == 0.1
    group["lr"] = 0.05  # a schedule
    assert rates.follow()
    assert tensor.item() == pytest.approx(0.05)
    rates.close()
    assert group["capturable"] is False


def test_changed_optimizer_option_is_noticed_after_eager_step() -> None:
    optimizer = adam()
    rates = Rates(optimizer, CPU)
    assert rates.follow()
    optimizer.param_groups[0]["betas"] = (0.8, 0.9)
    with rates.on_device():
        pass
    assert not rates.follow()
    assert rates.changed == "the optimizer's betas changes from step to step"


def test_param_groups_from_a_loaded_checkpoint_are_followed() -> None:
    optimizer = adam()
    rates = Rates(optimizer, CPU)
    optimizer.load_state_dict(optimizer.state_dict())  # makes new ones
    with rates.on_device():
        assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)


class Own(torch.optim.SGD):
    pass


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        (Own([nn.Parameter(torch.ones(1))], lr=0.1), "Own may keep numbers in Python"),
        (torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), "SGD reads its rate on the host"),
        (adam(lr=torch.tensor(0.1)), "its learning rate is a tensor"),
        (torch.optim.Adam([nn.Parameter(torch.ones(1).double())]), "its parameters have 64 bits"),
    ],
)
def test_uncapturable_optimizers_are_left_unchanged(optimizer: Any, why: str) -> None:
    before = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    rates = Rates(optimizer, CPU)
    assert why in rates.why_not
    with rates.on_device():
        assert {name: optimizer.param_groups[0][name] for name in before} == before


def test_steps_of_equal_shapes_share_a_graph() -> None:
    rows = (torch.zeros(9, 3), torch.zeros(9))

    def step(count: int, weight: float = 1.0) -> list[Microbatch]:
        return [Microbatch(RowBatch(rows, torch.arange(count)), weight, count)]

    assert shape_of(step(4)) == shape_of(step(4))
    assert len({shape_of(step(4)), shape_of(step(3)), shape_of(step(4, 0.5)), shape_of(step(4) * 2)}) == 4
    plain = [Microbatch({"a": torch.zeros(2), "b": (1, "x", None)}, 1.0, 2)]
    assert hash(shape_of(plain)) == hash(shape_of([Microbatch({"a": torch.ones(2), "b": (1, "x", None)}, 1.0, 2)]))
    with pytest.raises(NotCapturable, match="hold a set"):
        shape_of([Microbatch({"a": {1, 2}}, 1.0, 2)])


def replace_data(layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.data.clone()


def replace_buffer(layer: nn.Linear) -> None:
    layer.scale = torch.ones(2)


def write_in_place(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.copy_(torch.zeros(2, 2))
        layer.scale.mul_(2)


@pytest.mark.parametrize(
    ("change", "name"), [(replace_data, "weight"), (replace_buffer, "scale"), (write_in_place, "")]
)
def test_tensor_put_elsewhere_by_a_callback_is_found(change: Callable[[nn.Linear], None], name: str) -> None:
    layer = nn.Linear(2, 2)
    layer.register_buffer("scale", torch.ones(2))
    places = Places(layer)
    change(layer)
    assert places.moved() == name


def test_frozen_parameter_of_the_state_is_a_change() -> None:
    """A graph would go on to step it: what a step is known to change is looked at for this alone."""
    layer = nn.Linear(2, 2)
    own = [*layer.parameters()]
    before = look({"model": layer}, own)
    layer.bias.requires_grad_(False)
    assert changes(before, look({"model": layer}, own)) == ["it changes whether model.bias requires a gradient"]
