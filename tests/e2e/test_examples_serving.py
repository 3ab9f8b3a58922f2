"""examples/06-serving, each script really run; the servers on loopback, in `make soak`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed import Predictions
from distributed.launch.ports import free_port
from tests.conftest import clean_environ, run_warm

FOLDER = Path(__file__).parents[2] / "examples" / "06-serving"
START_S = 240.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With what one short training on two ranks has left."""
    folder = tmp_path_factory.mktemp("serving")
    command = ["-m", "distributed", "train", "--num-gpus", "2", "--script", str(FOLDER / "train.py")]
    printed = run_warm(folder, *command, "--", "--out", "served", "--epochs", "2")
    assert "359 rows" in printed
    assert float(printed.partition("test accuracy ")[2].partition(",")[0]) > 0.7
    run_warm(folder, str(FOLDER / "mlflow_model.py"), "served/digits.pt2", "served/mlflow")
    return folder


def images() -> list[list[float]]:
    from sklearn import datasets

    data = datasets.load_digits().data.astype("float32")
    return ((data[4::5][:3] - 8) / 8).tolist()


def expected(folder: Path) -> torch.Tensor:
    return Predictions(folder / "served/predictions").load()[:3].softmax(1)


def test_program_and_mlflow_model_predict_what_the_run_did(folder: Path) -> None:
    program = torch.export.load(folder / "served/digits.pt2").module()
    assert torch.allclose(program(torch.tensor(images())).softmax(1), expected(folder), atol=1e-5)
    mlflow = pytest.importorskip("mlflow", reason="the mlflow extra is not installed")
    model = mlflow.pyfunc.load_model(str(folder / "served/mlflow"))
    found = model.predict(torch.tensor(images()).numpy())
    assert torch.allclose(torch.as_tensor(found), expected(folder), atol=1e-5)


def ask(url: str, content: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(content).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


@contextmanager
def server(folder: Path, command: list[str], **environ: str) -> Iterator[None]:
    """A server in a group of processes of its own, which end with it."""
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=clean_environ(**environ), stdout=log, stderr=log, start_new_session=True
        )
        try:
            yield
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def await_answer(folder: Path, url: str, content: Any) -> Any:
    deadline = time.monotonic() + START_S
    while True:
        try:
            return ask(url, content)
        except OSError as refused:
            if time.monotonic() > deadline:
                raise AssertionError((folder / "server.log").read_text()[-3000:]) from refused
            time.sleep(0.5)


@pytest.mark.soak
def test_mlflow_server_answers_what_the_run_predicted(folder: Path) -> None:
    port = free_port()
    command = [str(Path(sys.executable).with_name("mlflow")), "models", "serve", "-m", "served/mlflow"]
    command += ["--env-manager", "local", "--host", "127.0.0.1", "--port", str(port)]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with server(folder, command, PATH=path):
        found = await_answer(folder, f"http://127.0.0.1:{port}/invocations", {"inputs": images()})
    assert torch.allclose(torch.tensor(found["predictions"]), expected(folder), atol=1e-5)


@pytest.mark.soak
def test_ray_server_answers_what_the_run_predicted(folder: Path) -> None:
    if find_spec("grpc_reflection") is None:
        pytest.skip("the serve extra is not installed")
    port = free_port()
    command = [sys.executable, str(FOLDER / "ray_serve.py"), "served/digits.pt2", "--port", str(port)]
    sure, digits = expected(folder).max(1)
    with server(folder, command):
        found = [await_answer(folder, f"http://127.0.0.1:{port}/", {"image": image}) for image in images()]
    assert [answer["digit"] for answer in found] == digits.tolist()
    assert [answer["probability"] for answer in found] == pytest.approx(sure.tolist(), abs=1e-5)
