"""Board: all trials of a search, and which is the best; the table, the CSV and the config that come of them."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import yaml

from distributed.core.config import DistributedConfig
from distributed.core.errors import ConfigError, TaskError
from distributed.core.registry import nearest_hint
from distributed.core.secrets import mask
from distributed.core.values import parse_best
from distributed.tune.runner import Exploit, Mode, Report, TrialResult, TrialSpec
from distributed.tune.search_dir import SearchDir

_USUAL = ("val_loss", "val_accuracy", "accuracy", "loss")  # looked for in this order where no metric is named
ALIASES = {"lr": "learning_rate"}


class Board:
    """The trials by id, as far as they are known."""

    def __init__(self, metric: str, mode: Mode | None, past: Sequence[TrialResult] = (), *, by_last: bool = False):
        self.metric = metric
        self._mode = mode
        self._by_last = by_last  # a population's parameters change: only the last value is that of the last ones
        self._trials = {trial.id: trial for trial in past}

    @property
    def trials(self) -> list[TrialResult]:
        return [self._trials[name] for name in sorted(self._trials)]

    def started(self, spec: TrialSpec) -> None:
        known = self._trials.get(spec.id) or TrialResult(spec.id, spec.params, "running", directory=spec.directory)
        self._trials[spec.id] = replace(known, params=spec.params, status="running")

    def reported(self, report: Report) -> None:
        known = self._trials[report.trial]
        history = (*(old for old in known.history if old.step < report.step), report)
        self._trials[report.trial] = replace(known, history=history, metrics=report.metrics, seconds=report.seconds)

    def exploited(self, exploit: Exploit) -> None:
        known = self._trials[exploit.trial]
        self._trials[known.id] = replace(known, params=exploit.params, lineage=(*known.lineage, exploit))

    def ended(self, result: TrialResult) -> None:
        self._trials[result.id] = result

    def settle_metric(self) -> None:
        """Without a metric: the first of the usual ones that was reported."""
        if not self.metric:
            names = {name for trial in self._trials.values() for name in trial.metrics}
            found = next((name for name in _USUAL if name in names), next(iter(names), "") if len(names) == 1 else "")
            if names and not found:
                raise ConfigError(
                    "no metric is named, and none of the usual ones was reported",
                    why=f"the trials reported {', '.join(sorted(names))}",
                    do=f"DistributedTuner(…, metric={min(names)!r}, mode='min'); resume=True keeps what was done",
                )
            self.metric = found
        if self.metric and self._mode is None:
            self._mode = parse_mode(self.metric)

    @property
    def mode(self) -> Mode:
        return self._mode or "min"

    def value(self, trial: TrialResult) -> float | None:
        """How good a trial was: the best that it reported, or the last of a population."""
        values = [report.metrics[self.metric] for report in trial.history if self.metric in report.metrics]
        if trial.status == "done" and self.metric in trial.metrics:
            values.append(trial.metrics[self.metric])  # also what was returned at the end
        values = [value for value in values if not math.isnan(value)]
        if not values:
            return None
        return values[-1] if self._by_last else (min(values) if self.mode == "min" else max(values))

    @property
    def best(self) -> TrialResult | None:
        valued = [(self.value(trial), trial) for trial in self.trials if trial.status != "failed"]
        scored = [(value if self.mode == "min" else -value, trial) for value, trial in valued if value is not None]
        return min(scored, key=lambda pair: (pair[0], pair[1].id))[1] if scored else None

    def require_best(self) -> TrialResult:
        best = self.best
        if best is not None:
            return best
        failed = [trial for trial in self.trials if trial.status == "failed"]
        if failed:
            first = failed[0]
            raise TaskError(
                f"all {len(failed)} trials failed" if len(failed) > 1 else "the only trial failed",
                why=f"trial {first.id}: {first.error}",
                do=f"see {first.directory}/log.txt",
            )
        names = sorted({name for trial in self.trials for name in trial.metrics})
        raise TaskError(
            f"no trial reported {self.metric!r}" if self.metric else "no trial reported a metric",
            why=f"reported were {', '.join(names)}" if names else "nothing was reported",
            do=nearest_hint(self.metric, names) if names else "tune.report({'loss': …}), or return it from train_fn",
        )


def parse_mode(metric: str) -> Mode:
    """
    >>> parse_mode("val_loss"), parse_mode("accuracy")
    ('min', 'max')
    """
    try:
        direction, _ = parse_best(metric)
    except ValueError:
        raise ConfigError(f"the metric {metric!r} does not say which is best", do="mode='min' or mode='max'") from None
    return "min" if direction == "min" else "max"


def short(value: Any) -> str:
    """A value for a table.

    >>> short(0.00123456), short(64), short("adam"), short(0.5), short(True)
    ('0.001235', '64', 'adam', '0.5', 'true')
    """
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)


def varied(trials: Sequence[TrialResult]) -> list[str]:
    """The parameters that differ between trials, in the order of the space."""
    names = list(dict.fromkeys(name for trial in trials for name in trial.params))
    return [n for n in names if len({json.dumps(trial.params.get(n)) for trial in trials}) > 1] or names


def to_csv(board: Board) -> str:
    """A line a trial: id, status, value, steps, seconds, its parameters and its last metrics."""
    trials = board.trials
    params = list(dict.fromkeys(name for trial in trials for name in trial.params))
    metrics = list(dict.fromkeys(name for trial in trials for name in trial.metrics))
    text = io.StringIO()
    writer = csv.writer(text)
    named = [f"param:{name}" for name in params] + [f"metric:{name}" for name in metrics]
    writer.writerow(["trial", "status", "best", "steps", "seconds", *named, "taken_from", "error"])
    for trial in trials:
        value = board.value(trial)
        writer.writerow(
            [
                trial.id,
                trial.status,
                "" if value is None else repr(value),
                trial.steps,
                f"{trial.seconds:.3f}",
                *(_cell(trial.params.get(name)) for name in params),
                *(_cell(trial.metrics.get(name)) for name in metrics),
                " ".join(f"{take.source}@{take.source_step}" for take in trial.lineage),
                trial.error,
            ]
        )
    return text.getvalue()


def _cell(value: Any) -> Any:
    return "" if value is None else json.dumps(value) if isinstance(value, list | dict | bool) else value


def split_settings(params: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those parameters that are settings of a run, and the rest. `lr` is the learning rate.

    >>> split_settings({"lr": 0.1, "batch_size": 32, "hidden": 64})
    ({'learning_rate': 0.1, 'batch_size': 32}, {'hidden': 64})
    """
    settings: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, value in params.items():
        setting = ALIASES.get(name, name)
        if setting in DistributedConfig.model_fields:
            settings[setting] = value
        else:
            others[name] = value
    return settings, others


def best_config(board: Board, best: TrialResult, given: Mapping[str, Any] | None = None) -> str:
    """YAML for `distributed train --config`: the best trial's settings; parameters of the model as a comment."""
    settings, others = split_settings(best.params)
    value = board.value(best)
    lines = [f"# trial {best.id}: {board.metric} = {value!r} after {best.steps} steps"]
    if others:
        lines.append("# parameters that are no settings; the script reads them from params.yaml, or by itself:")
        lines += [f"#   {line}" for line in yaml.safe_dump(others, sort_keys=False).splitlines()]
    return "\n".join(lines) + "\n" + (_yaml(mask({**(given or {}), **settings})) if settings or given else "{}\n")


def _yaml(values: Mapping[str, Any]) -> str:
    return str(yaml.safe_dump(dict(values), sort_keys=False))


def write_results(board: Board, run_dir: str, given: Mapping[str, Any] | None = None) -> None:
    """results.csv, and best.yaml with params.yaml beside it."""
    folder = SearchDir(run_dir)
    folder.table.write_text(to_csv(board), encoding="utf-8")
    best = board.best
    if best is not None:
        folder.best_config.write_text(best_config(board, best, given), encoding="utf-8")
        folder.best_params.write_text(_yaml(best.params), encoding="utf-8")
