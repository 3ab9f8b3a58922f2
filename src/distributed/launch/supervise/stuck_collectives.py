"""Stuck collectives: which rank waits for which, from the torch flight recorders of several ranks. Pure.

    rank 0:  1 done   2 done   3 all_reduce, not over        rank 0 waits for rank 1, which has not reached number 3:
    rank 1:  1 done   2 done                                 the current line of rank 1 blocks both

Numbers count the collectives of a group, equally on each of its ranks. Messages between two ranks have no such
number: an unfinished message waits for a peer without a matching one.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from distributed.launch.supervise.stacks import Frame, Whereabouts

_MESSAGE = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)$")
_SAME_ON_ALL = ("all_reduce", "broadcast")  # in other collectives, sizes may differ between ranks
_MANY = "coalesced"  # the entry after several calls that were made as one, with the state of all of them


@dataclass(frozen=True)
class Call:
    """One collective, or message, that a rank has begun."""

    group: str  # the same name on all of its ranks
    ranks: tuple[int, ...]  # of the group; none if unknown
    number: int
    name: str  # "all_reduce", "send", "recv"
    sizes: tuple[str, ...] = ()  # of its input tensors: "float32 [512, 10]"
    line: str = ""  # of the program; "" where backward began it
    is_done: bool = False
    peer: int | None = None  # of a message
    begun_ns: int = 0  # when the host began it, since the epoch

    def __str__(self) -> str:
        what = f" ({self.sizes[0]}{f' and {len(self.sizes) - 1} more' * (len(self.sizes) > 1)})" if self.sizes else ""
        at = f", called at {self.line}" if self.line else ""
        if self.peer is not None:
            return f"{self.name} {'to' if self.name == 'send' else 'from'} rank {self.peer}{what}{at}"
        return f"{self.name} number {self.number}{what}{at}"


@dataclass(frozen=True)
class Wait:
    """A call that cannot end before these ranks have made it too."""

    call: Call
    missing: tuple[int, ...]


Calls = Sequence[Call]  # of one rank, in the order in which it began them


def read_calls(record: Mapping[str, Any]) -> tuple[Call, ...]:
    """The calls in a rank's flight recorder; none for collectives in which the host itself waits."""
    if record.get("backend") != "nccl":
        return ()
    members = {name: _ranks(group) for name, group in record.get("pg_config", {}).items()}
    calls: list[Call] = []
    for entry in record.get("entries", []):
        call = _read_call(entry, members.get(entry["process_group"][0], ()))
        parts = _parts_of(entry, calls) if call.name == _MANY else []
        for at in parts:
            calls[at] = replace(calls[at], is_done=call.is_done)
        if not parts:
            calls.append(call)
    return tuple(calls)


def _read_call(entry: Mapping[str, Any], ranks: tuple[int, ...]) -> Call:
    name = entry["profiling_name"].removeprefix("nccl:").strip("_").removesuffix("_base")
    message = _MESSAGE.match(name)
    peer = int(message[3]) if message is not None else -1
    return Call(
        group=entry["process_group"][0],
        ranks=ranks,
        number=int(entry["p2p_seq_id" if message is not None else "collective_seq_id"]),
        name=message[1] if message is not None else name,
        sizes=_sizes(entry),
        line=_line(entry.get("frames", ())),
        is_done=entry.get("state") == "completed",
        peer=ranks[peer] if 0 <= peer < len(ranks) else None,
        begun_ns=int(entry.get("time_created_ns", 0)),
    )


def _parts_of(entry: Mapping[str, Any], calls: Calls) -> list[int]:
    """The states of calls that were made as one, taken from the entry after them."""
    own = [at for at, call in enumerate(calls) if call.group == entry["process_group"][0]]
    if not own:
        return []
    last = calls[own[-1]]
    number = int(entry["collective_seq_id" if last.peer is None else "p2p_seq_id"])
    return [at for at in own if calls[at].number == number and (calls[at].peer is None) == (last.peer is None)]


def find_waits(calls: Mapping[int, Calls]) -> dict[int, Wait]:
    """The waits of blocked ranks: the call, and the ranks that it waits for. A rank without a record may be missing."""
    last: dict[tuple[int, str], int] = defaultdict(lambda: -1)
    for rank, own in calls.items():
        for call in own:
            if call.peer is None:
                last[rank, call.group] = max(last[rank, call.group], call.number)
    found = {}
    for rank, own in calls.items():
        waits = [Wait(call, _missing(rank, call, calls, last)) for call in _open(own)]
        known = [wait for wait in waits if any(other in calls for other in wait.missing)]
        unknown = [wait for wait in waits if wait.missing]
        if known or unknown:
            found[rank] = (known or unknown)[0]
    return found


def find_mismatch(calls: Mapping[int, Calls]) -> dict[int, Call]:
    """The first call that differs between the ranks of a group with an unfinished call; empty if none does."""
    by_group: dict[str, dict[int, dict[int, list[Call]]]] = defaultdict(lambda: defaultdict(dict))
    for rank, own in calls.items():
        for call in own:
            if call.peer is None:
                by_group[call.group][call.number].setdefault(rank, []).append(call)
    for numbered in by_group.values():
        is_stuck = any(not call.is_done for made in numbered.values() for own in made.values() for call in own)
        for _, made in sorted(numbered.items()) if is_stuck else ():
            if len({tuple(map(_kind, own)) for own in made.values()}) > 1:
                return {rank: own[0] for rank, own in made.items()}
    return {}


def standing_in(found: Whereabouts, wait: Wait | None) -> Whereabouts:
    """The whereabouts of a rank: if its GPU waits for others, the rank waits, wherever its host is."""
    if wait is None or found.kind in ("stopped", "compiling"):
        return found
    return Whereabouts("collective", f"the collective {wait.call}")


def blame_mismatch(calls: Mapping[int, Calls], asked: Container[int]) -> tuple[int, Whereabouts] | None:
    """Late ranks that are in different collectives under one number, none of which can end.

    The rank to blame is the one whose call the fewest others made; of two ranks it is not rank 0.
    """
    different = find_mismatch(calls)
    if not different or not all(rank in asked for rank in different):
        return None
    kinds = [_kind(call) for call in different.values()]
    odd = max(different, key=lambda rank: (-kinds.count(_kind(different[rank])), rank))
    places = ", ".join(f"rank {rank} in {call}" for rank, call in sorted(different.items()))
    return odd, Whereabouts("collective", f"the ranks are in different collectives: {places}")


def has_lines(text: str) -> bool:
    """Whether a rank's record is complete: the program's lines come last."""
    return '"has_lines": true' in text


def parse_record(text: str) -> tuple[Call, ...]:
    """The calls of a record; None if it cannot be parsed."""
    try:
        return read_calls(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return ()


def _open(own: Calls) -> list[Call]:
    """The unfinished calls. A call is finished if a later one of its group is, even if that was not recorded."""
    over: dict[str, int] = defaultdict(lambda: -1)
    for call in own:
        if call.is_done and call.peer is None:
            over[call.group] = max(over[call.group], call.number)
    return [call for call in own if not call.is_done and (call.peer is not None or call.number > over[call.group])]


def _missing(rank: int, call: Call, calls: Mapping[int, Calls], last: Mapping[tuple[int, str], int]) -> tuple[int, ...]:
    others = [other for other in call.ranks if other != rank]
    if call.peer is None:
        return tuple(other for other in others if other not in calls or last[other, call.group] < call.number)
    fits = {"send": "recv", "recv": "send"}.get(call.name)
    answers = (c for c in calls.get(call.peer, ()) if c.group == call.group and c.peer == rank and not c.is_done)
    return () if any(answer.name == fits for answer in answers) else (call.peer,)


def _kind(call: Call) -> tuple[str, tuple[str, ...]]:
    return call.name, call.sizes if call.name in _SAME_ON_ALL else ()


def _ranks(group: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(int(rank) for rank in re.findall(r"\d+", str(group.get("ranks", ""))))


def _sizes(entry: Mapping[str, Any]) -> tuple[str, ...]:
    types = entry.get("input_dtypes", ())
    return tuple(
        f"{_dtype(types[at]) if at < len(types) else ''} {list(size)}".strip()
        for at, size in enumerate(entry.get("input_sizes", ()))
    )


def _dtype(name: str) -> str:
    return {"Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Double": "float64", "Long": "int64"}.get(
        name, name.lower()
    )


def _line(frames: Iterable[Mapping[str, Any]]) -> str:
    """The line of the call, in the user's code or else in this library."""
    found = [Frame(str(frame["filename"]), int(frame["line"]), str(frame["name"])) for frame in frames]
    users = next((frame for frame in found if frame.is_users), None)
    ours = next((frame for frame in found if frame.module.startswith("distributed/")), None)
    inside_us = found.index(ours) if ours is not None else len(found)
    if users is not None and (found.index(users) < inside_us or ours is None):
        return str(users)  # a user's line outside this library only called `fit`
    return str(ours) if ours is not None else ""
