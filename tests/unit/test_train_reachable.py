"""What a model keeps in Python is seen to change wherever it is kept, and what cannot be seen is named."""

from __future__ import annotations

import collections
import contextvars
import ctypes
import dataclasses
import functools
import itertools
import os
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from distributed.train.checks.reachable import OBJECTS, Look, changes, look

CALLS, PARTS = [0], {"one": {"t": 0}}
LOCAL, CONTEXT = threading.local(), contextvars.ContextVar("t", default=0)
LOCAL.t = 0
STEPS = 0


class Warmup:
    def __init__(self) -> None:
        self.t = 0

    def __call__(self) -> float:
        self.t += 1
        return min(1.0, self.t / 1000)


class Slots:
    __slots__ = ("t",)

    def __init__(self) -> None:
        self.t = 0


class Options:
    beta = 0.0


@dataclasses.dataclass
class Place:
    t: int = 0


def numbers() -> Iterator[int]:
    at = 0
    while True:
        at += 1
        yield at


def counting() -> Callable[[], int]:
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls

    return count


def helper() -> None:
    """Reads nothing, but may be given attributes."""


class Model(nn.Module):
    hits = 0

    def __init__(self, act: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer, self.act = nn.Linear(2, 2), act
        self.register_buffer("mean", torch.zeros(2))
        self.count, self.seen, self.by_name = 0, [1, 2], {"n": 1}
        self.state, self.place, self.slots, self.options = torch.zeros(2), Place(), Slots(), Options()
        self.warmup, self.method, self.closed, self.part = Warmup(), Warmup().__call__, counting(), None
        self.part = functools.partial(counting())
        self.number, self.array = np.int64(0), np.zeros(3)
        self.objects = np.array([{"a": 1}], dtype=object)
        self.nested: Any = {"a": {"t": [(0, [0])]}}
        self.numbers, self.left, self.endless = numbers(), iter([1, 2, 3]), itertools.count()
        self.last, self.known = collections.deque([1], maxlen=2), {1}
        self.draws, self.np_draws, self.torch_draws = random.Random(1), np.random.default_rng(1), torch.Generator()
        self.draw = random.Random(2).random

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.act(self)
        helper()
        return self.layer(x)


def count_in_a_global(model: Any) -> None:
    global STEPS
    STEPS += 1


def count_in_the_environment(model: Any) -> None:
    os.environ["CALLS"] = os.environ.get("CALLS", "") + "."


def put_anew(model: Any) -> None:
    model.mean = model.mean * 0.9


def replace_storage(model: Any) -> None:
    model.state.data = model.state.data * 0.9 + 0.1


def add(name: str) -> Callable[[Any], None]:
    """A step that adds 1 to an attribute, by its path."""

    def act(model: Any) -> None:
        *path, last = name.split(".")
        owner = functools.reduce(getattr, path, model)
        setattr(owner, last, getattr(owner, last) + 1)

    return act


def item(container: Any, key: Any) -> None:
    container[key] = container[key] + 1


HERE = __name__
NO_BUFFER = "in place, which is no buffer"
WAYS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a count": (add("count"), "counts in Python: model.count changes"),
    "an object": (lambda model: model.warmup(), "model.warmup.t changes"),
    "slots": (add("slots.t"), "model.slots.t changes"),
    "a dataclass": (add("place.t"), "model.place.t changes"),
    "options": (add("options.beta"), "model.options.beta changes"),
    "a numpy number": (add("number"), "model.number changes"),
    "a numpy array": (lambda model: item(model.array, 0), "model.array changes"),
    "an array of objects": (lambda model: item(model.objects[0], "a"), "model.objects[0]['a'] changes"),
    "a list": (lambda model: model.seen.append(3), "model.seen[2] changes"),
    "a list that shrinks": (lambda model: model.seen.pop(), "model.seen"),
    "a dict": (lambda model: item(model.by_name, "n"), "model.by_name['n'] changes"),
    "nested": (lambda model: item(model.nested["a"]["t"][0][1], 0), "model.nested['a']['t'][0][1][0] changes"),
    "a set": (lambda model: model.known.add(2), "model.known[1] changes"),
    "a deque": (lambda model: model.last.append(5), "model.last[1] changes"),
    "a generator": (lambda model: next(model.numbers), "model.numbers.at changes"),
    "an iterator": (lambda model: next(model.left), "the place of model.left changes"),
    "itertools.count": (lambda model: next(model.endless), "the place of model.endless changes"),
    "a closure": (lambda model: model.closed(), "model.closed.calls changes"),
    "a partial": (lambda model: model.part(), "model.part.calls changes"),
    "a bound method": (lambda model: model.method(), "model.method.__self__.t changes"),
    "a class": (lambda model: setattr(Options, "beta", Options.beta + 1), f"{HERE}.Options.beta changes"),
    "its own class": (lambda model: setattr(Model, "hits", Model.hits + 1), f"{HERE}.Model.hits changes"),
    "a global": (count_in_a_global, f"{HERE}.STEPS changes"),
    "a global list": (lambda model: item(CALLS, 0), f"{HERE}.CALLS[0] changes"),
    "a global dict": (lambda model: item(PARTS["one"], "t"), f"{HERE}.PARTS['one']['t'] changes"),
    "the environment": (count_in_the_environment, "os.environ['CALLS'] changes"),
    "a thread's own": (lambda model: setattr(LOCAL, "t", LOCAL.t + 1), f"{HERE}.LOCAL.t changes"),
    "a context": (lambda model: CONTEXT.set(CONTEXT.get() + 1), f"{HERE}.CONTEXT changes"),
    "a function": (lambda model: setattr(helper, "t", random.random()), f"{HERE}.helper.t changes"),
    "random": (lambda model: model.draws.random(), "draws from the generator model.draws"),
    "a method of random": (lambda model: model.draw(), "draws from the generator model.draw"),
    "numpy's random": (lambda model: model.np_draws.random(), "draws from the generator model.np_draws"),
    "torch's random": (
        lambda model: torch.rand(1, generator=model.torch_draws),
        "draws from the generator model.torch_draws",
    ),
    "a buffer anew": (put_anew, "puts another tensor in the place of model.mean"),
    "a state anew": (
        lambda model: setattr(model, "state", torch.ones(2)),
        "another tensor in the place of model.state",
    ),
    "a state in place": (lambda model: model.state.add_(1), f"model.state {NO_BUFFER}"),
    "past the count of versions": (lambda model: model.state.data.add_(1), f"model.state {NO_BUFFER}"),
    "a storage anew": (replace_storage, "another tensor in the place of model.state"),
    "frozen": (lambda model: model.layer.weight.requires_grad_(False), "whether model.layer.weight requires"),
    "eval": (lambda model: model.layer.eval(), "model.layer.training changes"),
    "a buffer in place": (lambda model: model.mean.mul_(0.9), ""),
    "a weight in place": (lambda model: model.layer.weight.data.mul_(0.9), ""),
    "nothing": (lambda model: None, ""),
    "the same anew": (lambda model: setattr(model, "place", Place(model.place.t)), ""),
}


def seen(model: nn.Module, **more: Any) -> Look:
    return look({"model": model} | more, [*model.parameters(), *model.buffers()])


@pytest.mark.parametrize("way", WAYS)
def test_python_state_changed_between_steps_is_detected(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CALLS", "")
    act, expected = WAYS[way]
    model = Model(act)
    own = [*model.parameters(), *model.buffers()]
    before = look({"model": model}, own)
    model(torch.zeros(1, 2))
    found = changes(before, look({"model": model}, own))
    assert (expected in " ".join(found)) if expected else found == []


def test_counter_in_the_loss_closure_is_detected() -> None:
    steps = 0

    def loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        nonlocal steps
        steps += 1
        return (outputs - target).square().mean() * min(1.0, steps / 1000)

    model = Model(lambda model: None)
    before = seen(model, loss=loss)
    loss(torch.zeros(1), torch.zeros(1))
    assert changes(before, seen(model, loss=loss)) == ["it counts in Python: loss.steps changes"]


def test_opaque_objects_are_named_and_tracked_by_identity() -> None:
    model = Model(lambda model: None)
    model.inner, model.cycle = ctypes.c_int(0), itertools.cycle([1, 2])  # type: ignore[assignment]
    before = seen(model)
    assert [path.partition(" ")[0] for path in before.unseen] == ["model.inner", "model.cycle"]
    assert seen(Model(lambda model: None)).unseen == ()
    model.inner = ctypes.c_int(0)  # type: ignore[assignment]
    assert changes(before, seen(model)) == ["it counts in Python: the object model.inner changes"]


def test_inspection_stops_at_its_object_limit_and_reports_it() -> None:
    model = nn.Linear(2, 2)
    model.table = list(range(2 * OBJECTS))  # type: ignore[assignment]
    found = look({"model": model})
    assert len(found.marks) <= OBJECTS + 10
    assert len(found.unseen) == 1
    assert "model.table[" in found.unseen[0]


def test_inspection_runs_no_user_code() -> None:
    class Touchy(dict):  # type: ignore[type-arg]
        def _refuse(self, *given: Any) -> Any:
            raise AssertionError("the look ran code of the user's")

        __getattr__ = __iter__ = __len__ = items = keys = __eq__ = __repr__ = __hash__ = _refuse  # type: ignore[assignment]

    model = nn.Linear(2, 2)
    model.touchy = Touchy(n=1)  # type: ignore[assignment]
    before = look({"model": model})
    dict.__setitem__(model.touchy, "n", 2)  # type: ignore[arg-type]
    assert changes(before, look({"model": model})) == ["it counts in Python: model.touchy['n'] changes"]
