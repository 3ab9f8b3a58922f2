"""Places: this rank in each of its groups, where a collective begins, is waited for, and fails with peers' names."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from distributed.comm.groups.agreement import CallAgreement, raise_told
from distributed.comm.groups.calls import CallRecord, CollectiveCall, What, explain, missing
from distributed.comm.groups.watch import PeerWatch
from distributed.core.env import worker_env
from distributed.core.errors import ConfigError, LaunchError, MismatchError
from distributed.runtime.heartbeat import reported
from distributed.runtime.torch_compat import backend_of, default_group, set_timeout, timeout_of
from distributed.runtime.world import CollectiveError

Checks = Literal["first", "always", "never"]

_SLICE = timedelta(seconds=0.5)  # of a wait, after which it is seen whether a peer has failed in the same call
_POLL_S = 0.0005
_ALMOST = 0.98  # of a deadline: gloo's own comes at about the same moment


class Place:
    """This rank in one group."""

    def __init__(self, group: Any, watch: PeerWatch) -> None:
        self._group = None if group is default_group() else ref(group)  # held, it would outlive its end
        self.name = str(group.group_name)
        self.ranks = dist.get_process_group_ranks(group)
        self.rank, self.size = self.ranks.index(dist.get_rank()), len(self.ranks)
        self.watch, self.calls = watch, watch.calls.setdefault(self.name, CallRecord())
        self.agreement = CallAgreement(self.name, self.ranks, watch)
        self.kept: dict[Any, Any] = {}  # what algorithms measure or find out once
        self._messages: dict[tuple[int, int], int] = {}
        self._backends: dict[str, tuple[str, float]] = {}

    @property
    def group(self) -> Any:
        """For torch's functions; None is the default group."""
        return None if self._group is None else self._group()

    def backend(self, device: str) -> tuple[str, float]:
        """The name of what sends tensors of this device, and its deadline in seconds."""
        known = self._backends.get(device)
        if known is None:
            group = self.group or default_group()
            try:
                known = self._backends[device] = (backend_of(group, device).name(), timeout_of(group, device))
            except RuntimeError as failed:
                raise ConfigError(
                    f"the group sends no tensors of the device {device!r}",
                    why=f"its backends are {dist.get_backend_config(group)}",
                    do='init_process_group("cpu:gloo,cuda:nccl") has both',
                ) from failed
        return known

    def begin(
        self, what: What, *, name: str | None, where: Any, device: torch.device, timeout_s: float | None
    ) -> CollectiveCall:
        """Count a call of all ranks, and see that they mean the same."""
        call = self._call(self.calls.begun + 1, what, name=name, where=where, device=device, timeout_s=timeout_s)
        self.calls.begin(call)
        if _Setting.checks != "never":
            always = _Setting.checks == "always"
            if not self.agreement.is_known(call, always=always):
                with self.waiting(call):
                    self.agreement.check(call)
        return call

    def begin_message(
        self, what: What, *, name: str | None, where: Any, device: torch.device, timeout_s: float | None, peer: int
    ) -> CollectiveCall:
        """Count a message from this rank to a peer, or from the peer."""
        pair = (self.watch.rank, peer) if what[0] == "send" else (peer, self.watch.rank)
        number = self._messages[pair] = self._messages.get(pair, 0) + 1
        return self._call(number, what, name=name, where=where, device=device, timeout_s=timeout_s)

    def compare_message(self, call: CollectiveCall, peer: int, *, waits: bool = True) -> None:
        """See that both mean the same. `waits`: until the sender has come, where this rank receives."""
        if _Setting.checks != "always" and (_Setting.checks == "never" or call.number > 1):
            return
        with self.waiting(call, [peer]):
            if call.what[0] == "send":
                self.agreement.offer_message(call, (self.watch.rank, peer))
            else:
                compare = self.agreement.check_message if waits else self.agreement.expect_message
                compare(call, (peer, self.watch.rank))

    def _call(
        self, number: int, what: What, *, name: str | None, where: Any, device: torch.device, timeout_s: float | None
    ) -> CollectiveCall:
        seconds = self.backend(device.type)[1] if timeout_s is None else timeout_s
        until = time.monotonic() + seconds
        return CollectiveCall(
            str(what[0]),
            name or "",
            where,
            number=number,
            what=what,
            timeout_s=seconds,
            until=until,
            is_bounded=timeout_s is not None,
        )

    @contextmanager
    def named(self, call: CollectiveCall, device: torch.device) -> Iterator[None]:
        """Around what starts a call: gloo takes its deadline from its group at that moment."""
        backend, usual = self.backend(device.type)
        is_other = call.is_bounded and backend == "gloo"
        if is_other:
            set_timeout(call.timeout_s, self.group)
        try:
            yield
        finally:
            if is_other:
                set_timeout(usual, self.group)

    def wait(self, call: CollectiveCall, work: Any, device: torch.device, peers: list[int] | None = None) -> None:
        """Until a collective has ended; with `peers`, a message between this rank and them.

        On NCCL the device's stream waits, and the host only where the caller gave a deadline.
        """
        if work is None:
            return
        with self.waiting(call, peers):
            if self.backend(device.type)[0] == "nccl":
                work.wait()
                if call.is_bounded:
                    _poll(work, call)
            elif peers:
                work.wait(timedelta(seconds=max(0.001, call.until - time.monotonic())))
            else:
                self._wait_in_slices(work, call)

    @contextmanager
    def waiting(self, call: CollectiveCall, peers: list[int] | None = None) -> Iterator[None]:
        """Around a wait for the others, or for the peers of a message: reported, and errors say who is missing."""
        self.calls.waiting = call
        try:
            with reported(call.label), self._failures(call, peers or self.ranks, bool(peers)):
                yield
        finally:
            self.calls.waiting = None

    def _wait_in_slices(self, work: Any, call: CollectiveCall) -> None:
        while True:
            left = call.until - time.monotonic()
            try:
                work.wait(_SLICE if left > _SLICE.total_seconds() else timedelta(seconds=max(0.001, left)))
                return
            except RuntimeError:
                if work.is_completed():  # it has failed, or ended since
                    work.wait()
                    return
                if left <= 0:
                    raise
                told = self.watch.failure(self.name, call)
                if told is not None:
                    raise_told(self.watch.rank, call, told)

    @contextmanager
    def _failures(self, call: CollectiveCall, ranks: list[int], is_message: bool = False) -> Iterator[None]:
        """Errors within say which ranks are missing."""
        try:
            yield
        except (CollectiveError, torch.OutOfMemoryError):
            raise
        except MismatchError as failed:
            self.watch.note_failure(self.name, call, failed.problems[0].what, is_mismatch=True)
            raise
        except (RuntimeError, dist.DistError) as failed:
            is_late = time.monotonic() > call.until - (1 - _ALMOST) * call.timeout_s
            how = f"was not joined within {call.timeout_s:g} s" if is_late else f"failed ({_shortly(failed)})"
            if not is_message:
                told = self.watch.failure(self.name, call)
                if told is not None and told["is_mismatch"]:
                    raise_told(self.watch.rank, call, told)
                self.watch.note_failure(self.name, call, how)
            standings = self.watch.ask(self.name, ranks)
            who = explain(missing(call, standings, is_message=is_message))
            raise CollectiveError(f"[r{self.watch.rank}] {call} {how}: {who}") from failed


class _Setting:
    checks: Checks = "first"


def check_shapes(mode: Checks) -> None:
    """When calls are compared between ranks: "first" (of each operation, dtype and shape), "always" or "never".

    A check is four small requests to the group's store, and needs all ranks; set the same on all of them.
    """
    if mode not in ("first", "always", "never"):
        raise ConfigError(f"check_shapes({mode!r})", do="choose one of: 'first', 'always', 'never'")
    _Setting.checks = mode


_places: WeakKeyDictionary[Any, Place] = WeakKeyDictionary()
_watch: list[PeerWatch] = []  # of the world that this process is in


def place_in(group: Any) -> Place | None:
    """This rank's place in a group; None where it is alone in a world without any."""
    if not dist.is_initialized():
        _check_alone()
        return None
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ConfigError(
            "this rank is not in the group",
            why="a collective is called by the ranks of its group and by no others",
            do="call it within: if dist.get_rank() in dist.get_process_group_ranks(group)",
        )
    key = default_group() if group is None else group
    place = _places.get(key)
    if place is None:
        place = _places[key] = Place(key, _current_watch())
    return place


def _current_watch() -> PeerWatch:
    if not _watch or _watch[0].world() is not default_group():
        for old in _watch:
            old.close()
        _watch[:] = [PeerWatch()]
    return _watch[0]


def _check_alone() -> None:
    env = worker_env()
    if env is not None and env.world_size > 1:
        raise LaunchError(
            f"rank {env.rank} of {env.world_size} has no process group",
            why="a collective goes over the ranks of one, and the launcher only starts them",
            do="call torch.distributed.init_process_group(), distributed.start() or Trainer.fit() first",
        )


def _shortly(failed: Exception) -> str:
    """
    >>> _shortly(RuntimeError("[/src/pair.cc:553] Connection closed by peer [10.0.0.1]:6. This is typically …"))
    'Connection closed by peer [10.0.0.1]:6'
    """
    return re.sub(r"^\[[^\]]*\] ", "", str(failed).partition("\n")[0]).partition(". ")[0]


def _poll(work: Any, call: CollectiveCall) -> None:
    """Until the device has done it."""
    while not work.is_completed():
        if time.monotonic() > call.until:
            raise RuntimeError("the device still waits for other ranks")
        time.sleep(_POLL_S)


class Handle:
    """A collective under way: `wait` returns what the call without async_op returns."""

    def __init__(self, is_completed: Callable[[], bool], finish: Callable[[], Any]) -> None:
        self._is_completed, self._finish = is_completed, finish
        self._is_over, self._result = False, None

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self._is_over or self._is_completed()

    def wait(self) -> Any:
        """The result, once the others have joined; on NCCL, once the stream will have it."""
        if not self._is_over:
            self._result, self._is_over = self._finish(), True
        return self._result


def done(result: Any) -> Handle:
    """One that is over already."""
    return Handle(lambda: True, lambda: result)
