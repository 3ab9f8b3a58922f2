"""Ranks and warm parents start by this file's path, so no module of the user's is taken for ours.

`python …/launch/node/entry.py rank train.py args…`, `… rank -m package.module args…` or `… warm <what warm.py reads>`.
"""

from __future__ import annotations

import importlib.util
import os
import sys

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_NAME = "distributed"  # not `__package__`: this file runs as a script


def main() -> None:
    """Import the package of this file, whatever `sys.path` has of its name, and run one of its programs."""
    if not sys.flags.safe_path and os.path.abspath(sys.path[0]) == _FOLDER:
        del sys.path[0]  # Python puts the folder of a script there
    root = os.path.dirname(os.path.dirname(_FOLDER))
    spec = importlib.util.spec_from_file_location(
        _NAME, os.path.join(root, "__init__.py"), submodule_search_locations=[root]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules[_NAME] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[_NAME])
    program, arguments = sys.argv[1], sys.argv[2:]
    if program == "warm":
        from distributed.launch.node import warm

        warm.main(arguments)
    from distributed.launch.node import rank

    rank.run(arguments)


if __name__ == "__main__":
    main()
