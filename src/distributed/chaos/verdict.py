"""Two runs compared by what they left on the disk: their last weights, and the samples that they used."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

from distributed.chaos.report import Samples, WeightsComparison
from distributed.checkpoint.exchange.catalog import open_all, open_one
from distributed.checkpoint.exchange.diff import compare_tensors
from distributed.checkpoint.exchange.named_tensors import Leaf, TensorReader, leaf_tree, walk
from distributed.checkpoint.format.manifest import Manifest, step_name
from distributed.checkpoint.restore.reading import verify
from distributed.checkpoint.storage.manifests import read_manifest
from distributed.core.errors import CheckpointError
from distributed.core.events import StepEnded
from distributed.core.run_dir import RunDir
from distributed.data.checks.ledger import read_ledger

_SAME_LOSS = 1e-4  # kernels that are not deterministic differ by less within a few steps


def compare_weights(undisturbed: Path, disturbed: Path, step: int) -> WeightsComparison:
    """The model in the checkpoints of the last step, whose every byte is read. Both are checkpoint_dirs."""
    try:
        a, b = (open_one(str(folder / step_name(step))) for folder in (undisturbed, disturbed))
        problems = verify(b.path).problems
        if problems:
            return WeightsComparison(False, 0, problem=f"{b.path} is damaged: {problems[0]}")
        in_a, in_b = (_model(opened.manifest) for opened in (a, b))
        if in_a.keys() != in_b.keys():
            only = sorted(in_a.keys() ^ in_b.keys())
            return WeightsComparison(False, len(in_a), problem=f"only one of the runs has {', '.join(only[:3])}")
        readers = TensorReader(a.storage, a.manifest), TensorReader(b.storage, b.manifest)
        changes = []
        for name in in_a:
            if in_a[name].entry.digest != in_b[name].entry.digest:
                found = compare_tensors(name, readers[0].tensor(in_a[name]), readers[1].tensor(in_b[name]))
                changes += [found] if found is not None else []
    except CheckpointError as failed:
        return WeightsComparison(False, 0, problem=failed.problems[0].what)
    if not changes:
        return WeightsComparison(True, len(in_a))
    worst = max(changes, key=lambda change: math.inf if math.isnan(change.largest) else change.largest)
    first = first_difference(undisturbed, disturbed)
    return WeightsComparison(False, len(in_a), len(changes), worst.largest, worst.name, first)


def first_difference(undisturbed: Path, disturbed: Path) -> int | None:
    """The step of the first checkpoint that both runs kept and whose model differs."""
    digests = []
    for folder in (undisturbed, disturbed):
        found: dict[int, str] = {}
        for _, storage, name in open_all(str(folder)):
            try:
                manifest = read_manifest(storage, name)
                found[manifest.step] = manifest.digests["model"]
            except (CheckpointError, KeyError):  # one that was damaged on purpose
                continue
        digests.append(found)
    return min((step for step, digest in digests[0].items() if digests[1].get(step, digest) != digest), default=None)


def began_alike(undisturbed: Path, disturbed: Path, first_fault: int) -> bool:
    """By what both run directories hold of the time before the step of the first fault; True where that is nothing."""
    runs = RunDir(undisturbed), RunDir(disturbed)
    folders = runs[0].checkpoints, runs[1].checkpoints
    data = [_data(folder) for folder in folders]
    if any(data[1].get(name, digest) != digest for name, digest in data[0].items()):
        return False
    losses = [_losses(run.events, first_fault) for run in runs]
    shared = losses[0].keys() & losses[1].keys()
    if any(not math.isclose(losses[0][step], losses[1][step], rel_tol=_SAME_LOSS) for step in shared):
        return False
    first = first_difference(*folders)
    return first is None or first > first_fault


def _data(folder: Path) -> dict[str, str]:
    """What the newest readable checkpoint says of the data that it was trained on, part by part."""
    for _, storage, name in reversed(list(open_all(str(folder)))):
        try:
            return dict(read_manifest(storage, name).meta.get("run", {}).get("data", {}))
        except CheckpointError:
            continue
    return {}


def _losses(path: Path, until: int) -> dict[int, float]:
    found: dict[int, float] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        event = json.loads(line)
        if event.get("event") == StepEnded.__name__ and event["step"] <= until:
            found.setdefault(event["step"], event["loss"])
    return found


def compare_samples(undisturbed: Path, disturbed: Path) -> Samples | None:
    """Both are run directories. None where the undisturbed run wrote no ledger."""
    expected, used = _used(undisturbed), _used(disturbed)
    if not expected:
        return None
    return Samples(used.total(), lost=(expected - used).total(), repeated=(used - expected).total())


def _used(run_dir: Path) -> Counter[tuple[int, int]]:
    """How often each (epoch, sample) was used."""
    used: Counter[tuple[int, int]] = Counter()
    for path in RunDir(run_dir).ledger.files():
        for entry in read_ledger(path):
            used.update((entry.epoch, index) for index in entry.indices.tolist())
    return used


def _model(manifest: Manifest) -> dict[str, Leaf]:
    leaves = walk(leaf_tree(manifest.shared))
    return {name: leaf for name, leaf in leaves if name.startswith("model/") and isinstance(leaf, Leaf)}
