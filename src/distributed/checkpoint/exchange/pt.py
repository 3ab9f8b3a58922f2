"""`.pt` files: torch.load with weights_only, so that a pickle that needs code is refused and not run."""

from __future__ import annotations

import pickle
import warnings
import zipfile
from pathlib import Path
from typing import IO, Any

import torch

from distributed.core.errors import CheckpointError


def read_pt(path: Path) -> Any:
    """What a `.pt` holds; its tensors stay on the disk until they are used, where the file allows it."""
    try:
        size = path.stat().st_size
    except OSError as failed:
        raise CheckpointError(f"{path} cannot be read", why=failed.strerror or str(failed)) from failed
    return load_weights(path, str(path), size)


def load_weights(source: Path | IO[bytes], where: str, size: int) -> Any:
    maps = isinstance(source, Path) and zipfile.is_zipfile(source)
    try:
        _check_inflation(source, where, size)
        if not isinstance(source, Path):
            source.seek(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pickle protocols: a file that is refused has an error of its own
            return torch.load(source, map_location="cpu", weights_only=True, mmap=maps)
    except CheckpointError:
        raise
    except pickle.UnpicklingError as refused:
        raise CheckpointError(
            f"{where} needs code to be read, and is refused",
            why=_reason(refused),
            do="where you trust it, load it and keep the weights only: torch.save(model.state_dict(), 'weights.pt')",
        ) from refused
    except Exception as bad:  # a file that is not what its name says can fail in torch in any way
        raise CheckpointError(
            f"{where} is not a file that torch.save wrote", why=_reason(bad), do="check the file, or copy it again"
        ) from bad


def _check_inflation(source: Path | IO[bytes], where: str, size: int) -> None:
    """torch stores without compression; a small file that unpacks to a huge one was not written by it."""
    if not zipfile.is_zipfile(source):
        return
    with zipfile.ZipFile(source) as archive:
        unpacked = sum(entry.file_size for entry in archive.infolist())
    if unpacked > size:
        raise CheckpointError(
            f"{where} is refused: its {size} bytes unpack to {unpacked}",
            why="torch.save does not compress",
            do="do not use this file unless you know who made it",
        )


def _reason(failed: Exception) -> str:
    """torch's message names the class that was refused somewhere in the middle of its advice."""
    lines = [line.strip() for line in str(failed).splitlines() if line.strip()]
    named = [line for line in lines if "GLOBAL" in line or "Unsupported" in line]
    return f"{type(failed).__name__}: {(named or lines or [''])[0][:300]}"
