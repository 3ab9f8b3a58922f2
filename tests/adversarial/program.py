"""A case's text as a module that functions and classes can be taken from, with sources that `inspect` finds."""

from __future__ import annotations

import linecache
import sys
from types import ModuleType
from typing import Any

from tests.adversarial.case import Case


def load_program(case: Case) -> dict[str, Any]:
    """What the text of a case defines. Of the module before it nothing is left."""
    name, file = "drawn_case", f"<case {case.seed}>"
    for old in [key for key in linecache.cache if key.startswith("<case ")]:
        del linecache.cache[old]
    linecache.cache[file] = (len(case.text), None, case.text.splitlines(keepends=True), file)
    module = ModuleType(name)
    sys.modules[name] = module
    exec(compile(case.text, file, "exec"), module.__dict__)
    return module.__dict__
