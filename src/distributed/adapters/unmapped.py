"""What the objects of another library have, and a run has nothing for."""

from __future__ import annotations

from distributed.core.errors import TaskError


class UnmappedError(TaskError, AttributeError):
    """A name that is not mapped; also an AttributeError, for hasattr."""
