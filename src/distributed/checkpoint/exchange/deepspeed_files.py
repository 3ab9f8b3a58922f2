"""The files of a DeepSpeed folder: which there must be, which are missing, and which belong to another save."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed.checkpoint.exchange.safe_unpickle import Inert, InertFile, Stored
from distributed.checkpoint.storage.files import check_name
from distributed.core.errors import CheckpointError, first_of

_LATEST = ("latest", "latest_universal")
_MAX_TAG_BYTES = 1024
_MAX_RANKS = 10**5
_OPTIMIZER = re.compile(
    r"(?P<kind>(?:bf16_|fp16_)?)zero_pp_rank_(?P<rank>\d{1,6})_mp_rank_(?P<mp>\d+)_optim_states\.pt"
)
_MODEL = re.compile(r"(?:zero_pp_rank_(?P<rank>\d{1,6})_)?mp_rank_(?P<mp>\d+)_model_states\.pt")
_STATES = re.compile(r".*_(?:model|optim)_states\.pt|layer_.*states\.pt")
_PARTITIONS = "single_partition_of_fp32_groups"  # of stages 1 and 2
_COMMON = "zero/optimizer_state.pt"  # of a universal folder

Part = tuple[InertFile, Stored]  # a tensor and the file that it lies in


@dataclass(frozen=True)
class Folder:
    """One save of DeepSpeed, of which every file is there."""

    path: Path
    stage: int  # of ZeRO; 0 without
    ranks: int
    models: list[InertFile]  # of each rank in stage 3, else one
    optimizers: list[InertFile]  # of each rank; none in stage 0 and in a universal folder
    universal: InertFile | None = None  # what a universal folder has beside its parameters

    @property
    def param_shapes(self) -> list[Any]:
        shapes = self.models[0].tree.get("param_shapes")
        if not isinstance(shapes, list) or not all(isinstance(group, dict) for group in shapes):
            raise self.damaged(f"{self.models[0].path.name} does not say which parameters are trained")
        return shapes

    def parameter_files(self, name: str) -> dict[str, InertFile]:
        """Those of one parameter in a universal folder, by what they hold."""
        folder = self.path / "zero" / check_name(name)
        if not (folder / "fp32.pt").is_file():
            raise _missing_files(
                self.path, [f"zero/{name}/fp32.pt"], "it is the weights of a parameter that is trained"
            )
        return {path.stem: InertFile(path) for path in sorted(folder.glob("*.pt"))}

    def damaged(self, why: str) -> CheckpointError:
        return _damaged(self.path, why)


def is_deepspeed(path: Path) -> bool:
    """Whether DeepSpeed wrote this folder: all its saves, one of them, or a universal one.

    >>> is_deepspeed(Path("nowhere"))
    False
    """
    if not path.is_dir():
        return False
    return any((path / name).is_file() for name in _LATEST) or any(
        _STATES.fullmatch(file.name) for file in path.iterdir()
    )


def is_part(path: Path) -> bool:
    """Whether it is one of the files of a save, which alone are not the model."""
    return path.is_file() and _STATES.fullmatch(path.name) is not None


def open_folder(source: str) -> Folder:
    """The newest save of a folder, or the one that the folder itself is."""
    path = _tag_folder(Path(source))
    names = sorted(file.name for file in path.iterdir() if _STATES.fullmatch(file.name))
    models = {name: found for name in names if (found := _MODEL.fullmatch(name))}
    optimizers = {name: found for name in names if (found := _OPTIMIZER.fullmatch(name))}
    _check_kinds(path, names, [*models.values(), *optimizers.values()])
    if not models:
        missing = "zero_pp_rank_0_mp_rank_00_model_states.pt" if optimizers else "mp_rank_00_model_states.pt"
        raise _missing_files(path, [missing], "there is no file of the model's states")
    opened = _by_rank(path, models)
    first = _read(path, next(iter(opened.values())))
    common = path / _COMMON
    if common.is_file():
        universal = _read(path, common)
        stage, ranks = (
            _stage(path, universal.tree),
            _agreed_ranks(path, {first.path.name: first.tree.get("dp_world_size")}),
        )
        return Folder(path, stage, ranks, _models(path, stage, ranks, opened, first), [], universal)
    if not optimizers and not first.tree.get("param_shapes"):
        return Folder(path, 0, 1, [first], [])
    return _open_ranks(path, opened, _by_rank(path, optimizers), first)


def _open_ranks(path: Path, models: dict[int, Path], optimizers: dict[int, Path], first: InertFile) -> Folder:
    """The folder of a save with ZeRO: how many ranks there were, every file says."""
    read = {rank: _read(path, file) for rank, file in optimizers.items()}
    counts = {file.path.name: _count(path, file) for file in read.values()}
    ranks = _agreed_ranks(path, counts or {first.path.name: first.tree.get("dp_world_size")})
    kind = next((_kind(file.name) for file in optimizers.values()), "")
    _check_ranks(path, ranks, f"{kind}zero_pp_rank_{{}}_mp_rank_00_optim_states.pt", optimizers)
    stage = _stage(path, read[0].tree["optimizer_state_dict"])
    return Folder(path, stage, ranks, _models(path, stage, ranks, models, first), [read[rank] for rank in range(ranks)])


def _models(path: Path, stage: int, ranks: int, held: dict[int, Path], first: InertFile) -> list[InertFile]:
    """In stage 3 every rank has a file with its parts of what is not trained."""
    if stage != 3:
        return [first]
    _check_ranks(path, ranks, "zero_pp_rank_{}_mp_rank_00_model_states.pt", held)
    files = [first, *(_read(path, held[rank]) for rank in range(1, ranks))]
    saves = {file.path.name: (file.tree.get("dp_world_size"), file.tree.get("global_steps")) for file in files}
    if len(set(saves.values())) != 1:
        lines = ", ".join(f"{name} of {world} ranks at step {step}" for name, (world, step) in saves.items())
        raise _damaged(path, f"its files are of different saves: {lines[:400]}")
    return files


def _agreed_ranks(path: Path, counts: dict[str, Any]) -> int:
    """How many ranks saved it, when all files say the same."""
    if len(set(map(str, counts.values()))) != 1:
        lines = ", ".join(f"{name} of {str(count)[:20]}" for name, count in list(counts.items())[:8])
        raise _damaged(path, f"its files are of saves with differing numbers of ranks: {lines}")
    (count,) = set(counts.values())
    if not isinstance(count, int) or not 0 < count <= _MAX_RANKS:
        raise _damaged(path, f"{next(iter(counts))} is of {str(count)[:20]} ranks")
    return count


def _check_ranks(path: Path, ranks: int, pattern: str, held: dict[int, Path]) -> None:
    missing = [pattern.format(rank) for rank in range(ranks) if rank not in held]
    if missing:
        raise _missing_files(path, missing, f"{ranks} ranks saved it")
    extra = [file.name for rank, file in held.items() if rank >= ranks]
    if extra:
        raise _damaged(path, f"{ranks} ranks saved it, and {', '.join(extra[:8])} is of a save by more")


def _tag_folder(path: Path) -> Path:
    """Where the files are: `latest` names a folder beside it, and may name nothing else."""
    latest = next((path / name for name in _LATEST if (path / name).is_file()), None)
    if latest is None or any(_STATES.fullmatch(file.name) for file in path.iterdir()):
        return path
    with open(latest, "rb") as file:
        tag = file.read(_MAX_TAG_BYTES + 1).decode(errors="replace").strip()
    try:
        folder = path / check_name(tag)
    except CheckpointError as bad:
        raise CheckpointError(
            f"{latest} names {tag[:80]!r}, which is not the name of a folder in {path}",
            why="names are relative and hold letters, digits and ._=- only, so that none can point outside its folder",
            do="do not use this checkpoint unless you know who made it; or pass the folder of one save",
        ) from bad
    if not folder.is_dir():
        held = sorted(entry.name for entry in path.iterdir() if entry.is_dir())
        raise CheckpointError(
            f"{latest} names {tag}, and there is no such folder",
            why=f"missing: {folder}; {path} holds {', '.join(held[:8]) or 'no folder'}",
            do="copy it again" + (f", or pass one of these: {path / held[-1]}" if held else ""),
        )
    return folder


def _check_kinds(path: Path, names: list[str], known: Iterable[re.Match[str]]) -> None:
    """Refuse what a whole model cannot be put together from here."""
    if not names:
        raise CheckpointError(
            f"{path} holds no files of DeepSpeed", why="the folder has no *_model_states.pt", do="pass another folder"
        )
    matched = {found.string: found for found in known}
    other = [name for name in names if name not in matched]
    split = [name for name, found in matched.items() if int(found["mp"])]
    if other or split:
        kind = "of experts or a pipeline" if other else "of tensor parallelism"
        raise CheckpointError(
            f"{path} holds parts {kind}, which are not read here",
            why=f"{(other or split)[0]} is one of them",
            do="let DeepSpeed save the whole model, and import that file",
        )


def _by_rank(path: Path, found: dict[str, re.Match[str]]) -> dict[int, Path]:
    held: dict[int, Path] = {}
    for name, match in found.items():
        rank = int(match["rank"] or 0)
        if rank in held:
            raise _damaged(path, f"{held[rank].name} and {name} are both of rank {rank}, from two saves")
        held[rank] = path / name
    return dict(sorted(held.items()))


def _read(folder: Path, path: Path) -> InertFile:
    file = InertFile(path)
    if not isinstance(file.tree, dict):
        raise _damaged(folder, f"{path.name} does not hold what DeepSpeed writes there")
    wanted = "module" if _MODEL.fullmatch(path.name) else "optimizer_state_dict"
    if path.name != Path(_COMMON).name and not isinstance(file.tree.get(wanted), dict):
        raise _damaged(folder, f"{path.name} has no {wanted}")
    return file


def _count(path: Path, file: InertFile) -> Any:
    """How many ranks' parts a file knows of; a list has a number for each group of parameters."""
    count = file.tree["optimizer_state_dict"].get("partition_count")
    if isinstance(count, list) and len(set(count)) > 1:
        raise _damaged(path, f"{file.path.name} has groups that are cut among {count[:8]} ranks, as of experts")
    return count[0] if isinstance(count, list) and count else count


def _stage(path: Path, state: dict[str, Any]) -> int:
    stage = state.get("zero_stage", 1 if _PARTITIONS in state else None)  # one of its optimizers does not say
    stage = stage.args[0] if isinstance(stage, Inert) and stage.args else stage
    if stage not in (1, 2, 3):
        raise _damaged(path, f"its ZeRO stage is not 1, 2 or 3 but {str(stage)[:40]}")
    return int(stage)


def _kind(name: str) -> str:
    found = _OPTIMIZER.fullmatch(name)
    return found["kind"] if found else ""


def _missing_files(path: Path, names: list[str], why: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is not complete: {len(names)} of its files are missing",
        why=f"{why}; missing: {first_of(names, 8)}",
        do="copy them here from the machines that saved them; every rank's part is needed",
    )


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is not a sound DeepSpeed checkpoint", why=why, do="copy it again, or use another one"
    )
