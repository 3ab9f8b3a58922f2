"""Checkpoints on S3, against a real endpoint on loopback, with a proxy in between that is slow or fails."""

from __future__ import annotations

import shutil
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from distributed.checkpoint.restore.candidates import find
from distributed.checkpoint.restore.reading import load, verify
from distributed.checkpoint.restore.restoring import restore
from distributed.checkpoint.save.saver import Saver
from distributed.checkpoint.save.staging import TensorStaging
from distributed.checkpoint.storage.remote import RemoteStorage
from distributed.core.errors import CheckpointError
from tests.object_stores import Trouble, alone, proxied, server, state

pytest.importorskip("s3fs", reason="s3fs is not installed")


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """moto's server as a process of its own."""
    command = shutil.which("moto_server", path=str(Path(sys.executable).parent))
    if command is None:
        pytest.skip("moto_server is not installed")
    with server([command, "-H", "127.0.0.1", "-p", "PORT"]) as url:
        yield url


@pytest.fixture
def trouble(s3: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trouble]:
    """Requests go through a proxy; the environment names it as a user's would."""
    with proxied(s3) as (endpoint, trouble):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        request = urllib.request.Request(f"{s3}/bucket", method="PUT")
        urllib.request.urlopen(request, timeout=30).close()
        yield trouble


def test_save_restore_and_retention_on_s3(trouble: Trouble, tmp_path: Path) -> None:
    url = f"s3://bucket/{tmp_path.name}/checkpoints"
    assert find(url, True) == []
    saver = Saver(url, alone(), TensorStaging(), keep_last=2)
    saver.prepare(state(1), {})
    for step in (1, 2, 3):
        saver.save(step, state(step), {"rng": {"n": torch.tensor(step)}})
    assert saver.wait() == f"{url}/step-000003"
    assert saver.last_saved is not None
    assert saver.last_saved.written_bytes < 0.4 * saver.last_saved.total_bytes, "what is frozen is there already"
    assert [found.step for found in find(url, True)] == [3, 2]
    restored = restore(url, True, alone())
    assert restored is not None
    assert torch.equal(restored.shared["model"]["w"], state(3)["model"]["w"])
    assert not verify(f"{url}/step-000002").problems
    used = set(load(f"{url}/step-000002").manifest.chunks) | set(restored.manifest.chunks)
    assert len(RemoteStorage(url).list("chunks")) == len(used)
    assert RemoteStorage(url).list("parts") == []


def test_saves_to_slow_and_flaky_s3_are_retried_to_success(trouble: Trouble, tmp_path: Path) -> None:
    url = f"s3://bucket/{tmp_path.name}/flaky"
    trouble.every, trouble.delay_s = 3, 0.02
    saver = Saver(url, alone(), TensorStaging())
    for step in (1, 2):
        saver.save(step, state(step), {})
    saver.close()
    assert trouble.count > 6
    restored = restore(url, True, alone())
    assert restored is not None
    assert torch.equal(restored.shared["model"]["w"], state(2)["model"]["w"])


def test_failed_saves_to_s3_leave_the_last_good_checkpoint(trouble: Trouble, tmp_path: Path) -> None:
    url = f"s3://bucket/{tmp_path.name}/failing"
    storage = RemoteStorage(
        url, tries=2, first_pause_s=0.01, options={"config_kwargs": {"retries": {"max_attempts": 1}}}
    )
    saver = Saver(storage, alone(), TensorStaging(), keep_last=1)
    saver.save(1, state(1), {}, wait=True)
    for writes in (0, 1, 3):  # that still go through: two chunks and a part come before the manifest
        trouble.writes_left = writes
        saver.save(2, state(2 + writes), {"rng": {"n": torch.tensor(writes)}})
        with pytest.raises(CheckpointError, match="cannot write"):
            saver.wait()
        trouble.writes_left = None
        restored = restore(url, True, alone())
        assert restored is not None
        assert restored.step == 1
        assert torch.equal(restored.shared["model"]["w"], state(1)["model"]["w"])
    saver.save(3, state(3), {}, wait=True)
    assert [found.step for found in find(url, True)] == [3]
    assert not verify(f"{url}/step-000003").problems
