"""A wait ends when nothing comes for too long, and not before."""

from __future__ import annotations

import threading
import time

from distributed.runtime.deadline import Deadline


def test_a_wait_in_which_nothing_comes_is_ended_once() -> None:
    ended = threading.Event()
    deadline = Deadline(0.4, ended.set)
    began = time.monotonic()
    deadline.begin(["a"])
    assert ended.wait(5.0)
    assert time.monotonic() - began >= 0.4
    assert deadline.has_passed


def test_waits_that_end_or_in_which_something_comes_are_left_alone() -> None:
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
