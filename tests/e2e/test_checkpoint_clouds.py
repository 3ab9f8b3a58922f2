"""Checkpoints on Google Cloud Storage and Azure Blob Storage, against their emulators on loopback.

Google's emulator has no preconditions: it replaces an object that is to be created only where there is none. So the
proxy before it refuses that with 412, as the service does. Azurite has them.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import parse_qs, quote, urlsplit
from urllib.request import urlopen

import pytest
import torch

from distributed.checkpoint.restore.candidates import find
from distributed.checkpoint.restore.reading import verify
from distributed.checkpoint.restore.restoring import restore
from distributed.checkpoint.save.saver import Saver
from distributed.checkpoint.save.staging import TensorStaging
from distributed.checkpoint.storage.files import NotThere
from distributed.checkpoint.storage.ownership import hold_folder
from distributed.checkpoint.storage.remote import RemoteStorage
from distributed.core.env import user_cache
from distributed.core.errors import CheckpointError
from tests.object_stores import Trouble, alone, proxied, server, state

# Of Azurite, and of every emulator of Azure's storage: a published constant, which opens nothing else.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


class Store:
    """An emulator behind a proxy, and the URL of a folder of its own."""

    def __init__(self, url: str, trouble: Trouble) -> None:
        self.url, self.trouble = url, trouble


def need(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


@pytest.fixture(scope="module")
def google() -> Iterator[str]:
    need("gcsfs")
    need("gcp_storage_emulator")
    command = [sys.executable, "-m", "gcp_storage_emulator", "start", "--host", "127.0.0.1", "--port", "PORT"]
    with server([*command, "--in-memory", "--default-bucket", "bucket"]) as url:
        yield url


@pytest.fixture(scope="module")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    need("adlfs")
    own = user_cache(os.environ) / "azurite" / "node_modules" / ".bin"  # where tests/system_tools.sh installs it
    azurite = shutil.which("azurite-blob", path=os.pathsep.join([os.environ["PATH"], str(own)]))
    if azurite is None:
        pytest.skip("azurite is not installed (npm install --global azurite)")
    options = ["--inMemoryPersistence", "--disableTelemetry", "--skipApiVersionCheck", "--silent"]
    folder = str(tmp_path_factory.mktemp("azurite"))
    with server([azurite, "--blobHost", "127.0.0.1", "--blobPort", "PORT", *options], folder) as url:
        from azure.storage.blob import BlobServiceClient

        BlobServiceClient.from_connection_string(connection(url)).create_container("bucket")
        yield url


def connection(url: str) -> str:
    of = f"AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={url}/{ACCOUNT};"
    return f"DefaultEndpointsProtocol=http;{of}"


@pytest.fixture(params=["gs", "abfs"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Store]:
    """Requests go through a proxy; the environment names it as a user's would."""
    upstream = request.getfixturevalue("google" if request.param == "gs" else "azure")

    def refuses(method: str, path: str, body: bytes) -> int:
        """412 for an object that is there and is to be created, which Google's emulator does not know."""
        asked = parse_qs(urlsplit(path).query)
        if request.param != "gs" or method != "POST" or "ifGenerationMatch" not in asked:
            return 0
        name = body.split(b'"name": "', 1)[1].split(b'"', 1)[0].decode()
        try:
            urlopen(f"{upstream}/storage/v1/b/bucket/o/{quote(name, safe='')}", timeout=30).close()
        except HTTPError:
            return 0
        return 412

    with proxied(upstream, refuses) as (endpoint, trouble):
        if request.param == "gs":
            monkeypatch.setenv("STORAGE_EMULATOR_HOST", endpoint)
            monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # it asks another service first
            monkeypatch.setenv("NO_GCE_CHECK", "true")
        else:
            monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection(endpoint))
        yield Store(f"{request.param}://bucket/{tmp_path.name}/checkpoints", trouble)


def test_save_restore_and_retention_on_other_clouds(store: Store) -> None:
    assert find(store.url, True) == []
    saver = Saver(store.url, alone(), TensorStaging(), keep_last=2)
    for step in (1, 2, 3):
        saver.save(step, state(step), {"rng": {"n": torch.tensor(step)}})
    assert saver.wait() == f"{store.url}/step-000003"
    assert saver.last_saved is not None
    assert saver.last_saved.written_bytes < 0.4 * saver.last_saved.total_bytes, "what is frozen is there already"
    assert [found.step for found in find(store.url, True)] == [3, 2]
    restored = restore(store.url, True, alone())
    assert restored is not None
    assert torch.equal(restored.shared["model"]["w"], state(3)["model"]["w"])
    assert not verify(f"{store.url}/step-000002").problems
    assert RemoteStorage(store.url).list("parts") == []


def test_files_on_other_clouds_are_whole_ranges_and_lists(store: Store) -> None:
    storage = RemoteStorage(store.url)
    assert (storage.list(), storage.children(), storage.size("a/b")) == ([], [], None)
    with pytest.raises(NotThere):
        storage.read("a/b")
    storage.delete("a/b")
    for name, content in (("a/b", b"hello"), ("a/empty", b""), ("c", b"c")):
        storage.write(name, content)
    assert (storage.read("a/b", 1, 3), storage.read("a/b", 4, 9), storage.read("a/b", 9, 3)) == (b"ell", b"o", b"")
    assert (storage.read("a/empty"), storage.size("a/empty"), storage.size("a/b")) == (b"", 0, 5)
    assert (storage.list(), storage.list("a"), storage.children()) == (
        ["a/b", "a/empty", "c"],
        ["a/b", "a/empty"],
        ["a", "c"],
    )
    assert storage.entries()["a/b"].modified > 1.5e9


def test_object_is_created_once_on_other_clouds(store: Store) -> None:
    """Also by one that has looked before the other has written: the store itself refuses the second."""
    storage = RemoteStorage(store.url)
    assert storage.create("lock", b"one")
    assert not storage.create("lock", b"two")

    class Blind(RemoteStorage):
        def size(self, name: str) -> int | None:
            return None

    assert not Blind(store.url).create("lock", b"three")
    assert storage.read("lock") == b"one"
    held = hold_folder(storage, "this launch", resume=False)
    with pytest.raises(CheckpointError, match="is in use by"):
        hold_folder(storage, "another launch", resume=False)
    held.release()


def test_refused_requests_to_other_clouds_are_retried(store: Store) -> None:
    """With a status for which neither library tries again by itself, and waits for seconds."""
    store.trouble.every, store.trouble.status = 5, 403
    saver = Saver(store.url, alone(), TensorStaging())
    for step in (1, 2):
        saver.save(step, state(step), {})
    saver.close()
    assert store.trouble.count > 10
    restored = restore(store.url, True, alone())
    assert restored is not None
    assert torch.equal(restored.shared["model"]["w"], state(2)["model"]["w"])


def test_failed_saves_leave_the_last_good_one_on_other_clouds(store: Store) -> None:
    storage = RemoteStorage(store.url, tries=2, first_pause_s=0.01)
    store.trouble.status = 403
    saver = Saver(storage, alone(), TensorStaging(), keep_last=1)
    saver.save(1, state(1), {}, wait=True)
    for writes in (0, 1, 3):  # that still go through: two chunks and a part come before the manifest
        store.trouble.writes_left = writes
        saver.save(2, state(2 + writes), {"rng": {"n": torch.tensor(writes)}})
        with pytest.raises(CheckpointError, match="cannot write"):
            saver.wait()
        store.trouble.writes_left = None
        restored = restore(store.url, True, alone())
        assert restored is not None
        assert restored.step == 1
        assert torch.equal(restored.shared["model"]["w"], state(1)["model"]["w"])
