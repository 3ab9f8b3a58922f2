"""TensorBoard event files from tensorboard's own protocol buffers.

Its `EventFileWriter`, and so `torch.utils.tensorboard`, imports all of TensorFlow when that is installed: seconds and
500 MB in a rank. The format is a length, the bytes and two checksums; it is written here, without a thread or a buffer.
"""

from __future__ import annotations

import itertools
import os
import socket
import struct
import time

from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

from distributed.core.events import Event, RunStarted
from distributed.observe.scalars import ScalarReader

_serial = itertools.count()  # two observers of one process and second must not share a file


class TensorBoardObserver:
    """Writes the run's scalars, all over the number of optimizer steps done, under

    - `train/loss`, `train/<metric>`, `train/learning_rate`, `train/gradient_norm`, `train/samples_per_second`;
    - `val/<metric>` from evaluations;
    - `epoch/<metric>`, `epoch/seconds`, `epoch/samples_per_second`: means over an epoch;
    - `device/utilization` in percent.

    The text `run/summary` holds the settings and the decisions.
    """

    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        os.makedirs(log_dir, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_serial)}"
        self.path = os.path.join(log_dir, name)
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._scalars = ScalarReader()
        source = event_pb2.SourceMetadata(writer="distributed.observe.tensorboard")
        self._write(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2", source_metadata=source))

    def on(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._start(event)
            return
        found = self._scalars.read(event)
        if found is not None:
            step, scalars = found
            values = [summary_pb2.Summary.Value(tag=_tag(name), simple_value=value) for name, value in scalars.items()]
            summary = summary_pb2.Summary(value=values)
            self._write(event_pb2.Event(wall_time=event.time, step=step, summary=summary))

    def close(self) -> None:
        """Every event is on its way to the disk already; this makes sure that it has arrived."""
        if self._fd >= 0:
            os.fsync(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _start(self, event: RunStarted) -> None:
        if event.first_step:  # what an attempt wrote after the checkpoint that we resume from did not happen
            restart = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(event_pb2.Event(wall_time=event.time, step=event.first_step + 1, session_log=restart))
        summary = summary_pb2.Summary(value=[_text("run/summary", _describe(event))])
        self._write(event_pb2.Event(wall_time=event.time, step=event.first_step, summary=summary))

    def _write(self, event: event_pb2.Event) -> None:
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        checks = [struct.pack("<I", masked_crc32c(part)) for part in (length, data)]
        os.write(self._fd, length + checks[0] + data + checks[1])


def _tag(name: str) -> str:
    for prefix in ("val", "epoch", "device"):
        if name.startswith(f"{prefix}_"):
            return f"{prefix}/{name.removeprefix(prefix)[1:]}"
    return f"train/{name}"


def _text(tag: str, markdown: str) -> summary_pb2.Summary.Value:
    plugin = summary_pb2.SummaryMetadata.PluginData(plugin_name="text")
    shape = tensor_shape_pb2.TensorShapeProto(dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=1)])
    tensor = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[markdown.encode()], tensor_shape=shape)
    return summary_pb2.Summary.Value(tag=tag, metadata=summary_pb2.SummaryMetadata(plugin_data=plugin), tensor=tensor)


def _describe(event: RunStarted) -> str:
    """The start of a run as markdown."""
    facts = {
        "run directory": event.run_dir,
        "ranks": event.world_size,
        "device": event.device,
        "backend": event.backend,
        "global batch": event.global_batch,
        "steps": "unknown" if event.total_steps is None else event.total_steps,
    }
    settings = {f"`{name}`": value for name, value in event.settings.items() if value is not None}
    rows = [f"| {name} | {value} |" for name, value in (facts | settings).items()]
    return "\n".join(["| | |", "|---|---|", *rows, "", *(f"- {decision}" for decision in event.decisions)])
