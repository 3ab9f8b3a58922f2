"""Inside a trial: its parameters, which note what was read of them, and how it reports and keeps its state."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from distributed.core.atomic import replace_folder
from distributed.core.env import trial_in_env, worker_env
from distributed.core.errors import TaskError
from distributed.core.registry import nearest_hint
from distributed.observe.trial import TrialDir, TrialLine, TrialNote, current_trial, newest_checkpoint, trial_line

_KEPT = 2  # checkpoints of a trial: another trial may be copying the one before the newest
_PLAIN, _TENSORS = "state.json", "state.pt"  # a state that was given as a dictionary


class TrialStopped(BaseException):
    """Raised by `report` when this trial shall go no further; let it pass, so that `finally` runs and the trial ends.

    It is no Exception, so that `except Exception` around a training step does not catch it.
    """


class TrialParams(dict[str, Any]):
    """The parameters of a trial. A dictionary that reports which names were read; iterating over it reads all.

    >>> params = TrialParams({"lr": 0.1, "layers": 2}, lambda names: print(sorted(names)))
    >>> params["lr"]
    ['lr']
    0.1
    >>> params.get("width", 64)
    ['width']
    64
    >>> len({**params})
    ['layers']
    2
    """

    def __init__(self, params: Mapping[str, Any], on_read: Callable[[set[str]], object] = lambda names: None) -> None:
        super().__init__(params)
        self._on_read = on_read
        self._reported: set[str] = set()

    def _read(self, names: set[str]) -> None:
        new = names - self._reported
        if new:
            self._reported |= new
            self._on_read(new)

    def __getitem__(self, name: str) -> Any:
        self._read({name})
        return super().__getitem__(name)

    def __missing__(self, name: str) -> Any:
        raise KeyError(f"the search space has no parameter {name!r}; {nearest_hint(name, list(dict.keys(self)))}")

    def get(self, name: str, default: Any = None) -> Any:
        self._read({name})
        return super().get(name, default)

    def pop(self, name: str, *default: Any) -> Any:
        self._read({name})
        return super().pop(name, *default)

    def __contains__(self, name: object) -> bool:
        self._read({str(name)})
        return super().__contains__(name)

    def __iter__(self) -> Iterator[str]:
        self._read(set(dict.keys(self)))
        return super().__iter__()

    def keys(self) -> Any:
        self._read(set(dict.keys(self)))
        return super().keys()

    def values(self) -> Any:
        self._read(set(dict.keys(self)))
        return super().values()

    def items(self) -> Any:
        self._read(set(dict.keys(self)))
        return super().items()

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def __or__(self, other: Any) -> dict[str, Any]:  # type: ignore[override]
        return self.copy() | other

    def __ror__(self, other: Any) -> dict[str, Any]:  # type: ignore[override]
        return other | self.copy()

    def __reduce__(self) -> tuple[type, tuple[dict[str, Any]]]:
        return dict, (self.copy(),)


class TrialSession:
    """This process's part of its trial."""

    def __init__(self, note: TrialNote, line: TrialLine) -> None:
        self.note, self._line = note, line
        self._checkpoint, self.step = newest_checkpoint(note.directory)  # also one since the trial was started
        if self.step < note.step or not self._checkpoint:
            self._checkpoint, self.step = note.checkpoint, note.step
        self.params = TrialParams(note.params, lambda names: line.tell("read", names=sorted(names)))

    def report(self, metrics: Mapping[str, Any], checkpoint: Any = None) -> None:
        plain = plain_metrics(metrics)
        world = worker_env()
        if world is not None and not world.is_main:  # all ranks of a script come here, and one speaks for them
            return
        self.step += 1
        path = "" if checkpoint is None else self._keep(checkpoint)
        answer = self._line.tell("report", step=self.step, metrics=plain, checkpoint=path, by="report")
        if not answer["go"]:
            raise TrialStopped

    def checkpoint(self) -> Any:
        if not self._checkpoint:
            return None
        folder = Path(self._checkpoint)
        if (folder / _PLAIN).exists():
            return json.loads((folder / _PLAIN).read_text(encoding="utf-8"))
        if (folder / _TENSORS).exists():
            import torch  # a trial without it has no tensors

            return torch.load(folder / _TENSORS, weights_only=True, map_location="cpu")
        return folder

    def _keep(self, checkpoint: Any) -> str:
        """A copy in the trial's own folder, which takes its name when it is whole."""
        base = TrialDir(self.note.directory).checkpoints
        target = base / f"{self.step:06d}"
        part = base / f".{target.name}"
        shutil.rmtree(part, ignore_errors=True)
        if isinstance(checkpoint, Mapping):
            part.mkdir(parents=True)
            _write_state(checkpoint, part)
        elif isinstance(checkpoint, str | os.PathLike) and os.path.isdir(checkpoint):
            shutil.copytree(checkpoint, part)
        else:
            raise TaskError(
                f"tune.report got a checkpoint that is a {type(checkpoint).__name__}",
                why="a checkpoint of a trial is a folder, or a dictionary of plain values and tensors",
                do="pass checkpoint={'model': model.state_dict(), …}, or the path of a folder that you have written",
            )
        replace_folder(part, target)
        for old in sorted(path for path in base.iterdir() if path.name.isdigit())[:-_KEPT]:
            shutil.rmtree(old, ignore_errors=True)
        self._checkpoint = str(target)
        return self._checkpoint


def _write_state(state: Mapping[str, Any], folder: Path) -> None:
    try:
        text = json.dumps(dict(state), allow_nan=False)
        if json.loads(text) == dict(state):  # no tuples, no keys that are numbers
            (folder / _PLAIN).write_text(text, encoding="utf-8")
            return
    except (TypeError, ValueError):
        pass
    import torch

    torch.save(dict(state), folder / _TENSORS)


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Metrics as numbers, also from arrays and tensors of one element.

    >>> plain_metrics({"loss": 1, "done": True})
    {'loss': 1.0, 'done': 1.0}
    """
    if not isinstance(metrics, Mapping):
        raise TaskError(
            f"a trial reported a {type(metrics).__name__}",
            why="metrics are a dictionary of names and numbers",
            do="tune.report({'loss': …})",
        )
    plain: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            plain[str(name)] = float(value)
        except (TypeError, ValueError):
            raise TaskError(
                f"the metric {name!r} is a {type(value).__name__}",
                why="a metric is one number",
                do="report numbers; keep other things in a file of the trial's folder",
            ) from None
    return plain


def returned_metrics(returned: Any) -> dict[str, float]:
    """What train_fn gave back, as metrics: a dictionary, the Trainer's History, one number, or nothing."""
    if returned is None:
        return {}
    if hasattr(returned, "epochs") and hasattr(returned, "metrics"):  # a History: its epochs were reported already
        return dict(returned.epochs[-1].metrics) if returned.epochs else {}
    if isinstance(returned, Mapping):
        return {
            name: float(value)
            for name, value in returned.items()
            if _is_number(value)  # a result may hold more than metrics
        }
    return {"value": float(returned)} if _is_number(returned) else {}


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return not isinstance(value, str)


@cache
def _session(path: str, pid: int) -> TrialSession:
    note = current_trial()
    assert note is not None
    return TrialSession(note, trial_line(path))


def trial_session() -> TrialSession | None:
    """The trial that this process belongs to, if it belongs to one."""
    path = trial_in_env()
    return _session(path, os.getpid()) if path else None
