"""CUDA graphs of a world that another thread aborts: none is made or launched after that, and all are destroyed."""

from __future__ import annotations

import threading

import pytest

from distributed.runtime.abort.nccl import Graphs


class Graph:
    """In the place of torch's: a launch may wait for a device that is stuck."""

    def __init__(self, device: threading.Event | None = None) -> None:
        self.launching, self.launched, self.is_destroyed, self._device = threading.Event(), 0, False, device

    def replay(self) -> None:
        assert not self.is_destroyed
        self.launching.set()
        assert self._device is None or self._device.wait(20)
        self.launched += 1

    def reset(self) -> None:
        self.is_destroyed = True


def test_closed_graphs_are_neither_made_nor_launched() -> None:
    graphs, graph = Graphs(), Graph()
    with graphs.making(graph):
        pass
    graphs.launch(graph)
    graphs.close()
    graphs.destroy()
    assert (graph.launched, graph.is_destroyed) == (1, True)
    with pytest.raises(RuntimeError, match="destroyed"):
        graphs.launch(graph)
    with pytest.raises(RuntimeError, match="destroyed"), graphs.making(Graph()):
        raise AssertionError("a capture has begun")


def test_close_waits_for_a_capture_and_destroys_its_graph() -> None:
    graphs, graph, is_closed = Graphs(), Graph(), threading.Event()

    def close() -> None:
        graphs.close()
        is_closed.set()

    with graphs.making(graph):
        aborting = threading.Thread(target=close)
        aborting.start()
        assert not is_closed.wait(0.1)
    assert is_closed.wait(20)
    aborting.join()
    graphs.destroy()
    assert graph.is_destroyed


def test_graph_is_destroyed_after_the_launch_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a device that the abort alone frees, so that the first call does not wait for it for long."""
    monkeypatch.setattr("distributed.runtime.abort.nccl._LAUNCH_S", 0.05)
    freed = threading.Event()
    graphs, graph = Graphs(), Graph(freed)
    with graphs.making(graph):
        pass
    launching = threading.Thread(target=graphs.launch, args=(graph,))
    launching.start()
    assert graph.launching.wait(20)
    graphs.close()
    graphs.destroy()
    assert not graph.is_destroyed
    freed.set()
    launching.join()
    graphs.destroy()
    assert graph.is_destroyed


def test_graph_that_nobody_holds_is_freed() -> None:
    graphs = Graphs()
    with graphs.making(Graph()):
        pass
    assert not graphs._graphs
