"""What becomes of trials that are interrupted, resumed, restarted or taken over; none of them runs here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from distributed.core.errors import ConfigError
from distributed.core.events import EpochEnded, RunStarted
from distributed.observe.trial import TrialNote, TrialObserver
from distributed.tune.journal import Heading, Journal, read_journal
from distributed.tune.population import take_over
from distributed.tune.runner import Report, TrialResult, TrialSchedule, TrialSpec, TuneRequest
from distributed.tune.schedulers import MedianStopping, Population, Take, Yield
from distributed.tune.search import make_search
from distributed.tune.session import TrialSession
from distributed.tune.space import Float, Space
from distributed.tune.trials.lifecycle import TrialLifecycle
from distributed.tune.trials.line import LineServer
from distributed.tune.trials.placement import Placement
from distributed.tune.trials.processes import TrialProcesses, modules_for
from distributed.tune.trials.records import Trial
from distributed.tune.tuner import DistributedTuner

SPACE = Space({"x": Float(0.0, 1.0)})


class Heard:
    """A watcher that remembers how trials ended."""

    def __init__(self):
        self.ends = []

    def ended(self, result):
        self.ends.append(result)

    def started(self, trial):
        """Others tell of it."""

    reported = exploited = started

    def read(self, trial, names):
        """Others tell of it."""


def request(folder, **more):
    given = {"train_fn": print, "space": SPACE, "num_samples": 2, "run_dir": str(folder), "metric": "loss"}
    return TuneRequest(**given | more)


def report(trial, step, loss=1.0, **more):
    return Report(trial, step, {"loss": loss}, float(step), **more)


def tell(lifecycle, trial, kind, **content):
    return lifecycle.hear({"kind": kind, "trial": trial.id, "attempt": trial.starts, **content})


def epoch(lifecycle, trial, step, loss=1.0, fit=1):
    return tell(lifecycle, trial, "report", step=step, metrics={"loss": loss}, by="trainer", fit=fit)


def write_store(folder: Path, step: int, epoch: int) -> Path:
    """What the Trainer's checkpoint of this many epochs looks like from outside."""
    path = folder / f"step-{step:06d}"
    path.mkdir(parents=True)
    (path / "manifest.json").write_text(json.dumps({"shared": {"skeleton": {"progress": {"epoch": epoch}}}}))
    return path


def past(folder, name, status, steps, **more):
    history = tuple(report(name, step, fit=1) for step in range(1, steps + 1))
    return TrialResult(name, {"x": 0.5}, status, history=history, directory=str(folder / "trials" / name), **more)


def test_trial_sees_only_its_gpus_from_cuda_visible_devices(tmp_path, monkeypatch):
    placement = Placement(2, "cuda", 1, 1, 1)
    for visible, expected in ((None, ["0", "1"]), ("4,7", ["4", "7"])):
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        trial_processes = TrialProcesses(placement, str(tmp_path), "", os.devnull, ())
        assert [trial_processes._devices(slot)["CUDA_VISIBLE_DEVICES"] for slot in (0, 1)] == expected
        trial_processes.close()


def test_dynamo_is_preloaded_only_for_scripts_with_an_optimizer(tmp_path):
    found = {}
    for name, text in (("sgd", "import torch\ntorch.optim.SGD"), ("plain", "import torch\ntorch.ones(1)"), ("no", "1")):
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        modules = modules_for(type("Script", (), {"script": str(path)}))
        found[name] = ("torch" in modules, "torch._dynamo" in modules)
    assert found == {"sgd": (True, True), "plain": (True, False), "no": (False, False)}


def test_median_rule_skips_trials_without_a_value_at_that_step():
    rule = MedianStopping(TrialSchedule("median"), "loss", "min")
    for name in ("a", "b", "c", "d"):
        for step in (1, 2, 3):
            rule.decide(report(name, step))
    rule.went_back("d", 0)
    rule.decide(report("d", 3))  # it knew more of its state than it had told
    assert rule.decide(report("late", 1)) is not None


def test_failed_trainer_trial_resumes_at_its_checkpoint_step(tmp_path):
    lifecycle = TrialLifecycle(
        request(tmp_path, num_samples=1, max_failures=1, schedule=TrialSchedule("median")), Heard()
    )
    trial = lifecycle.next()
    for step in (1, 2, 3):
        epoch(lifecycle, trial, step)
    tell(lifecycle, trial, "saved", step=2, path="c", fit=1)
    lifecycle.end(trial, "gone")
    assert set(lifecycle._scheduler._costs["0000"]) == {1, 2}


def test_resumed_trainer_trial_is_at_its_newest_whole_checkpoint(tmp_path):
    store = tmp_path / "trials" / "0000" / "run" / "checkpoints"
    whole = write_store(store, 8, 2)
    (store / "step-000012").mkdir()
    trial = Trial.of(past(tmp_path, "0000", "running", 3, failures=2), 0)
    assert (trial.saved, trial.saved_step, trial.stands_at, trial.failures) == (str(whole), 2, 2, 2)


def test_resumed_bayesian_search_does_not_repeat_draws(tmp_path):
    asked = request(tmp_path, search="bayes", num_samples=9)
    first = make_search(asked)
    drawn = [first.propose(index) for index in range(3)]
    ended = tuple(TrialResult(f"{n:04d}", params, "done", {"loss": 1.0}) for n, params in enumerate(drawn))
    again = make_search(replace(asked, past=ended))
    assert not [params for params in (again.propose(n) for n in (3, 4, 5)) if params in drawn]


def test_bayesian_search_learns_only_from_finished_trials(tmp_path):
    ended = tuple(
        TrialResult(f"{n:04d}", {"x": n / 10}, status, {"loss": 1.0})
        for n, status in enumerate(("done", "stopped", "failed", "running", "interrupted"))
    )
    search = make_search(request(tmp_path, search="bayes", num_samples=9, past=ended))
    assert [trial.params["x"] for trial in search._study.trials] == [0.0, 0.1]


def test_save_of_the_old_process_after_a_takeover_is_ignored(tmp_path):
    schedule = TrialSchedule("pbt", perturb_every=1, quantile=0.5)
    lifecycle = TrialLifecycle(request(tmp_path, schedule=schedule), Heard())
    good, bad = lifecycle.next(), lifecycle.next()
    source = write_store(Path(good.directory, "run", "checkpoints"), 4, 1)
    epoch(lifecycle, good, 1, 1.0)
    tell(lifecycle, good, "saved", step=1, path=str(source), fit=1)
    assert not epoch(lifecycle, bad, 1, 2.0)
    own = Path(bad.directory, "run-1", "checkpoints", source.name)
    assert bad.saved == str(own)
    assert own.is_dir()
    tell(lifecycle, bad, "saved", step=1, path="of the state before", fit=1)
    assert bad.saved == str(own)


def test_takeover_of_a_missing_checkpoint_changes_nothing(tmp_path, monkeypatch):
    source, trial = (Trial(n, f"{n:04d}", {"x": n}, str(tmp_path / f"{n}")) for n in (0, 1))
    for owner in (source, trial):
        folder = Path(owner.directory, "checkpoints", "000001")
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(owner.id)
        owner.checkpoint, owner.checkpoint_step = str(folder), 1
    source.saved = str(write_store(Path(source.directory, "run", "checkpoints"), 4, 1))
    source.saved_step = 1
    isdir = os.path.isdir
    monkeypatch.setattr("os.path.isdir", lambda path: isdir(path) or path == source.saved)
    for child in Path(source.saved).iterdir():
        child.unlink()
    Path(source.saved).rmdir()  # after it was seen
    assert take_over(trial, source, {"x": 5}, 1) is None
    assert (trial.params, trial.lineage, trial.is_untried) == ({"x": 1}, [], False)
    assert Path(trial.checkpoint, "state.json").read_text() == "0001"
    assert sorted(path.name for path in Path(trial.directory).iterdir()) == ["checkpoints"]


def test_interrupt_keeps_the_decided_status_of_ending_trials(tmp_path):
    heard = Heard()
    lifecycle = TrialLifecycle(request(tmp_path, num_samples=4, schedule=TrialSchedule(max_steps=2)), heard)
    trials = [lifecycle.next() for _ in range(4)]
    for trial in trials:
        epoch(lifecycle, trial, 1)
    epoch(lifecycle, trials[0], 2)
    lifecycle.legs[trials[1].id].requested_status = "stopped"
    tell(lifecycle, trials[2], "returned", metrics={"loss": 1.0})
    lifecycle.interrupt()
    assert [end.status for end in heard.ends] == ["done", "stopped", "done", "interrupted"]


def test_resumed_search_does_not_rerun_trials_at_max_steps(tmp_path):
    heard = Heard()
    known = (past(tmp_path, "0000", "running", 2), past(tmp_path, "0001", "interrupted", 1))
    lifecycle = TrialLifecycle(request(tmp_path, schedule=TrialSchedule(max_steps=2), past=known), heard)
    assert [(end.id, end.status) for end in heard.ends] == [("0000", "done")]
    assert lifecycle.next().id == "0001"
    assert lifecycle.next() is None


def test_population_ranks_only_running_trials():
    population = Population(TrialSchedule("pbt", perturb_every=1), "loss", "min", SPACE, seed=0)
    for name, loss in (("over", 0.0), ("good", 1.0), ("bad", 2.0)):
        population.began(name, {"x": 0.5})
        population.decide(report(name, 1, loss))
    population.ended("over")
    take = population.decide(report("bad", 2, 2.0))
    assert isinstance(take, Take)
    assert take.source == "good"


def test_population_larger_than_its_slots_waits_for_all_trials():
    population = Population(TrialSchedule("pbt", perturb_every=1), "loss", "min", SPACE, seed=0)
    names = ["a", "b", "c", "d"]
    for name in names:
        population.began(name, {"x": 0.5})
    decisions = [population.decide(report(name, 1, loss)) for loss, name in enumerate(names)]
    assert [type(decision) for decision in decisions] == [Yield, Yield, Yield, Take]
    assert isinstance(population.decide(report("b", 2, 0.5)), Yield)


LEAVES = """
import os, signal
from distributed.tune.session import TrialStopped
from distributed.tune.trials.trial import _leaving_on_sigterm

try:
    with _leaving_on_sigterm():
        child = os.fork()
        if not child:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            print("finally", flush=True)
except TrialStopped as stopped:
    print(stopped, flush=True)
os.kill(os.getpid(), signal.SIGTERM)
"""


def test_sigterm_lets_a_trial_clean_up_but_ends_its_forks():
    ended = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True, timeout=60)
    assert ended.stdout.splitlines() == ["-15", "finally", "its process was ended by SIGTERM"], ended.stderr
    assert ended.returncode == -signal.SIGTERM


HEADING = Heading(SPACE.describe(), "loss", "min", "random", "none", 0, 2)


def test_running_search_is_not_resumed_by_another_process(tmp_path):
    running = Journal(str(tmp_path))
    running.began(HEADING)
    tuner = DistributedTuner(
        lambda config: {"loss": config["x"]},
        HEADING.space,
        1,
        metric="loss",
        run_dir=tmp_path,
        resume=True,
        progress=False,
    )
    with pytest.raises(ConfigError, match="another process is running the search in") as caught:
        tuner.tune(1)
    assert str(tmp_path) in str(caught.value)
    running.close()
    Journal(str(tmp_path)).close()


def test_journal_keeps_the_failure_count_of_a_trial(tmp_path):
    journal = Journal(str(tmp_path))
    journal.began(HEADING)
    journal.started(TrialSpec("0000", {"x": 1}, "d"))
    journal.started(TrialSpec("0000", {"x": 1}, "d", attempt=1))
    journal.close()
    assert read_journal(str(tmp_path)).trials[0].failures == 1


def test_restarted_epochs_replace_reports_and_later_fit_adds(tmp_path):
    lifecycle = TrialLifecycle(request(tmp_path, num_samples=1, max_failures=1), Heard())
    trial = lifecycle.next()
    for step in (1, 2, 3):
        epoch(lifecycle, trial, step, float(step))
    epoch(lifecycle, trial, 2, 20.0)  # from the checkpoint after the first
    epoch(lifecycle, trial, 3, 30.0)
    for step in (1, 2, 2):
        epoch(lifecycle, trial, step, 40.0 + step, fit=2)
    tell(lifecycle, trial, "saved", step=2, path="c", fit=2)
    seen = [(entry.step, entry.metrics["loss"], entry.fit) for entry in trial.history]
    assert seen == [(1, 1.0, 1), (2, 20.0, 1), (3, 30.0, 1), (4, 41.0, 2), (5, 42.0, 2)]
    assert trial.saved_step == 5
    lifecycle.end(trial, "gone")
    assert lifecycle.next() is trial
    epoch(lifecycle, trial, 3, 50.0, fit=2)
    assert [entry.step for entry in trial.history] == [1, 2, 3, 4, 5, 6]


def test_reports_of_a_replacement_process_replace_old_steps(tmp_path):
    lifecycle = TrialLifecycle(request(tmp_path, num_samples=1), Heard())
    trial = lifecycle.next()
    for pid, step in ((7, 1), (7, 2), (7, 3), (8, 2), (8, 3)):
        tell(lifecycle, trial, "report", step=step, metrics={"loss": float(pid)}, by="report", pid=pid)
    assert [(entry.step, entry.metrics["loss"]) for entry in trial.history] == [(1, 7.0), (2, 8.0), (3, 8.0)]


class Told:
    """A line that remembers what it was told."""

    def __init__(self):
        self.messages = []

    def tell(self, kind, **content):
        self.messages.append((kind, content))
        return {"go": True}


def test_trial_report_names_the_fit_of_its_epoch():
    line = Told()
    observer = TrialObserver(line)
    begun = {"world_size": 1, "device": "cpu", "backend": "local", "epochs": 2, "steps_per_epoch": 4, "total_steps": 8}
    observer.on(RunStarted(time=0.0, run_dir="trials/0000/run/fit-2", global_batch=1, **begun))
    observer.on(EpochEnded(time=0.0, step=4, epoch=0, seconds=1.0, samples=4, samples_per_second=4.0, metrics={}))
    assert [(kind, told["step"], told["fit"]) for kind, told in line.messages] == [("report", 1, 2)]


def test_restarted_trial_process_finds_the_newest_checkpoint(tmp_path):
    note = TrialNote("0000", {}, str(tmp_path), "")
    first = TrialSession(note, Told())
    assert first.checkpoint() is None
    first.report({"loss": 1}, checkpoint={"step": 1})
    first.report({"loss": 1}, checkpoint={"step": 2})
    second = TrialSession(note, Told())
    assert (second.checkpoint(), second.step) == ({"step": 2}, 2)


def test_bayesian_search_with_population_is_refused():
    with pytest.raises(ConfigError, match="search='bayes' with scheduler='pbt'"):
        DistributedTuner(print, HEADING.space, metric="loss", search="bayes", scheduler="pbt")


def test_trial_socket_works_under_a_long_temporary_folder(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    server = LineServer(lambda message: message)
    assert os.path.exists(server.path)
    server.close()
    assert not list(long.iterdir())
