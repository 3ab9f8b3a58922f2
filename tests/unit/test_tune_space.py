"""What users write as a search space, and what is said of it when it cannot be searched."""

from __future__ import annotations

import random

import numpy
import pytest

from distributed.core.errors import ConfigError
from distributed.tune.session import TrialParams, plain_metrics, returned_metrics
from distributed.tune.space import Choice, Constant, Float, Grid, Int, Normal, Space
from distributed.tune.space_reading import read_space
from distributed.tune.tuner import DistributedTuner

WRITTEN = {
    "lr": {"loguniform": [1e-4, 1e-2]},
    "dropout": {"uniform": {"low": 0, "high": 0.5}},
    "layers": {"int": [1, 4]},
    "batch_size": {"choice": [32, 64]},
    "width": {"grid": [64, 128]},
    "decay": {"quniform": [0, 1, 0.25]},
    "units": {"logint": [8, 1024]},
    "noise": {"normal": [0, 0.1]},
    "seed": 3,
    "shape": {"constant": [2, 2]},
}
READ = {
    "lr": Float(1e-4, 1e-2, log=True),
    "dropout": Float(0.0, 0.5),
    "layers": Int(1, 4),
    "batch_size": Choice((32, 64)),
    "width": Grid((64, 128)),
    "decay": Float(0.0, 1.0, step=0.25),
    "units": Int(8, 1024, log=True),
    "noise": Normal(0.0, 0.1),
    "seed": Constant(3),
    "shape": Constant([2, 2]),
}


def space_of(given):
    space, problems = read_space(given)
    assert not problems, problems
    return space


def test_search_space_of_python_values_is_read():
    assert space_of(WRITTEN).domains == READ


def test_search_space_in_yaml_reads_1e_4_as_a_number(tmp_path):
    path = tmp_path / "space.yaml"
    path.write_text("lr: {loguniform: [1e-4, 1e-2]}\nbatch_size: {choice: [32, 64]}\nseed: 3\n")
    assert space_of(path).domains == {name: READ[name] for name in ("lr", "batch_size", "seed")}


def test_search_space_description_reads_back_equal():
    space = space_of(WRITTEN)
    assert space_of(space.describe()) == space


def test_ray_tune_domains_are_understood():
    from ray import tune

    space = space_of(
        {
            "lr": tune.loguniform(1e-4, 1e-2),
            "x": tune.uniform(0, 1),
            "q": tune.quniform(0, 1, 0.25),
            "n": tune.randint(1, 5),
            "c": tune.choice([1, 2]),
            "g": tune.grid_search([1, 2]),
            "z": tune.randn(1, 2),
        }
    )
    assert space.domains == {
        "lr": Float(1e-4, 1e-2, log=True),
        "x": Float(0.0, 1.0),
        "q": Float(0.0, 1.0, step=0.25),
        "n": Int(1, 4),  # Ray leaves the upper bound out
        "c": Choice((1, 2)),
        "g": Grid((1, 2)),
        "z": Normal(1.0, 2.0),
    }


def test_optuna_distributions_are_understood():
    from optuna import distributions

    space = space_of(
        {
            "lr": distributions.FloatDistribution(1e-4, 1e-2, log=True),
            "n": distributions.IntDistribution(2, 8, step=2),
            "c": distributions.CategoricalDistribution(("a", "b")),
        }
    )
    assert space.domains == {"lr": Float(1e-4, 1e-2, log=True), "n": Int(2, 8, step=2), "c": Choice(("a", "b"))}


def test_all_problems_of_a_space_are_reported_with_their_line(tmp_path):
    path = tmp_path / "space.yaml"
    path.write_text(
        "empty: {choice: []}\n"
        "turned: {uniform: [2, 1]}\n"
        "point: {int: [3, 3]}\n"
        "negative: {loguniform: [0, 1]}\n"
        "odd: {unifrom: [0, 1]}\n"
        "listed: [1, 2]\n"
        "half: {int: [1, 2.5]}\n"
        "many: {uniform: [1, 2, 3]}\n"
        "both: {uniform: [0, 1], int: [1, 2]}\n"
    )
    _, problems = read_space(path)
    told = [problem.what for problem in problems]
    assert [text.partition(": ")[0] for text in told] == [f"space.yaml:{line}" for line in range(1, 10)]
    for text, word in zip(
        told,
        ("no values", "inverted", "empty", "begins at 0", "unifrom", "list", "not whole", "[1, 2, 3]", "2 kinds"),
        strict=True,
    ):
        assert word in text
    assert "uniform" in problems[4].do


def test_unserialisable_search_values_are_refused():
    _, problems = read_space({"optimizer": {"choice": [object, print]}})
    assert "type" in problems[0].what


def test_search_space_without_anything_to_search_is_refused():
    assert "nothing to search" in read_space({"seed": 1})[1][0].what
    assert "empty" in read_space({})[1][0].what


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_draws_lie_in_their_domain_and_cover_it(name):
    domain = READ[name]
    drawn = [domain.draw(random.Random(seed)) for seed in range(300)]
    if isinstance(domain, Choice | Grid):
        assert set(drawn) == set(domain.values)
    elif isinstance(domain, Int):
        assert {min(drawn), max(drawn)} <= set(range(domain.low, domain.high + 1))
        assert all(isinstance(value, int) for value in drawn)
        assert min(drawn) <= 2 * domain.low
        assert max(drawn) >= domain.high // 2
    elif isinstance(domain, Float):
        assert all(domain.low <= value <= domain.high for value in drawn)
        if domain.log:  # half of them below the geometric mean
            below = sum(value < (domain.low * domain.high) ** 0.5 for value in drawn)
            assert 120 < below < 180
        if domain.step:
            assert {value % domain.step for value in drawn} == {0.0}
    elif isinstance(domain, Normal):
        assert abs(sum(drawn) / len(drawn)) < 0.03
    else:
        assert drawn[0] == domain.value


def test_grid_points_are_every_combination_of_grids():
    space = Space({"a": Grid((1, 2)), "b": Choice((7,)), "c": Grid(("x", "y"))})
    assert space.grid_points() == [{"a": a, "c": c} for a in (1, 2) for c in ("x", "y")]


def test_trial_params_report_the_names_read():
    told: list[set[str]] = []
    params = TrialParams({"lr": 0.1, "layers": 2, "seed": 0}, told.append)
    assert params["lr"] == 0.1
    assert params["lr"] == 0.1
    assert params.get("width", 5) == 5
    assert told == [{"lr"}, {"width"}]
    assert dict(params) == {"lr": 0.1, "layers": 2, "seed": 0}
    assert set().union(*told) == {"lr", "layers", "seed", "width"}


def test_iterating_trial_params_in_any_way_reads_all():
    def names(use):
        told: set[str] = set()
        use(TrialParams({"a": 1, "b": 2}, told.update))
        return told

    ways = (dict, list, lambda p: {**p}, lambda p: dict(**p), lambda p: p.items(), lambda p: p.copy(), lambda p: p | {})
    for use in ways:
        assert names(use) == {"a", "b"}
    assert names(lambda p: len(p)) == set()


def test_unknown_trial_parameter_error_suggests_the_nearest():
    with pytest.raises(KeyError, match="did you mean lr"):
        TrialParams({"lr": 1})["lrr"]


def test_metrics_of_a_trial_are_converted_to_numbers():
    assert plain_metrics({"a": numpy.float32(0.5), "b": True}) == {"a": 0.5, "b": 1.0}
    assert returned_metrics({"a": 1, "model": object(), "name": "x"}) == {"a": 1.0}
    assert returned_metrics(None) == {}
    assert returned_metrics(0.25) == {"value": 0.25}


def test_all_wrong_tuner_options_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        DistributedTuner(
            print,
            {"x": {"uniform": [1, 0]}},
            num_gpus=0,
            trials_per_gpu=0.5,
            scheduler="ahsa",
            search="bayes",
            engine="rya",
            quantile=0.7,
            resume=True,
        )
    text = str(caught.value)
    for part in (
        "inverted",
        "num_gpus=0",
        "trials_per_gpu=0.5",
        "asha",
        "ray",
        "quantile",
        "without a metric",
        "run_dir",
    ):
        assert part in text


def test_metric_mode_follows_its_name_or_must_be_given():
    with pytest.raises(ConfigError, match="mode='min'"):
        DistributedTuner(print, {"x": {"choice": [1]}}, metric="perplexity")
    tuner = DistributedTuner(print, {"x": {"choice": [1]}}, metric="max:reward")
    assert (tuner.board.metric, tuner.board.mode) == ("reward", "max")


def test_grid_search_refuses_ranges():
    with pytest.raises(ConfigError, match="grid"):
        DistributedTuner(print, {"x": {"uniform": [0, 1]}}, search="grid")
