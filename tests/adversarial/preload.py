"""What the process imports that ranks are forked from, so that a world begins in a fraction of a second."""

from __future__ import annotations

import tests.adversarial.rank  # noqa: F401
