"""A wait ends when nothing comes for too long, and not before."""

from __future__ import annotations

import threading
import time

from distributed.engines.horovod.deadline import Deadline


def test_deadline_fires_when_nothing_arrives() -> None:
    ended = threading.Event()
    deadline = Deadline(0.4, ended.set)
    began = time.monotonic()
    deadline.begin(["a"])
    assert ended.wait(5.0)
    assert time.monotonic() - began >= 0.4
    assert deadline.has_passed


def test_deadline_does_not_fire_while_something_arrives() -> None:
    ended = threading.Event()
    deadline, missing = Deadline(0.4, ended.set), list(range(20))
    deadline.begin(missing)
    while missing:
        time.sleep(0.04)
        missing.pop()
    deadline.end()
    for _ in range(5):  # of which each is short enough
        deadline.begin(["a"])
        time.sleep(0.15)
        deadline.end()
    assert not ended.wait(0.8)  # nobody waits
    deadline.begin(["a"])
    deadline.close()
    assert not ended.wait(0.8)
    assert not deadline.has_passed
