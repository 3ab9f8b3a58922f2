"""Around a parameter server: a result may be lost on its way from a worker, and is made again by another."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import clean_environ
from tests.warm_scripts import warm_tensorflow

SCRIPT = """
import tensorflow as tf
from distributed.engines.tensorflow.world.parameter_server import RemoteStepper


class Coordinator:
    # TensorFlow's, as far as it is asked: when `join` returns, every result is there; or it raises.
    def __init__(self, failure=None):
        self.failure, self.has_joined = failure, False

    def join(self):
        if self.failure is not None:
            raise self.failure
        self.has_joined = True


class Result:
    # Its worker died when it was on its way; once all is done, another has made it.
    def __init__(self, coordinator):
        self.coordinator = coordinator

    def fetch(self):
        if not self.coordinator.has_joined:
            raise tf.errors.UnavailableError(None, None, "failed to connect to all addresses")
        return 0.5


def fetched(coordinator):
    stepper = object.__new__(RemoteStepper)
    stepper._coordinator = coordinator
    return stepper._fetch(Result(coordinator))


print("fetched", fetched(Coordinator()))
try:
    fetched(Coordinator(tf.errors.UnavailableError(None, None, "the server is gone")))
except tf.errors.UnavailableError as failed:
    print("failed", failed.message)
"""


def test_lost_result_is_recomputed_and_server_loss_is_raised(
    tmp_path: Path,
) -> None:
    done = warm_tensorflow().run_code(tmp_path, SCRIPT, environ=clean_environ())
    assert "fetched 0.5" in done.stdout, done.stderr
    assert "failed the server is gone" in done.stdout
