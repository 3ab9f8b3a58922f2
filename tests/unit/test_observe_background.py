"""Observers that are slow, stuck or broken cost the run nothing but a warning."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest

from distributed.core.errors import MissingExtraError
from distributed.core.events import Event, RunEnded, Warned, parse_event
from distributed.core.plan import BatchPlan, MlflowPlan, ObservePlan, Plan
from distributed.observe.background import Background
from distributed.observe.event_log import EventLog
from distributed.observe.observers import Observers, check_extras, observers_for
from distributed.observe.utilization import UtilizationSampler

END = RunEnded(time=0, status="done", step=1, seconds=1, samples_per_second=1)


def warned(number: int) -> Warned:
    return Warned(time=float(number), message="")


class Recorder:
    def __init__(self, delay_s: float = 0.0) -> None:
        self.events: list[Event] = []
        self.threads: set[str] = set()
        self.closed = False
        self._delay_s = delay_s

    def on(self, event: Event) -> None:
        time.sleep(self._delay_s)
        self.threads.add(threading.current_thread().name)
        self.events.append(event)

    def close(self) -> None:
        self.closed = True


class Broken(Recorder):
    def on(self, event: Event) -> None:
        super().on(event)
        raise RuntimeError("no route to host")


class Stuck(Recorder):
    def __init__(self) -> None:
        super().__init__()
        self.free = threading.Event()

    def on(self, event: Event) -> None:
        self.free.wait()
        super().on(event)


def test_background_delivers_all_events_in_order() -> None:
    recorder = Recorder(delay_s=0.001)
    background = Background(recorder, size=3)  # smaller than the stream: the queue must push back, not drop
    for number in range(50):
        background.on(warned(number))
    background.on(END)
    background.close()
    background.close()
    assert recorder.events == [*(warned(number) for number in range(50)), END]
    assert recorder.closed
    assert threading.current_thread().name not in recorder.threads


def test_broken_observer_is_reported_once_and_dropped(capfd: pytest.CaptureFixture[str]) -> None:
    broken = Broken()
    background = Background(broken, size=2)
    for number in range(100):
        background.on(warned(number))
    background.on(END)
    background.close()
    assert len(broken.events) == 1
    told = capfd.readouterr().err
    assert told.count("Broken") == 1
    assert "no route to host" in told


def test_stuck_observer_does_not_block_and_losses_are_reported() -> None:
    stuck, told = Stuck(), []
    background = Background(stuck, size=2, queue_timeout_s=0.05, drain_s=0.2, warn=told.append)
    for number in range(50):
        background.on(warned(number))
    background.close()
    assert ["stuck" in message for message in told] == [True, False]
    assert "lost" in told[1]
    stuck.free.set()


def test_recovered_observer_gets_the_last_event() -> None:
    stuck, told = Stuck(), []
    background = Background(stuck, size=2, queue_timeout_s=0.05, drain_s=30, warn=told.append)
    for number in range(10):
        background.on(warned(number))
    threading.Timer(0.2, stuck.free.set).start()
    background.on(END)
    background.close()
    assert stuck.events[-1] == END
    assert len(stuck.events) < 11
    assert f"{11 - len(stuck.events)} lost" in told[-1]


def test_broken_observer_does_not_silence_the_others(capfd: pytest.CaptureFixture[str]) -> None:
    broken, recorder = Broken(), Recorder()
    observers = Observers([broken, recorder])
    observers.on(warned(1))
    observers.on(warned(2))
    observers.close()
    assert recorder.events == [warned(1), warned(2)]
    assert recorder.closed
    assert len(broken.events) == 1
    assert capfd.readouterr().err.count("no route to host") == 1


def make_plan(run_dir: Path, observe: ObservePlan) -> Plan:
    return Plan(run_dir=str(run_dir), batch=BatchPlan(8), observe=observe)


def test_plan_without_dashboards_has_only_the_event_log(tmp_path: Path) -> None:
    observers = observers_for(make_plan(tmp_path, ObservePlan()))
    assert [type(observer) for observer in observers] == [EventLog]
    Observers(observers).on(warned(1))
    assert parse_event((tmp_path / "events.jsonl").read_text()) == warned(1)


def test_plan_with_all_dashboards_imports_mlflow_lazily(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the tensorboard extra is not installed")
    before = "mlflow" in sys.modules
    plan = make_plan(tmp_path, ObservePlan(tensorboard_dir=str(tmp_path / "tb"), mlflow=MlflowPlan()))
    observers = observers_for(plan)
    assert [type(observer).__name__ for observer in observers] == ["EventLog", "TensorBoardObserver", "Background"]
    assert ("mlflow" in sys.modules) == before
    Observers(observers).close()


def test_missing_extras_are_all_named_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(tmp_path, ObservePlan(tensorboard_dir="tb", mlflow=MlflowPlan()))
    (tmp_path / "mlflow").mkdir()  # a folder of that name is not the package
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *(p for p in sys.path if "site-packages" not in p)])
    monkeypatch.setattr(sys, "modules", {n: m for n, m in sys.modules.items() if n not in ("tensorboard", "mlflow")})
    with pytest.raises(MissingExtraError) as caught:
        check_extras(plan)
    assert 'pip install "distributed-training[tensorboard]"' in str(caught.value)
    assert 'pip install "distributed-training[mlflow]"' in str(caught.value)
    check_extras(make_plan(tmp_path, ObservePlan()))


def test_utilization_is_read_once_a_second() -> None:
    now = [0.0]
    sampler = UtilizationSampler("cpu", clock=lambda: now[0])
    assert sampler.percent() is None
    end = time.monotonic() + 0.05
    while time.monotonic() < end:  # keep one core busy
        pass
    now[0] = 0.5
    busy = sampler.percent()
    assert busy is not None
    assert 0 < busy <= 100
    time.sleep(0.05)
    now[0] = 1.4
    assert sampler.percent() == busy


def test_utilization_of_a_missing_device_is_unknown() -> None:
    assert UtilizationSampler("cuda", 4096).percent() is None
