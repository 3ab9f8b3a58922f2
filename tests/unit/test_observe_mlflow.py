"""MLflow on a real sqlite store: a run of our own, one that the user has open, restarts and ends of every kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distributed.core.events import EpochEnded, EvaluationEnded, Event, RunEnded, RunStarted, StepEnded
from distributed.core.plan import MlflowPlan
from distributed.observe.mlflow import MlflowObserver, find_experiment


@pytest.fixture(scope="module", autouse=True)
def mlflow() -> Any:
    """Not at the top: there every worker would import it, and one has these tests."""
    return pytest.importorskip("mlflow", reason="the mlflow extra is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One store for all tests, each with its own experiment: making the tables takes seconds."""
    return tmp_path_factory.mktemp("store")


@pytest.fixture
def uri(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(folder)  # MLflow puts artifacts into ./mlruns
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return f"sqlite:///{folder / 'mlflow.db'}"


def started(run_dir: str = "runs/one", **settings: Any) -> RunStarted:
    return RunStarted(
        time=1.0,
        run_dir=run_dir,
        world_size=2,
        device="cpu",
        backend="pytorch-ddp",
        epochs=1,
        steps_per_epoch=10,
        total_steps=10,
        global_batch=64,
        settings={"epochs": 1, "momentum": None, "device": "auto"} | settings,
        decisions=["gloo: no GPU here [communication_backend]"],
    )


def stepped(step: int, loss: float = 0.5) -> StepEnded:
    metrics = {"recall@5": 0.25}
    return StepEnded(
        time=10.0, step=step, epoch=0, loss=loss, learning_rate=0.1, samples_per_second=100, metrics=metrics
    )


def rest(model_path: str = "", status: str = "done") -> list[Event]:
    return [
        EvaluationEnded(time=30, step=10, epoch=0, seconds=1, metrics={"val_accuracy": 0.875}),
        EpochEnded(
            time=31,
            epoch=0,
            step=10,
            seconds=4,
            samples=640,
            samples_per_second=160,
            metrics={"loss": 0.6, "val_accuracy": 1},
        ),
        RunEnded(time=40.0, status=status, step=10, seconds=9, samples_per_second=70, model_path=model_path),
    ]


def feed(observer: MlflowObserver, events: list[Event]) -> None:
    for event in events:
        observer.on(event)
    observer.close()


def test_mlflow_run_has_params_metrics_and_model(mlflow: Any, uri: str, tmp_path: Path) -> None:
    checkpoint = tmp_path / "step-10"
    checkpoint.mkdir()
    (checkpoint / "weights").write_bytes(b"1234")
    observer = MlflowObserver(MlflowPlan("own", uri))
    feed(observer, [started(), stepped(5), stepped(10, loss=0.25), *rest(str(checkpoint))])

    client = mlflow.MlflowClient(uri)
    experiment = client.get_experiment_by_name("own")
    [run] = client.search_runs([experiment.experiment_id])
    assert run.info.run_id == observer.run_id
    assert (run.info.status, run.info.run_name) == ("FINISHED", "one")
    assert run.data.params == {
        "epochs": "1",
        "device": "cpu",
        "backend": "pytorch-ddp",
        "world_size": "2",
        "num_gpus": "2",
        "global_batch": "64",
    }
    assert [(m.step, m.value) for m in client.get_metric_history(observer.run_id, "loss")] == [(5, 0.5), (10, 0.25)]
    assert [m.value for m in client.get_metric_history(observer.run_id, "val_accuracy")] == [0.875]
    assert run.data.metrics["epoch_loss"] == 0.6
    assert run.data.metrics["throughput"] == 70
    assert run.data.metrics["recall_5"] == 0.25
    assert run.data.tags["distributed.status"] == "done"
    assert [file.path for file in client.list_artifacts(observer.run_id, "model")] == ["model/weights"]


def test_mlflow_run_opened_by_the_user_stays_open(mlflow: Any, uri: str, tmp_path: Path) -> None:
    model = tmp_path / "model.pt"
    model.write_bytes(b"1234")
    mlflow.set_tracking_uri(uri)
    mlflow.set_experiment("open")
    try:
        with mlflow.start_run() as open_run:
            mlflow.log_param("epochs", 99)  # the user's word stands
            run_id = open_run.info.run_id
            feed(MlflowObserver(MlflowPlan("ignored", uri, run_id)), [started(), stepped(5), *rest(str(model))])
            feed(MlflowObserver(MlflowPlan("ignored", uri, run_id)), [started(seed=3), stepped(6)])  # fit once more
            assert mlflow.active_run().info.run_id == run_id
            run = mlflow.MlflowClient(uri).get_run(run_id)
            assert run.info.status == "RUNNING"
    finally:
        mlflow.set_tracking_uri(None)
    client = mlflow.MlflowClient(uri)
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["epochs"] == "99"
    assert run.data.tags["distributed.epochs"] == "1"
    assert run.data.params["seed"] == "3"
    assert [m.step for m in client.get_metric_history(run_id, "loss")] == [5, 6]
    assert [file.path for file in client.list_artifacts(run_id, "model")] == ["model/model.pt"]
    assert client.get_experiment_by_name("ignored") is None


@pytest.mark.parametrize(
    ("events", "status"), [(rest(status="interrupted"), "KILLED"), ([], "FAILED")], ids=["interrupted", "no word"]
)
def test_mlflow_run_status_follows_the_end_of_the_run(mlflow: Any, uri: str, events: list[Event], status: str) -> None:
    observer = MlflowObserver(MlflowPlan("ends", uri))
    feed(observer, [started(), stepped(5), *events])
    assert mlflow.MlflowClient(uri).get_run(observer.run_id).info.status == status


def test_restart_continues_its_mlflow_run(mlflow: Any, uri: str, tmp_path: Path) -> None:
    plan = MlflowPlan("restarts", uri)
    killed = MlflowObserver(plan, tmp_path)
    killed.on(started())
    killed.on(stepped(5))
    again = MlflowObserver(plan, tmp_path)
    feed(again, [started(), stepped(6), *rest()])
    client = mlflow.MlflowClient(uri)
    [run] = client.search_runs([client.get_experiment_by_name("restarts").experiment_id])
    assert run.info.run_id == killed.run_id == again.run_id
    assert run.info.status == "FINISHED"
    assert [m.step for m in client.get_metric_history(run.info.run_id, "loss")] == [5, 6]

    client.delete_run(run.info.run_id)
    after = MlflowObserver(plan, tmp_path)
    feed(after, [started(), *rest()])
    assert client.get_run(after.run_id).info.status == "FINISHED"
    assert after.run_id != run.info.run_id


def test_tracking_uri_defaults_to_environment_then_local_file(
    mlflow: Any, uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    named = MlflowObserver(MlflowPlan("by-environment"))
    feed(named, [started()])
    assert mlflow.MlflowClient(uri).get_run(named.run_id).info.experiment_id

    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mlruns" / "0").mkdir(parents=True)  # an old folder of files, which MLflow would take and then refuse
    (tmp_path / "mlruns" / "0" / "meta.yaml").write_text("experiment_id: '0'\n")
    feed(MlflowObserver(MlflowPlan("here")), [started()])
    assert (tmp_path / "mlflow.db").exists()


def test_concurrent_experiment_creation_agrees_on_one(mlflow: Any, uri: str) -> None:
    class Late:
        """A client that hears of the experiment only after it failed to make it, as in a race."""

        def __init__(self, client: Any) -> None:
            self.client = client
            self.asked = 0

        def get_experiment_by_name(self, name: str) -> Any:
            self.asked += 1
            return self.client.get_experiment_by_name(name) if self.asked > 1 else None

        def create_experiment(self, name: str) -> str:
            return str(self.client.create_experiment(name))

    client = mlflow.MlflowClient(uri)
    first = find_experiment(client, "race", mlflow.MlflowException)
    assert find_experiment(Late(client), "race", mlflow.MlflowException) == first
