"""Found by every Python that a test starts: its launchers fork their warm parents from the test's template process."""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_PATCHED = "distributed.launch.node.warm_parent"


class _AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the module as it is, then lets it ask the template."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _PATCHED:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            self._own: Any = spec.loader
            spec.loader = self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._own.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        self._own.exec_module(module)
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._own
        path = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "template.py")
        spec = importlib.util.spec_from_file_location("_test_template", path)
        assert spec is not None
        assert spec.loader is not None
        template = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(template)
        template.install(module)


if "TEST_TEMPLATE" in os.environ:
    sys.meta_path.insert(0, _AfterImport())
