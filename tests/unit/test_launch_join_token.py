"""Nodes join a run with its token, which is given to them or found in a file that only their user can read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from distributed.core.errors import ConfigError, LaunchError
from distributed.launch.ports import free_port
from distributed.launch.rendezvous.elastic import StoreEndpoint
from distributed.launch.rendezvous.join_token import find_tokens, leave_token, read_join_token, remove_token
from distributed.launch.rendezvous.membership import Membership
from distributed.launch.request import LaunchRequest

TOKEN = "a token of many letters"
REQUEST = LaunchRequest(("x.py",), "r", 1, num_nodes=2, master_addr="127.0.0.1", node_rank=0)


def test_join_token_is_read_only_from_private_files(tmp_path: Path) -> None:
    shared, other = tmp_path / "run" / "join-token", tmp_path / "cache" / "n0"
    assert leave_token(TOKEN, [shared, other]) == [shared, other]
    assert shared.stat().st_mode & 0o777 == 0o600
    assert shared.parent.stat().st_mode & 0o777 == 0o700  # it may be the first to make the run's folder
    assert find_tokens([shared, other, tmp_path / "none"]) == [TOKEN, TOKEN]
    other.chmod(0o644)
    assert find_tokens([other]) == []
    link = tmp_path / "link"
    link.symlink_to(shared)
    assert find_tokens([link]) == []
    remove_token("that of an earlier run", [shared])
    assert shared.exists()
    remove_token(TOKEN, [shared])
    assert not shared.exists()


def test_short_or_unreadable_join_token_is_refused(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN + "\n")
    assert read_join_token(f"@{tmp_path / 'token'}", "--join-token") == TOKEN
    for bad, words in (("short", "5 characters"), (f"@{tmp_path / 'none'}", "cannot be read")):
        with pytest.raises(ConfigError, match=words):
            read_join_token(bad, "--join-token")


def node(tmp_path: Path, request: LaunchRequest, home: str = "home") -> Membership:
    endpoint = StoreEndpoint(request, run_dir=str(tmp_path / "run"), cache=tmp_path / home)
    return Membership(request, endpoint, timeout_s=1.0)


def test_nodes_without_the_join_token_are_refused_with_reason(tmp_path: Path) -> None:
    request = replace(REQUEST, master_port=free_port())
    first = node(tmp_path, request)
    with pytest.raises(LaunchError, match="only 1 of 2 nodes"):
        first.gather(0)
    token = (tmp_path / "run" / "join-token").read_text().strip()
    second = replace(request, node_rank=1)
    with pytest.raises(LaunchError, match="only"):  # it finds the token, and is counted
        node(tmp_path, second).gather(0)
    with pytest.raises(LaunchError, match="not let into") as refused:
        node(tmp_path, replace(second, join_token=TOKEN)).gather(0)
    assert "another join token" in str(refused.value)
    with pytest.raises(LaunchError, match="not let into") as refused:
        node(tmp_path / "another disk", second).gather(0)
    assert "no join token" in str(refused.value)
    assert "DISTRIBUTED_JOIN_TOKEN" in str(refused.value)
    assert token not in repr(replace(request, join_token=token))
    first.close()
    assert not (tmp_path / "run" / "join-token").exists()
