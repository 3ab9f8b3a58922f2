"""A process group is forgotten only after gloo's threads have come to rest."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import sys
import threading

import pytest
from torch.distributed import distributed_c10d

from distributed.launch.node.exit import gloo_threads

_PR_SET_NAME = 15


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux only")
@pytest.mark.parametrize("forget", ["clear", "pop", "__delitem__"])
def test_group_is_forgotten_after_threads_of_gloo_rest(monkeypatch, forget):
    monkeypatch.setattr(distributed_c10d, "_pg_map", {"group": "its store"})
    gloo_threads.install()
    groups, started, done, over = distributed_c10d._pg_map, threading.Event(), [], threading.Event()

    def work():
        ctypes.CDLL(None).prctl(_PR_SET_NAME, b"pt_gloo_runloop", 0, 0, 0)
        started.set()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 300_000)  # as a collective: without the interpreter's lock
        done.append(True)
        over.wait()

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    getattr(groups, forget)(*([] if forget == "clear" else ["group"]))
    was_done = list(done)
    over.set()
    thread.join()
    assert was_done == [True]
    assert groups == {}


def test_table_waits_where_torch_is_imported_later():
    """As in a rank that is not forked: torch comes with the program."""
    program = (
        "import sys; from distributed.launch.node.exit import gloo_threads; gloo_threads.install(); "
        "before = len(sys.meta_path); import torch.distributed.distributed_c10d as c10d; "
        "print(type(c10d._pg_map) is gloo_threads._Groups, before - len(sys.meta_path), "
        "c10d._world.pg_map is c10d._pg_map)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "1", "True"]
