"""The payload: a job written down once for all processes. Large arrays are mapped by them, not copied.

It goes from a process to its own children through a file that only this user can read. The plan comes first and alone,
since a process must set up its strategy before anything of TensorFlow is made in it, such as a dataset of the job.
"""

from __future__ import annotations

import json
import mmap
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import cloudpickle

from distributed.core.atomic import Sealed, check_code, create_private, open_sealed, seal
from distributed.core.errors import DistributedError, TaskError
from distributed.core.plan import Plan

_LENGTH = struct.Struct("<q")
_ALIGN = 64  # bytes; what vector instructions like


def write_payload(plan: Plan, job: Any, path: Path) -> Sealed:
    """Write the job, or say what of it cannot be sent. The caller closes the sealed file."""
    buffers: list[pickle.PickleBuffer] = []
    try:
        body = cloudpickle.dumps(job, protocol=5, buffer_callback=buffers.append)
    except DistributedError:
        raise
    except Exception as failed:  # pickling runs any object's own code, which may raise anything
        raise TaskError(
            "the model or its data cannot be sent to other processes",
            why=str(failed).splitlines()[0],
            do="pass functions that make them: TensorFlowDistributedTrainer(build_model).fit(make_data)",
        ) from failed
    views = [buffer.raw() for buffer in buffers]
    parts = [pickle.dumps(plan, protocol=5), body]
    head = json.dumps([len(part) for part in parts] + [view.nbytes for view in views]).encode()
    handle = create_private(path)
    with os.fdopen(handle, "wb", closefd=False) as file:
        file.write(_LENGTH.pack(len(head)) + head)
        for part in (*parts, *views):
            file.write(bytes(-file.tell() % _ALIGN))
            file.write(part)
    return seal(path, handle, b"".join([head, *parts]))


class Payload:
    """A payload that our own parent wrote for this run, or it is refused; its job is read when it is asked for."""

    def __init__(self, folder: Path, sealed: Sealed) -> None:
        handle = open_sealed(folder, sealed)
        try:
            whole = mmap.mmap(handle, 0, access=mmap.ACCESS_COPY)
        finally:
            os.close(handle)
        length = _LENGTH.unpack_from(whole)[0]
        at = _LENGTH.size + length
        head = whole[_LENGTH.size : at]
        self._parts: list[memoryview] = []
        for size in json.loads(head):
            at += -at % _ALIGN
            self._parts.append(memoryview(whole)[at : at + size])
            at += size
        check_code(folder / sealed.name, b"".join([head, *self._parts[:2]]), sealed)

    @property
    def plan(self) -> Plan:
        found: Plan = pickle.loads(self._parts[0])
        return found

    def job(self) -> Any:
        return pickle.loads(self._parts[1], buffers=self._parts[2:])
