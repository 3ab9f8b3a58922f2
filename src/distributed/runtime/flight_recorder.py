"""Torch's flight recorder: the last collectives that this rank began, written down while its main thread may be stuck.

For NCCL the host only enqueues collectives and waits elsewhere, so that a stack does not name them; the recorder does.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

from distributed.core.atomic import write_private
from distributed.runtime.torch_compat import dump_nccl_trace, dump_trace_json, ranks_of_groups


def write_collectives(path: str, since_ns: int = 0) -> None:
    """As JSON with torch's own names; `since_ns`: begun after this time, those of an earlier world being over.

    Twice for NCCL, because the lines may come late: for the first of them torch imports a compiler, for seconds.
    """
    record = _of_nccl(since_ns)
    if record is None:
        _write(path, (_of_gloo() or {"entries": []}) | {"has_lines": True})
        return
    _write(path, record | {"has_lines": False})
    frames = _open_frames()
    entries = [entry | {"frames": frames.get(entry["record_id"], [])} for entry in record["entries"]]
    _write(path, record | {"entries": entries, "has_lines": True})


def _write(path: str, record: dict[str, Any]) -> None:
    write_private(path, json.dumps(record, default=str))


def _of_nccl(since_ns: int) -> dict[str, Any] | None:
    """Where this build has NCCL and a collective of it was begun."""
    record = _dump(includeStackTraces=False, onlyActive=False)
    entries = of_present_groups(record["entries"], since_ns)
    config = with_ranks(record.get("pg_config", {}), ranks_of_groups())
    return {"backend": "nccl", "pg_config": config, "entries": entries} if entries else None


def with_ranks(config: Mapping[str, Mapping[str, Any]], known: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Torch records the ranks of a process's first default group only; a survivor's next one has none.

    >>> with_ranks({"0": {"desc": "default_pg", "ranks": "[]"}}, {"0": [0, 1]})
    {'0': {'desc': 'default_pg', 'ranks': '[0, 1]'}}
    """
    found = {}
    for name, group in config.items():
        is_known = any(character.isdigit() for character in str(group.get("ranks", "")))
        found[name] = {**group} if is_known else {**group, "ranks": str(list(known.get(name, ())))}
    return found


def of_present_groups(entries: Sequence[dict[str, Any]], since_ns: int) -> list[dict[str, Any]]:
    """Without those of an earlier world, whose groups had the same names and counted from 1 as well.

    A host may have begun some of them after the message about the next world.
    """
    newest: dict[str, int] = {}
    for entry in entries:
        name = entry["process_group"][0]
        newest[name] = max(newest.get(name, -1), entry["pg_id"])
    return [
        entry
        for entry in entries
        if entry["pg_id"] == newest[entry["process_group"][0]] and entry["time_created_ns"] >= since_ns
    ]


def _open_frames() -> dict[int, Any]:
    """The Python frames in which collectives were begun that are not over, by their number in the recorder."""
    return {entry["record_id"]: entry["frames"] for entry in _dump(includeStackTraces=True, onlyActive=True)["entries"]}


def _dump(**how: bool) -> dict[str, Any]:
    dump = dump_nccl_trace(**how)
    record: dict[str, Any] = {} if dump is None else pickle.loads(dump)
    return {"entries": []} | record


def _of_gloo() -> dict[str, Any] | None:
    try:
        dump = dump_trace_json()
        record: dict[str, Any] = {} if dump is None else json.loads(dump)
    except (RuntimeError, TypeError, ValueError):
        return None
    return record if record.get("entries") else None
