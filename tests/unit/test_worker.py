"""One rank and its launcher's words, without processes: what it does when its world breaks or is to be left."""

from __future__ import annotations

import contextlib
import itertools
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from distributed.core.env import WorkerEnv
from distributed.core.errors import CannotGoOnError, CheckpointError
from distributed.core.history import History
from distributed.core.mesh import MeshSpec
from distributed.core.plan import BatchPlan, CheckpointPlan, ObservePlan, OptimizerPlan, Plan, SpeedPlan
from distributed.core.protocol.rank_protocol import Broke, Joined, Lost, Message, Resumed
from distributed.core.run_dir import RunDir
from distributed.data.source import Source
from distributed.runtime.rendezvous import line_for, open_session
from distributed.runtime.session import Session
from distributed.runtime.world import CollectiveError
from distributed.train.rank_job import RankJob
from distributed.train.task import Task
from distributed.worker import run_rank

SAMPLES, BATCH, EPOCHS = 14, 2, 2
STEPS = EPOCHS * SAMPLES // BATCH
BROKEN = "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4242"


class Line:
    """The launcher's end: it notes what it is told, and makes the next world at once."""

    def __init__(self, *, regroups: bool = True, replaces: bool = True, worlds: int = 9) -> None:
        self.regroups, self.replaces, self.closes_gates = regroups, replaces, True
        self.told: list[Message] = []
        self.leave_at: Callable[[], bool] = lambda: False
        self.worlds = worlds
        self.env = WorkerEnv(launcher="distributed")
        self.is_over: Callable[[], bool] = lambda: False

    def tell(self, message: Message) -> None:
        if isinstance(message, Joined):
            self.regroups = message.regroups
        self.told.append(message)

    def on_cut_off(self, end: Callable[[], None]) -> None:
        pass

    def cut_off(self) -> None:
        pass

    def on_close(self, attempt: int, close: Callable[[], None]) -> None:
        pass

    def asked_to_leave(self, attempt: int) -> bool:
        return attempt == 0 and self.leave_at()

    def is_cut_off(self, attempt: int) -> bool:
        return attempt == 0 and self.is_over()

    def next_world(self, after_attempt: int) -> WorkerEnv | None:
        if after_attempt + 1 >= self.worlds:
            return None
        self.env = replace(self.env, attempt=after_attempt + 1, restarts=after_attempt + 1)
        return self.env


class Model(nn.Module):
    """Does something in the forward of a step, once."""

    def __init__(self, at_call: int, act: Callable[[], None]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.calls, self.at_call, self.act = 0, at_call, act

    def forward(self, x: torch.Tensor) -> Any:
        if self.training:
            self.calls += 1
            if self.calls == self.at_call:
                self.act()
        return self.layers(x)


@dataclass
class Ended:
    history: History | None
    weights: dict[str, torch.Tensor]
    told: list[Message]
    folder: Path
    calls: int
    error: BaseException | None = None

    @property
    def saved(self) -> list[int]:
        return sorted(int(path.name.partition("-")[2]) for path in (self.folder / "checkpoints").glob("step-*"))


def train(
    folder: Path,
    act: Callable[[], None] = lambda: None,
    *,
    at_call: int = -1,
    line: Line | None = None,
    opened: Callable[[Session], Session] = lambda session: session,
    **plan: Any,
) -> Ended:
    """One rank, to its end; `act` happens in the forward of a step. `opened`: what is made of its first session."""
    checkpoint = {"every": 3, "unit": "steps"} | plan.pop("checkpoint", {})
    made = Plan(
        run_dir=str(folder),
        batch=BatchPlan(BATCH, 1),
        mesh=MeshSpec(),
        device="cpu",
        collectives=plan.pop("collectives", "gloo"),
        seed=3,
        epochs=EPOCHS,
        optimizer=OptimizerPlan("adamw", 0.01),
        checkpoint=CheckpointPlan(f"{folder}/checkpoints", **checkpoint),
        **plan,
    )
    model = Model(at_call, act)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(SAMPLES, 6, generator=generator), torch.arange(SAMPLES) % 3)
    env = WorkerEnv(run_dir=str(folder)) if line is None else replace(line.env, run_dir=str(folder))
    if line is not None:
        line.env = env
    history, error = None, None
    session = opened(open_session(made, env, line))
    try:
        history = run_rank(
            RankJob(made, Task(model, nn.CrossEntropyLoss()), Source(data, shuffle=True), {}),
            session,
            shows_progress=False,
            line=line,
        )
    except Exception as failed:  # noqa: BLE001 - whatever ended the run is looked at
        error = failed
    return Ended(
        history=history,
        weights={name: value.clone() for name, value in model.state_dict().items()},
        told=[] if line is None else line.told,
        folder=folder,
        calls=model.calls,
        error=error,
    )


def raises(error: Exception) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return train(tmp_path_factory.mktemp("whole"))


def same(one: Ended, two: Ended) -> bool:
    return all(torch.equal(value, two.weights[name]) for name, value in one.weights.items())


def test_rank_reports_where_it_starts_and_that_it_is_done(tmp_path: Path, whole: Ended) -> None:
    found = train(tmp_path, line=Line())
    assert found.told == [Resumed(0, 0, "the beginning"), Joined(False, is_done=True)]
    assert found.history is not None
    assert found.history.steps == STEPS
    assert same(found, whole)


@pytest.mark.parametrize("at_call", [1, 5, STEPS // EPOCHS, STEPS])
def test_world_lost_in_a_step_resumes_from_memory_at_that_step(tmp_path: Path, whole: Ended, at_call: int) -> None:
    found = train(tmp_path, raises(RuntimeError(BROKEN)), at_call=at_call, line=Line())
    assert [message for message in found.told if isinstance(message, Lost)] == [Lost(0, BROKEN, holds=True)]
    assert found.told[-2:] == [Resumed(1, at_call - 1, "memory of rank 0"), Joined(False, is_done=True)]
    assert found.calls == STEPS + 1, "only the step that broke is taken again"
    assert same(found, whole)
    assert RunDir(tmp_path).attempt(0).lost(0).exists()


def test_rank_leaves_its_world_at_a_step_when_asked(tmp_path: Path, whole: Ended) -> None:
    line, calls = Line(), []
    line.leave_at = lambda: len(calls) == 1
    found = train(tmp_path, lambda: calls.append(1), at_call=4, line=line)
    assert isinstance(found.told[1], Lost)
    assert found.told[2] == Resumed(1, 4, "memory of rank 0")
    assert found.calls == STEPS, "no step is taken again"
    assert same(found, whole)


def test_error_of_the_program_is_not_a_lost_world(tmp_path: Path) -> None:
    found = train(tmp_path, raises(ValueError("boom")), at_call=5, line=Line())
    assert isinstance(found.error, ValueError)
    assert found.told[-1] == Joined(False), "the script may deal with it, and end well"
    assert not any(isinstance(message, Lost) for message in found.told)


@pytest.mark.parametrize("line", [None, Line(regroups=False)])
def test_rank_that_cannot_regroup_ends_with_its_world(tmp_path: Path, line: Line | None) -> None:
    found = train(tmp_path, raises(RuntimeError(BROKEN)), at_call=5, line=line)
    assert str(found.error) == BROKEN


def test_rank_whose_launcher_died_ends(tmp_path: Path) -> None:
    found = train(tmp_path, raises(RuntimeError(BROKEN)), at_call=5, line=Line(worlds=1))
    assert isinstance(found.error, CollectiveError)
    assert "launcher of this rank is gone" in str(found.error)


# A rank with a step gate, as on NCCL


FUSED = SpeedPlan(fused_optimizer=True)  # whose kernels can leave a step out


@pytest.fixture(scope="module")
def whole_fused(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return train(tmp_path_factory.mktemp("fused"), speed=FUSED)


class Gated:
    """A first world with a gate on the CPU, in which aborts are counted; the worlds after it are of one rank."""

    def __init__(self) -> None:
        self.aborts = 0
        self.looks: list[tuple[int, bool]] = []  # at the launcher's word: (aborts, whether the gate is closed)
        self.line = Line()

    def open(self, session: Session) -> Session:
        self.line.is_over = self._look
        self.session = Session(session.env, session.device, dist.HashStore(), survives_nccl=True)
        self.session.also_cut(self._abort)
        return self.session

    def _abort(self) -> None:
        self.aborts += 1

    def _look(self) -> bool:
        assert self.session.gate is not None
        self.looks.append((self.aborts, self.session.gate.is_closed))
        return len(self.looks) > 3


def test_rank_with_a_gate_aborts_only_when_told_to_leave(tmp_path: Path, whole_fused: Ended) -> None:
    gated = Gated()
    found = train(tmp_path, raises(RuntimeError(BROKEN)), at_call=5, line=gated.line, opened=gated.open, speed=FUSED)
    assert gated.looks == [(0, True)] * 4, "its own gate is closed at once"
    assert gated.aborts
    lost = [message for message in found.told if isinstance(message, Broke | Lost)]
    assert lost == [Broke(0, BROKEN), Lost(0, BROKEN, holds=True)]
    assert found.told[-2:] == [Resumed(1, 4, "memory of rank 0"), Joined(False, is_done=True)]
    assert same(found, whole_fused)


def test_rank_that_is_not_told_to_leave_ends_without_abort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distributed.worker._LEAVE_S", 0.0)
    gated = Gated()
    found = train(tmp_path, raises(RuntimeError(BROKEN)), at_call=5, line=gated.line, opened=gated.open, speed=FUSED)
    assert isinstance(found.error, CannotGoOnError)
    assert gated.aborts == 0
    assert found.told[-2:] == [Broke(0, BROKEN), Joined(False)]


def test_rank_that_leaves_in_order_needs_no_word_to_abort(tmp_path: Path, whole_fused: Ended) -> None:
    gated, calls = Gated(), []
    gated.line.leave_at = lambda: len(calls) == 1
    found = train(tmp_path, lambda: calls.append(1), at_call=4, line=gated.line, opened=gated.open, speed=FUSED)
    assert gated.looks == []
    assert gated.aborts
    assert not any(isinstance(message, Broke) for message in found.told)
    assert found.told[-2] == Resumed(1, 4, "memory of rank 0")
    assert same(found, whole_fused)


def test_optimizer_that_no_gate_holds_ends_with_its_world(tmp_path: Path) -> None:
    gated = Gated()
    broken = raises(RuntimeError(BROKEN))
    found = train(tmp_path, broken, at_call=5, line=gated.line, opened=gated.open, collectives="nccl")
    assert str(found.error) == BROKEN
    assert found.told == [Joined(False, in_run=True), Resumed(0, 0, "the beginning"), Joined(False)]
    assert gated.aborts == 0


def test_rank_alone_in_its_world_needs_no_gate(tmp_path: Path) -> None:
    found = train(tmp_path, raises(RuntimeError(BROKEN)), at_call=5, line=Line(), collectives="nccl")
    assert found.told[-2:] == [Resumed(1, 4, "memory of rank 0"), Joined(False, is_done=True)]


@pytest.mark.parametrize(
    ("nodes", "collectives", "closes_gates", "said"),
    [
        (1, "nccl", True, (True, True)),
        (2, "nccl", True, (False, False)),
        (1, "nccl", False, (False, False)),  # horovodrun
        (2, "gloo", False, (True, False)),
    ],
)
def test_rank_says_whether_it_can_regroup(
    nodes: int, collectives: Any, closes_gates: bool, said: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    env = WorkerEnv(launcher="distributed", world_size=2, num_nodes=nodes)
    for name, value in env.to_environ().items():
        monkeypatch.setenv(name, value)
    line = Line()
    line.closes_gates = closes_gates
    monkeypatch.setattr("distributed.runtime.rendezvous.launcher_line", lambda: line)
    line_for(Plan("", BatchPlan(BATCH, 2), collectives=collectives))
    (joined,) = line.told
    assert isinstance(joined, Joined)
    assert (joined.regroups, joined.has_gate) == said


def test_ranks_that_leave_in_order_wait_for_each_other() -> None:
    store = dist.HashStore()
    one, two = (
        Session(WorkerEnv(rank, world_size=2), torch.device("cpu"), store, survives_nccl=True) for rank in range(2)
    )
    assert not one.all_have_ended(0.1)
    assert two.all_have_ended(10.0)
    assert one.all_have_ended(10.0)


# What the loop decides


def test_signal_ends_the_run_after_its_step_and_saves_it(tmp_path: Path) -> None:
    found = train(tmp_path, lambda: signal.raise_signal(signal.SIGTERM), at_call=4)
    assert found.history is not None
    assert (found.history.steps, found.history.interrupted) == (4, True)
    assert found.history.stop_signal == signal.SIGTERM
    assert found.saved == [3, 4]


@pytest.mark.parametrize(
    ("every", "unit", "steps"),
    [
        (5, "steps", [5, 10, STEPS]),
        (1, "epochs", [STEPS // 2, STEPS]),
        (1e-9, "minutes", [2, 4, 6, 8, 10, 12, STEPS]),
        (1e9, "minutes", [STEPS]),
        (None, "epochs", [STEPS]),
    ],
)
def test_checkpoints_are_saved_when_they_are_due(
    tmp_path: Path, every: float | None, unit: str, steps: list[int]
) -> None:
    found = train(tmp_path, checkpoint={"every": every, "unit": unit}, observe=ObservePlan(log_every=2, progress=False))
    assert found.saved == steps


def test_run_ends_at_max_steps_and_resumes_from_there(tmp_path: Path, whole: Ended) -> None:
    found = train(tmp_path, max_steps=9)
    assert found.calls == 9
    assert found.saved == [3, 6, 9]
    assert found.history is not None
    assert not found.history.interrupted, "it came to the end that was asked for"
    again = train(tmp_path, checkpoint={"resume": True})
    assert again.calls == STEPS - 9
    assert same(again, whole)


def away(folder: Path) -> Callable[[], None]:
    """Nothing can be written to the checkpoints from here on."""

    def act() -> None:
        for attempt in itertools.count():  # a save that is under way makes its folder again
            (folder / "checkpoints").rename(folder / f"moved-{attempt}")
            with contextlib.suppress(IsADirectoryError):
                (folder / "checkpoints").write_text("in the way")
                return

    return act


@pytest.mark.parametrize("asynchronous", [True, False])
def test_unwritable_checkpoint_ends_the_run_only_at_its_end(tmp_path: Path, asynchronous: bool) -> None:
    found = train(tmp_path, away(tmp_path), at_call=5, checkpoint={"asynchronous": asynchronous})
    assert found.calls == STEPS, "the ones before are passed over"
    assert isinstance(found.error, CheckpointError)
