"""The job that a launcher wrote for its ranks, read by one of them: that very file, or it is refused."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import torch

from distributed.core.atomic import Sealed, check_code, open_sealed
from distributed.train.evaluation_job import EvaluationJob
from distributed.train.rank_job import RankJob

PICKLE = "/data.pkl"  # of the archive that torch.save makes: what runs as code when it is loaded


def load_job(run_dir: Path, sealed: Sealed) -> RankJob | EvaluationJob:
    """The job that the launcher wrote: a pickle, and refused unless it is that very file."""
    handle = open_sealed(run_dir, sealed)
    try:
        with os.fdopen(os.dup(handle), "rb") as file, zipfile.ZipFile(file) as archive:
            names = [name for name in archive.namelist() if name.endswith(PICKLE)]
            check_code(run_dir / sealed.name, b"".join(map(archive.read, names)), sealed)
        opened = f"/proc/self/fd/{handle}"  # the file that was checked, even if its name now belongs to another
        path = opened if os.path.exists(opened) else run_dir / sealed.name
        job: RankJob | EvaluationJob = torch.load(path, mmap=True, weights_only=False, map_location="cpu")
        return job
    except zipfile.BadZipFile:
        check_code(run_dir / sealed.name, b"", sealed)
        raise
    finally:
        os.close(handle)
