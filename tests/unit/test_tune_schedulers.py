"""Which trials go on, which parameters come next, and what a killed search is read back as. Nothing runs here."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from distributed.core.errors import ConfigError, TaskError
from distributed.planner.hardware import Gpu, Hardware
from distributed.tune.journal import Heading, Journal, read_journal
from distributed.tune.results.pictures import draw, write_picture
from distributed.tune.results.reading import ReadCheck
from distributed.tune.results.results import Board, best_config, to_csv
from distributed.tune.runner import Exploit, Report, TrialResult, TrialSchedule, TrialSpec, TuneRequest
from distributed.tune.schedulers import Continue, Halving, MedianStopping, Population, Stop, Take, Yield, perturbed
from distributed.tune.search import make_search
from distributed.tune.search_dir import SearchDir
from distributed.tune.space import Choice, Constant, Float, Grid, Int, Space
from distributed.tune.trials.lifecycle import TrialLifecycle
from distributed.tune.trials.placement import decisions, obstacles, place
from distributed.tune.tuner import DistributedTuner

SPACE = Space(
    {"lr": Float(1e-4, 1.0, log=True), "layers": Int(1, 8), "kind": Choice(("a", "b", "c")), "seed": Constant(0)}
)


def report(trial, step, loss, **more):
    return Report(trial, step, {"loss": loss}, float(step), **more)


def request(**more):
    return TuneRequest(**{"train_fn": print, "space": SPACE, "num_samples": 4, "run_dir": "x", "metric": "loss"} | more)


def run_against(scheduler, curves):
    """Trials one after the other, each to the report after which it is stopped: the steps that each of them took."""
    spent = {}
    for trial, curve in curves.items():
        for step, loss in enumerate(curve, 1):
            spent[trial] = step
            if isinstance(scheduler.decide(report(trial, step, loss)), Stop):
                break
    return spent


def test_halving_stops_the_worst_trials_at_each_rung():
    halving = Halving(TrialSchedule("asha", max_steps=9, reduction_factor=3), "loss", "min")
    curves = {"good": [1.0] * 9, "bad": [3.0] * 9, "later": [2.0, 2.0, 0.5, *[0.5] * 6], "best": [0.1] * 9}
    spent = run_against(halving, curves)
    assert spent == {"good": 9, "bad": 1, "later": 1, "best": 9}


def test_halving_with_factor_3_continues_a_third():
    halving = Halving(TrialSchedule("asha", max_steps=9, reduction_factor=3), "loss", "max")
    spent = run_against(halving, {f"t{n}": [float(n)] * 9 for n in random.Random(0).sample(range(27), 27)})
    assert sum(steps == 9 for steps in spent.values()) <= 5
    assert spent["t26"] == 9
    assert sum(spent.values()) < 27 * 9 / 3


def test_halving_respects_grace_steps_and_stops_nan():
    halving = Halving(TrialSchedule("asha", grace_steps=4), "loss", "min")
    spent = run_against(halving, {"a": [1.0] * 6, "b": [2.0] * 6, "c": [math.nan] * 6})
    assert spent == {"a": 6, "b": 4, "c": 4}


def test_median_rule_stops_trials_that_stay_below_the_median():
    rule = MedianStopping(TrialSchedule("median", grace_steps=2), "loss", "min")
    curves = {"a": [1.0] * 5, "b": [2.0] * 5, "c": [3.0] * 5, "bad": [4.0] * 5, "turns": [4.0, 1.5, 1.0, 1.0, 1.0]}
    assert run_against(rule, curves) == {"a": 5, "b": 5, "c": 5, "bad": 2, "turns": 5}


def test_worst_of_population_takes_the_best_with_new_parameters():
    population = Population(TrialSchedule("pbt", perturb_every=2), "loss", "min", SPACE, seed=0)
    params = {"lr": 0.1, "layers": 4, "kind": "b", "seed": 0}
    for trial in ("a", "b", "c", "d"):
        population.began(trial, params | {"lr": 0.01 if trial == "a" else 0.5})
    losses = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}
    assert all(isinstance(population.decide(report(trial, 1, loss)), Continue) for trial, loss in losses.items())
    decisions = {trial: population.decide(report(trial, 2, loss)) for trial, loss in losses.items()}
    assert isinstance(decisions["a"], Yield)
    take = decisions["d"]
    assert isinstance(take, Take)
    assert take.source == "a"
    assert take.params != params | {"lr": 0.01}
    assert take.params["seed"] == 0


def test_population_compares_trials_at_the_same_step():
    population = Population(TrialSchedule("pbt", perturb_every=2), "loss", "min", SPACE, seed=0)
    for trial in ("ahead", "behind"):
        population.began(trial, {"lr": 0.1, "layers": 4, "kind": "b", "seed": 0})
    for step, loss in enumerate((9.0, 8.0, 2.0, 1.0), 1):
        population.decide(report("ahead", step, loss))
    population.decide(report("behind", 1, 8.0))
    assert isinstance(population.decide(report("behind", 2, 7.0)), Yield)  # better than the other one was by then


def test_perturbing_moves_every_parameter_within_its_domain():
    params = {"lr": 0.9, "layers": 1, "kind": "c", "seed": 0}
    for seed in range(50):
        moved = perturbed(params, SPACE, TrialSchedule(resample_probability=0.0), random.Random(seed))
        assert moved["lr"] in (pytest.approx(0.72), 1.0)
        assert moved["layers"] in (1, 2)
        assert moved["kind"] in ("b", "c")
        assert moved["seed"] == 0
    drawn = {
        perturbed(params, SPACE, TrialSchedule(resample_probability=1.0), random.Random(n))["layers"] for n in range(80)
    }
    assert drawn == set(range(1, 9))


def test_random_search_is_seeded_and_cycles_through_grids():
    space = Space({"x": Float(0.0, 1.0), "g": Grid((1, 2))})
    searches = [make_search(request(space=space, seed=seed)) for seed in (0, 0, 1)]
    drawn = [[search.propose(index) for index in range(search.total)] for search in searches]
    assert len(drawn[0]) == 8
    assert [params["g"] for params in drawn[0]] == [1, 2] * 4
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]


def test_grid_search_makes_every_combination():
    space = Space({"a": Choice((1, 2)), "n": Int(1, 3), "seed": Constant(7)})
    search = make_search(request(space=space, search="grid", num_samples=1))
    points = [search.propose(index) for index in range(search.total)]
    assert points == [{"a": a, "n": n, "seed": 7} for a in (1, 2) for n in (1, 2, 3)]


def test_bayesian_search_converges_also_after_a_resume():
    space = Space({"x": Float(0.0, 1.0), "kind": Choice(([1], [2])), "seed": Constant(0)})
    asked = request(space=space, search="bayes", num_samples=60)

    def tried(search, indices):
        for index in indices:
            params = search.propose(index)
            loss = (params["x"] - 0.3) ** 2 + (params["kind"] == [2])
            search.record(index, params, loss)
            yield TrialResult(f"{index:04d}", params, "done", history=(report(f"{index:04d}", 1, loss),))

    first = make_search(asked)
    past = tuple(tried(first, range(30)))
    for search in (first, make_search(replace(asked, past=past))):
        drawn = [trial.params for trial in tried(search, range(30, 50))]
        assert sum(abs(params["x"] - 0.3) for params in drawn) / 20 < 0.2
        assert sum(params["kind"] == [1] for params in drawn) > 12


GPUS = Hardware(gpus=(Gpu("A"),) * 4, cpu_cores=16)
CORES = Hardware(cpu_cores=2)


@pytest.mark.parametrize(
    ("asked", "hardware", "part"),
    [
        ({"num_gpus": 8}, GPUS, "this machine has 4 GPUs"),
        ({"num_gpus": 2, "gpus_per_trial": 4}, GPUS, "gpus_per_trial=4, but num_gpus=2"),
        ({"num_gpus": 2, "gpus_per_trial": 4}, CORES, "gpus_per_trial=4, but num_gpus=2"),
    ],
)
def test_unplaceable_trials_are_refused_with_resources(asked, hardware, part):
    problems = obstacles(request(**asked), hardware)
    assert part in problems[0].what
    assert problems[0].do


@pytest.mark.parametrize(
    ("asked", "hardware", "slots", "told"),
    [
        ({"num_gpus": 32}, CORES, 32, "32 processes share 2 cores [num_gpus, trials_per_gpu]"),
        ({"num_gpus": 2, "trials_per_gpu": 2}, CORES, 4, "4 processes share 2 cores [num_gpus, trials_per_gpu]"),
        ({"gpus_per_trial": 4}, CORES, 1, "4 processes share 2 cores [num_gpus, gpus_per_trial]"),
        ({"num_gpus": 4, "trials_per_gpu": 8}, GPUS, 32, "32 processes share 16 cores [num_gpus, trials_per_gpu]"),
        ({"num_gpus": 2}, CORES, 2, "2 CPU processes: this machine has no CUDA device"),
    ],
)
def test_more_trials_than_cores_run_and_are_reported(asked, hardware, slots, told):
    """As more ranks of a Trainer than cores do; more than there are GPUs are refused, as they are there."""
    assert not obstacles(request(**asked), hardware)
    assert place(request(**asked), hardware).slots == slots
    assert told in str(decisions(request(**asked), hardware)[-1])
    assert decisions(request(), hardware) == []


def test_trials_get_separate_or_shared_devices():
    assert not obstacles(request(num_gpus=4, trials_per_gpu=2), GPUS)
    shared = place(request(num_gpus=4, trials_per_gpu=2), GPUS)
    assert [shared.gpus(slot) for slot in range(shared.slots)] == [[0], [0], [1], [1], [2], [2], [3], [3]]
    wide = place(request(gpus_per_trial=2), GPUS)
    assert [wide.gpus(slot) for slot in range(wide.slots)] == [[0, 1], [2, 3]]
    assert place(request(num_gpus=2), CORES).threads == 1


def train_reading(config):
    if config.get("optimizer") == "sgd":
        return helper(config)
    return {"loss": config["lr"]}


def helper(config):
    return {"loss": config["momentum"]}


def test_parameter_the_code_never_reads_is_refused():
    check = ReadCheck(["lr", "momentum", "optimizer"], train_reading)
    check.read({"lr", "optimizer"})
    check.trial_finished()
    assert check.never_read() == ["momentum"]
    wrong = ReadCheck(["lr", "momentum", "optimiser"], train_reading)
    wrong.read({"lr", "optimizer"})
    with pytest.raises(TaskError) as caught:
        wrong.trial_finished()
    assert "optimiser, which train_reading never reads" in str(caught.value)
    assert "did you mean optimizer?" in str(caught.value)


HEADING = Heading({"x": {"uniform": [0, 1]}}, "loss", "min", "random", "pbt", 0, 4)


def test_journal_is_read_back_despite_a_torn_last_line(tmp_path):
    journal = Journal(str(tmp_path))
    journal.began(HEADING)
    for name in ("0000", "0001"):
        journal.started(TrialSpec(name, {"x": 0.5}, str(tmp_path / name)))
        journal.reported(report(name, 1, 2.0))
        journal.reported(report(name, 2, 1.0, checkpoint="c"))
    journal.exploited(Exploit("0001", 2, "0000", 2, {"x": 0.5}, {"x": 0.6}))
    journal.reported(report("0001", 2, 0.5))  # it went back
    done = TrialResult("0000", {"x": 0.5}, "done", {"loss": 1.0}, (report("0000", 1, 2.0),), 2.0)
    journal.ended(done)
    journal.close()
    with SearchDir(str(tmp_path)).journal.open("a") as file:
        file.write('{"kind":"reported","trial":"0001","st')
    past = read_journal(str(tmp_path))
    assert past.heading == HEADING
    first, second = past.trials
    assert (first.status, first.steps, first.metrics) == ("done", 2, {"loss": 1.0})
    assert (second.status, second.params, len(second.lineage)) == ("running", {"x": 0.6}, 1)
    assert [(r.step, r.metrics["loss"]) for r in second.history] == [(1, 2.0), (2, 0.5)]
    Journal(str(tmp_path)).ended(replace(second, status="failed"))
    assert read_journal(str(tmp_path)).trials[1].status == "failed"


def test_folder_without_a_search_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no search"):
        read_journal(str(tmp_path))


def test_folder_of_another_search_is_refused_unchanged(tmp_path):
    Journal(str(tmp_path)).began(HEADING)
    before = SearchDir(str(tmp_path)).journal.read_bytes()
    asked = {"search_space": HEADING.space, "metric": "loss", "scheduler": "pbt", "run_dir": tmp_path, "num_gpus": 1}
    with pytest.raises(ConfigError, match="holds another search"):
        DistributedTuner(print, **asked).tune()
    with pytest.raises(ConfigError, match="seed was 0 and is 1"):
        DistributedTuner(print, **asked, resume=True, seed=1).tune()
    assert SearchDir(str(tmp_path)).journal.read_bytes() == before


def some_trials():
    trials = []
    for index, (lr, losses) in enumerate([(0.1, [3.0, 1.0, 2.0]), (0.001, [3.0]), (1.0, [])]):
        name = f"{index:04d}"
        history = tuple(report(name, step, loss) for step, loss in enumerate(losses, 1))
        status = ("done", "stopped", "failed")[index]
        last = dict(history[-1].metrics) if history else {}
        trials.append(TrialResult(name, {"lr": lr, "hidden": "<8>"}, status, last, history, 1.0, "boom" * (not losses)))
    return trials


def test_best_trial_is_by_best_report_and_becomes_a_config():
    board = Board("loss", "min", some_trials())
    best = board.best
    assert (best.id, board.value(best)) == ("0000", 1.0)
    text = best_config(board, best, {"epochs": 3})
    assert "epochs: 3\nlearning_rate: 0.1\n" in text
    assert "#   hidden: <8>" in text
    assert Board("loss", "min", some_trials(), by_last=True).value(best) == 2.0


def test_csv_has_all_trials_and_chart_those_that_reported(tmp_path):
    board = Board("loss", "min", some_trials())
    lines = to_csv(board).splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("trial,status,best,steps,seconds,param:lr,param:hidden,metric:loss")
    assert lines[3].endswith(",boom")
    picture = draw(board).decode()
    assert [picture.count(f'id="{kind} of 000') for kind in ("settings", "curve")] == [2, 2]
    assert "&lt;8&gt;" in picture
    assert "no trial" in draw(Board("loss", "min", some_trials()[2:])).decode()
    assert Path(write_picture(board, str(tmp_path))).read_text(encoding="utf-8") == picture


class Heard:
    """A watcher that remembers how trials ended."""

    def __init__(self):
        self.ends = []

    def started(self, trial):
        pass

    def reported(self, report):
        pass

    def read(self, trial, names):
        pass

    def exploited(self, exploit):
        pass

    def ended(self, result):
        self.ends.append(result)

    def refresh(self):
        pass


def tell(lifecycle, trial, kind, **content):
    return lifecycle.hear({"kind": kind, "trial": trial.id, "attempt": trial.starts, **content})


def say(lifecycle, trial, step, loss, folder):
    folder.mkdir(parents=True, exist_ok=True)
    return tell(lifecycle, trial, "report", step=step, metrics={"loss": loss}, checkpoint=str(folder), by="report")


def test_takeover_without_later_training_does_not_count(tmp_path):
    heard = Heard()
    asked = request(run_dir=str(tmp_path), num_samples=2, schedule=TrialSchedule("pbt", perturb_every=1, quantile=0.5))
    lifecycle = TrialLifecycle(asked, heard)
    good, bad = lifecycle.next(), lifecycle.next()
    drawn = dict(bad.params)
    assert say(lifecycle, good, 1, 1.0, tmp_path / "good" / "000001")
    assert not say(lifecycle, bad, 1, 2.0, tmp_path / "bad" / "000001")
    lifecycle.end(bad, "")
    assert heard.ends[-1].status == "pending"
    assert heard.ends[-1].params != drawn
    again = lifecycle.next()
    assert again is bad
    tell(lifecycle, bad, "returned", metrics={"loss": 1.0})
    lifecycle.end(bad, "")
    last = heard.ends[-1]
    assert (last.status, last.params, last.lineage, last.metrics) == ("done", drawn, (), {"loss": 2.0})


def test_population_trials_alternate_unless_about_to_end(tmp_path):
    lifecycle = TrialLifecycle(
        request(run_dir=str(tmp_path), num_samples=2, schedule=TrialSchedule("pbt", perturb_every=1)), Heard()
    )
    first = lifecycle.next()
    assert not say(lifecycle, first, 1, 1.0, tmp_path / "first" / "000001")  # the other one waits
    lifecycle.end(first, "")
    second = lifecycle.next()
    assert second is not first
    told = {"step": 1, "metrics": {"loss": 2.0}, "is_last": True, "by": "trainer"}
    assert tell(lifecycle, second, "report", **told)
