"""Names of files in the run directory that more than one part writes or reads."""

from __future__ import annotations

HISTORY = "history.json"  # what fit returns
LAUNCH = "launch.json"  # what tells this launch from earlier ones in the same folder
