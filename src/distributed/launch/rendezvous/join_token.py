"""The join token: the secret of a run over several nodes, and the files through which a generated one is shared.

A token from `--join-token` or the environment is the same on all nodes. Otherwise the node that runs the store
generates one and writes it to files that only this user can read: in the run directory, if that was set, and in the
user's cache, which nodes of a cluster often share.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path

from distributed.core.atomic import make_private, write_private
from distributed.core.env import JOIN_TOKEN
from distributed.core.errors import ConfigError
from distributed.core.run_dir import RunDir

SHORTEST = 16  # characters: any process that reaches the port may guess


def read_join_token(text: str, source: str) -> str:
    """The token of a setting: its text, or the content of the file after an `@`.

    >>> read_join_token("0123456789abcdef", "--join-token")
    '0123456789abcdef'
    """
    make = f'export {JOIN_TOKEN}="$(openssl rand -hex 32)", the same on all nodes'
    token = text
    if text.startswith("@"):
        try:
            token = Path(text[1:]).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ConfigError(f"the join token's file {text[1:]} ({source}) cannot be read", why=str(error)) from error
    if len(token) < SHORTEST:
        raise ConfigError(
            f"the join token ({source}) has {len(token)} characters",
            why=f"a process that guesses it joins the run, so a token has at least {SHORTEST} characters",
            do=make,
        )
    return token


def new_join_token() -> str:
    return secrets.token_hex(32)


def token_files(host: str, port: int, run_dir: str | None, cache: Path) -> list[Path]:
    """The token files of the run with that rendezvous endpoint; `run_dir` is the one that the user named.

    >>> [path.as_posix() for path in token_files("n0", 29400, "runs/a", Path("/cache"))]
    ['runs/a/join-token', '/cache/join/n0-29400']
    """
    name = re.sub(r"[^\w.-]", "_", f"{host}-{port}")
    return [*([RunDir(run_dir).join_token] if run_dir else []), cache / "join" / name]


def leave_token(token: str, files: Sequence[Path]) -> list[Path]:
    """Write the token to each file that can be written, atomically and for this user only."""
    written = []
    for path in files:
        with contextlib.suppress(OSError):
            make_private(path.parent)
            write_private(path, token + "\n")
            written.append(path)
    return written


def find_tokens(files: Sequence[Path]) -> list[str]:
    """The token in the files of this user. Another user's token would join this node to another run."""
    return [token for path in files if (token := _own_text(path))]


def remove_token(token: str, files: Sequence[Path]) -> None:
    """Remove the token's files, unless another run has replaced the token."""
    for path in files:
        if _own_text(path) == token:
            with contextlib.suppress(OSError):
                path.unlink()


def _own_text(path: Path) -> str:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), encoding="utf-8") as file:
            status = os.fstat(file.fileno())
            is_private = not stat.S_IMODE(status.st_mode) & 0o077
            return file.read().strip() if status.st_uid == os.geteuid() and is_private else ""
    except (OSError, UnicodeDecodeError):
        return ""
