"""Around a parameter server: a result may be lost on its way from a worker, and is made again by another."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import run_python

SCRIPT = """
import tensorflow as tf
from distributed.tensorflow.parameter_server import RemoteStepper


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


def told(coordinator):
    stepper = object.__new__(RemoteStepper)
    stepper._coordinator = coordinator
    return stepper._told(Result(coordinator))


print("told", told(Coordinator()))
try:
    told(Coordinator(tf.errors.UnavailableError(None, None, "the server is gone")))
except tf.errors.UnavailableError as failed:
    print("failed", failed.message)
"""


def test_a_result_that_is_lost_on_its_way_is_waited_for_and_what_nobody_can_make_again_is_raised(
    tmp_path: Path,
) -> None:
    said = run_python(tmp_path, "-c", SCRIPT)
    assert "told 0.5" in said
    assert "failed the server is gone" in said
