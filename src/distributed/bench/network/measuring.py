"""What two nodes measure on their lines: round trips of small messages, and how many bytes arrive in a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median, quantiles

from distributed.bench.network.lines import MeasuredLine
from distributed.core.errors import LaunchError
from distributed.core.protocol.store_wire import StoreLostError, receive

_CHUNK = 256 * 2**10
_MESSAGE = b"\0" * 64
_MOST_TRIPS, _FEWEST_TRIPS = 5000, 20
_WARM_UP_TRIPS = 10
_BIN_S = 0.1
_SILENT_S = 20.0  # of a line that carries nothing: the other node is gone


@dataclass(frozen=True)
class RoundTrips:
    """Of small messages, one at a time on an idle line."""

    median_us: float
    p99_us: float
    low_us: float
    jitter_us: float  # from one trip to the next, on average
    trips: int


@dataclass(frozen=True)
class Arrived:
    """What one side received on all its lines together."""

    gbit_s: float
    low_gbit_s: float  # of the tenths of a second
    high_gbit_s: float


def summarize_trips(seconds: Sequence[float]) -> RoundTrips:
    """
    >>> summarize_trips([3e-6, 1e-6, 2e-6]).jitter_us
    1.5
    """
    micros = [each * 1e6 for each in seconds]
    changes = [abs(after - before) for before, after in pairwise(micros)]
    return RoundTrips(
        round(median(micros), 2),
        p99_us=round(quantiles(micros, n=100, method="inclusive")[98], 2),
        low_us=round(min(micros), 2),
        jitter_us=round(fmean(changes), 2),
        trips=len(micros),
    )


def ask_and_time(line: MeasuredLine, seconds: float) -> RoundTrips:
    """The side that asks; it ends the turn by closing the line."""
    taken: list[float] = []
    connection = line.connection
    connection.settimeout(_SILENT_S)
    ends = time.perf_counter() + seconds
    while len(taken) < _MOST_TRIPS + _WARM_UP_TRIPS:
        begun = time.perf_counter()
        if begun > ends and len(taken) >= _FEWEST_TRIPS + _WARM_UP_TRIPS:
            break
        connection.sendall(_MESSAGE)
        receive(connection, len(_MESSAGE))
        taken.append(time.perf_counter() - begun)
    return summarize_trips(taken[_WARM_UP_TRIPS:])


def answer_all(line: MeasuredLine) -> None:
    """The side that answers, until the other one closes the line."""
    line.connection.settimeout(_SILENT_S)
    try:
        while True:
            line.connection.sendall(receive(line.connection, len(_MESSAGE)))
    except (StoreLostError, ConnectionError):
        return


class StreamTurn:
    """All lines of a turn: a thread sends on each that this side sends on, another reads each that it receives.

    The receiver counts, as what was sent may still be on its way: bytes that arrive between `omitted_s` after the first
    byte and `seconds` later.
    """

    def __init__(self, lines: Sequence[MeasuredLine], seconds: float, omitted_s: float) -> None:
        self._lines, self._seconds, self._omitted_s = lines, seconds, omitted_s
        self._bins = [[0] * max(1, round(seconds / _BIN_S)) for _ in lines]
        self._first = 0.0
        self._lock = threading.Lock()
        self._failures: list[BaseException] = []

    def run(self) -> Arrived | None:
        """What arrived here; None where this side only sends."""
        threads = [
            threading.Thread(target=self._guard, args=(number, line), daemon=True)
            for number, line in enumerate(self._lines)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failures:
            why = str(self._failures[0]) or type(self._failures[0]).__name__
            raise LaunchError("a connection broke while it was measured", why=why) from self._failures[0]
        if all(line.sends for line in self._lines):
            return None
        return summarize_bins(self._bins, self._seconds)

    def _guard(self, number: int, line: MeasuredLine) -> None:
        try:
            line.connection.settimeout(_SILENT_S)
            if line.sends:
                self._send(line)
            else:
                self._receive(line, self._bins[number])
        except OSError as failed:
            self._failures.append(failed)

    def _send(self, line: MeasuredLine) -> None:
        """Longer than is counted on the other side, which hangs up when it has enough."""
        chunk = memoryview(bytearray(_CHUNK))
        try:
            while True:
                line.connection.sendall(chunk)
        except ConnectionError:
            return

    def _receive(self, line: MeasuredLine, bins: list[int]) -> None:
        buffer, width = bytearray(_CHUNK), self._seconds / len(bins)
        while True:
            count = line.connection.recv_into(buffer)
            now = time.perf_counter()
            if not count:
                raise ConnectionError("the other node closed it too early")
            with self._lock:
                self._first = self._first or now
            at = now - self._first - self._omitted_s
            if at >= self._seconds:
                line.close()  # with unread bytes in it: the sender's next call fails
                return
            if at >= 0:
                bins[min(int(at / width), len(bins) - 1)] += count


def summarize_bins(bins: Sequence[Sequence[int]], seconds: float) -> Arrived:
    """Bytes by line and part of the time, as rates of all lines.

    >>> summarize_bins([[125_000_000, 0], [0, 250_000_000]], seconds=2.0)
    Arrived(gbit_s=1.5, low_gbit_s=1.0, high_gbit_s=2.0)
    """
    parts = [sum(each) * 8e-9 * len(bins[0]) / seconds for each in zip(*bins, strict=True)]
    return Arrived(round(fmean(parts), 6), round(min(parts), 6), round(max(parts), 6))
