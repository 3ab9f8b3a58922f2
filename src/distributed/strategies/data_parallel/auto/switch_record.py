"""SwitchRecord: what compression='auto' has chosen after which steps, for who takes these steps again.

It lies in the run directory, and beside each checkpoint that was saved before a choice that follows from clocks, where
a run with another run directory finds it. It holds for the measurement that it is of: another number of ranks, other
batches, another model or precision, or a measurement that began after another step have none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from distributed.core.atomic import replace_file
from distributed.core.errors import CheckpointError
from distributed.core.run_dir import RunDir
from distributed.runtime.session import Session

_LOST = "a run that resumes from before this choice may choose anew, and then its bytes differ"


@dataclass(frozen=True)
class KindSwitch:
    """What was chosen after a step of the run."""

    step: int
    kind: str
    reason: str
    whole_s: float = 0.0  # of a step with whole gradients


class SwitchRecord:
    """Every rank makes every call; rank 0 writes."""

    def __init__(self, run_dir: str, session: Session, *, ranks: int, measured_with: Sequence[Any]) -> None:
        """`measured_with`: what else the times depend on."""
        self._file, self._session, self._name = RunDir(run_dir).compression, session, f"compression-{ranks}.json"
        self._measured_with = [ranks, *measured_with]
        self.switches: list[KindSwitch] = []
        self.began = 0  # the step after which this measurement began
        self._saved: list[int] = []  # steps of checkpoints that are older than a choice to come
        self._noted = ""
        self._tell: Callable[[str], None] = lambda text: None
        self._put: Callable[[int, str, bytes], None] | None = None

    def write_by(self, tell: Callable[[str], None], put: Callable[[int, str, bytes], None] | None) -> None:
        """`put`: writes down something for who resumes from the checkpoint of a step."""
        self._tell, self._put = tell, put

    def begin(self, module: nn.Module) -> None:
        """Before the first step: rank 0 may know what an earlier attempt has chosen."""
        shapes = [(name, *parameter.shape) for name, parameter in module.named_parameters() if parameter.requires_grad]
        self._measured_with.append(hashlib.blake2b(repr(shapes).encode(), digest_size=8).hexdigest())
        text = ""
        if self._session.is_main:
            with contextlib.suppress(FileNotFoundError):
                text = self._file.read_text(encoding="utf-8")
        self._noted = self._share(text)
        self.switches = self._read(self._noted)

    def measures_from(self, step: int) -> None:
        """The state that was loaded is of a measurement that began after this step."""
        self.began = step
        self.switches = self._read(self._noted)

    def resumed(self, step: int, read: Callable[[str], bytes | None]) -> None:
        """The run resumes from the checkpoint of a step, and choices are to come.

        `read`: what was written down beside that checkpoint, by name.
        """
        found = self._read(self._share((read(self._name) or b"").decode() if self._session.is_main else ""))
        if found:
            self.switches = found
            self._write()
        self.saved(step)

    def saved(self, step: int) -> None:
        """A checkpoint holds the state after this step, and choices are to come."""
        if self._put is None or step in self._saved:
            return
        self._saved.append(step)
        if self.switches:
            self._write_beside([step])

    def add(self, chosen: KindSwitch) -> None:
        """A choice of this attempt, before a rank acts on it."""
        self.switches.append(chosen)
        self._write()
        self._write_beside(self._saved)

    def close(self) -> None:
        """What is chosen from here on follows from the losses, and so from every checkpoint alike."""
        self._saved.clear()

    def _share(self, text: str) -> str:
        """Rank 0's."""
        return self._session.share_text(
            f"compression-{self._session.number()}", text if self._session.is_main else None
        )

    def _read(self, text: str) -> list[KindSwitch]:
        known = json.loads(text) if text else {}
        if known.get("measured_with") != self._measured_with or known["began"] != self.began:
            return []
        return [KindSwitch(**switch) for switch in known["switches"]]

    def _text(self) -> str:
        switches = [vars(switch) for switch in self.switches]
        return json.dumps({"measured_with": self._measured_with, "began": self.began, "switches": switches})

    def _write(self) -> None:
        if self._session.is_main:
            try:
                replace_file(self._file, self._text())
            except OSError as failed:
                self._tell(f"{self._file} cannot be written ({failed}); {_LOST}")

    def _write_beside(self, steps: Sequence[int]) -> None:
        if self._put is None or not self._session.is_main:
            return
        for step in steps:
            try:
                self._put(step, self._name, self._text().encode())
            except CheckpointError as failed:
                self._tell(
                    f"what was chosen cannot be written beside the checkpoint of step {step} ({failed}); {_LOST}"
                )
