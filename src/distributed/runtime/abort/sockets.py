"""The sockets of a process group, so that its collectives can be cut off: gloo has no way of its own to abort one.

A socket that is shut down ends every wait on it with an error, in this process and in its peers, and frees nothing that
a thread of the group still uses.
"""

from __future__ import annotations

import os
import socket
import stat

CAN_SHUT_DOWN = os.path.isdir("/proc/self/fd")  # Linux lists the sockets of a process


def open_sockets() -> dict[int, int]:
    """This process's sockets by inode, with their descriptors."""
    found: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd") if CAN_SHUT_DOWN else ():
        try:
            status = os.fstat(int(name))
        except OSError:  # the listing's own
            continue
        if stat.S_ISSOCK(status.st_mode):
            found[status.st_ino] = int(name)
    return found


def shut_down(inodes: set[int]) -> None:
    """Cut these connections; sockets that only listen, or are of this machine's kernel alone, are left."""
    for inode, fd in open_sockets().items():
        if inode not in inodes:
            continue
        try:
            connection = socket.socket(fileno=os.dup(fd))
        except OSError:  # closed meanwhile
            continue
        with connection:
            try:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    connection.getpeername()
                    connection.shutdown(socket.SHUT_RDWR)
            except OSError:  # not connected
                continue
