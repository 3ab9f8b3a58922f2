"""MLflow through its client and explicit run ids, so that nothing here disturbs a run that the user has open.

Importing mlflow takes seconds and its calls wait for a server: run it in `Background`. The import waits for RunStarted.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any

from distributed.core.atomic import write_private
from distributed.core.events import Event, RankFailed, RunEnded, RunStarted
from distributed.core.plan import MlflowPlan
from distributed.core.registry import import_extra
from distributed.core.run_dir import RunDir
from distributed.core.secrets import mask_text
from distributed.observe.scalars import ScalarReader, Scalars

DEFAULT_STORE = "mlflow.db"  # in the working directory
PARAMS_A_CALL = 100  # MLflow's limit


class MlflowObserver:
    """Logs a run's settings, metrics and model.

    Beside the settings, `num_gpus` is how many devices there are, and `throughput` the samples a second of the whole
    run. Metrics keep History's names (`loss`, `val_loss` …; see `scalars`). With `plan.run_id` it logs into that run
    and leaves it open; else it makes a run named after the run directory and ends it: FINISHED, KILLED when
    interrupted, FAILED when the training ended without a word. A restart in the same run directory continues its run.
    """

    def __init__(self, plan: MlflowPlan, run_dir: str | os.PathLike[str] = "") -> None:
        self._plan = plan
        self._run_dir = os.fspath(run_dir)
        self._client: Any = None
        self._mlflow: Any = None
        self._run_id = plan.run_id
        self._ended = False
        self._scalars = ScalarReader()

    @property
    def run_id(self) -> str:
        """The MLflow run, once RunStarted was seen."""
        return self._run_id

    def on(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._start(event)
        elif self._client is None:
            return
        elif isinstance(event, RunEnded):
            self._finish(event)
        elif isinstance(event, RankFailed):
            self._end("FAILED", "failed", event.time)
        else:
            found = self._scalars.read(event)
            if found is not None:
                self._log_metrics(*found, time=event.time)

    def close(self) -> None:
        if self._client is not None and not self._ended:
            self._end("FAILED", "failed")

    def _start(self, event: RunStarted) -> None:
        mlflow = import_extra("mlflow", "mlflow", "observer 'mlflow'")
        self._mlflow = mlflow
        uri = self._plan.tracking_uri
        if not uri:  # MLflow's own default is a folder of files where one exists, which it refuses since 3.17
            uri = (
                mlflow.get_tracking_uri()
                if mlflow.is_tracking_uri_set()
                else f"sqlite:///{os.path.abspath(DEFAULT_STORE)}"
            )
        client = mlflow.MlflowClient(tracking_uri=uri)
        if not self._run_id:
            self._run_id = self._continued(client, uri) or self._create(client, event, uri)
        self._client = client
        facts = ("world_size", "device", "backend", "global_batch")
        found = {name: str(getattr(event, name)) for name in facts} | {"num_gpus": str(event.world_size)}
        self._log_params(flatten(event.settings) | found)
        tags = {"distributed.run_dir": event.run_dir, "distributed.status": "running"}
        if event.decisions:
            tags["distributed.decisions"] = "\n".join(event.decisions)
        for name, value in tags.items():
            client.set_tag(self._run_id, name, value)

    def _create(self, client: Any, event: RunStarted, uri: str) -> str:
        name = os.path.basename(os.path.abspath(event.run_dir))
        experiment = find_experiment(client, self._plan.experiment, self._mlflow.MlflowException)
        created = client.create_run(experiment, run_name=name)
        if self._run_dir:
            record = {"run_id": created.info.run_id, "tracking_uri": mask_text(uri)}
            write_private(RunDir(self._run_dir).mlflow, json.dumps(record) + "\n")
        return str(created.info.run_id)

    def _continued(self, client: Any, uri: str) -> str:
        """The run of an earlier attempt in this run directory, running again; "" when there is none."""
        path = RunDir(self._run_dir).mlflow
        if not self._run_dir or not path.exists():
            return ""
        record = json.loads(path.read_text())
        if record["tracking_uri"] != mask_text(uri):
            return ""
        try:
            client.update_run(record["run_id"], status="RUNNING")
        except self._mlflow.MlflowException:  # deleted there since
            return ""
        return str(record["run_id"])

    def _log_params(self, params: Mapping[str, str]) -> None:
        """MLflow's parameters are written once: where the run has another value already, ours becomes a tag."""
        taken = self._client.get_run(self._run_id).data.params
        new = [
            self._mlflow.entities.Param(clean(name), value)
            for name, value in params.items()
            if clean(name) not in taken
        ]
        for first in range(0, len(new), PARAMS_A_CALL):
            self._client.log_batch(self._run_id, params=new[first : first + PARAMS_A_CALL])
        for name, value in params.items():
            if taken.get(clean(name), value) != value:
                self._client.set_tag(self._run_id, f"distributed.{clean(name)}", value)

    def _log_metrics(self, step: int, scalars: Scalars, time: float) -> None:
        stamp = int(time * 1000)
        metrics = [self._mlflow.entities.Metric(clean(name), value, stamp, step) for name, value in scalars.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def _finish(self, event: RunEnded) -> None:
        totals = {"total_seconds": event.seconds, "throughput": event.samples_per_second}
        self._log_metrics(event.step, totals | {f"final_{name}": v for name, v in event.metrics.items()}, event.time)
        if os.path.isdir(event.model_path):
            self._client.log_artifacts(self._run_id, event.model_path, artifact_path="model")
        elif os.path.isfile(event.model_path):
            self._client.log_artifact(self._run_id, event.model_path, artifact_path="model")
        self._end("KILLED" if event.status == "interrupted" else "FINISHED", event.status, event.time)

    def _end(self, status: str, tag: str, time: float | None = None) -> None:
        self._ended = True
        self._client.set_tag(self._run_id, "distributed.status", tag)
        if not self._plan.run_id:
            self._client.set_terminated(self._run_id, status, end_time=None if time is None else int(time * 1000))


def find_experiment(client: Any, name: str, refusal: type[Exception]) -> str:
    """The id of an experiment, which is made when it is missing; another process may be making it at the same time."""
    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return str(client.create_experiment(name))
        except refusal:
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    return str(found.experiment_id)


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """
    >>> flatten({"epochs": 3, "seed": None, "model": {"depth": 2}})
    {'epochs': '3', 'model.depth': '2'}
    """
    flat: dict[str, str] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        elif value is not None:
            flat[f"{prefix}{name}"] = str(value)
    return flat


def clean(name: str) -> str:
    """A name that MLflow takes.

    >>> clean("recall@5")
    'recall_5'
    """
    return re.sub(r"[^\w\-. /]", "_", name)
