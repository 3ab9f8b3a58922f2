"""A rank of torchrun, as Python would run its script; only, no process group of it is ever destructed.

gloo's destructor waits for a thread with the interpreter's lock in its hand, and that thread may want the lock: scripts
under torchrun hang at their end, more often the busier the machine is. That is not what is compared here.
"""

import ctypes
import os
import runpy
import sys

import torch.distributed.distributed_c10d as c10d


class _Groups(dict):  # type: ignore[type-arg]
    def __setitem__(self, group: object, value: object) -> None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))  # nor at the interpreter's end
        super().__setitem__(group, value)


def main(arguments: list[str]) -> None:
    c10d._pg_map = _Groups()
    if arguments[0] == "-m":
        sys.argv, sys.path[0] = arguments[1:], os.getcwd()
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = arguments, os.path.dirname(os.path.abspath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
