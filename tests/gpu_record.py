"""The record of the GPU suite: what it came to, where, and of which sources, so that `make check` can tell its age.

python -m tests.gpu_record                       a line: how many source files have changed since
python -m tests.gpu_record merge PART PART …     one record of a suite that was run in parts, each with --gpu-record
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks/gpu-suite.json"

Record = dict[str, Any]


def digests(root: Path) -> dict[str, str]:
    """Of every source file under src/; git is not asked, which a copied tree may lack."""
    paths = sorted((root / "src").rglob("*.py"))
    return {path.relative_to(root).as_posix(): _digest(path.read_bytes()) for path in paths}


def _digest(content: bytes) -> str:
    return sha256(content).hexdigest()[:8]


def make(
    root: Path,
    counts: Mapping[str, int],
    modules: Sequence[str],
    *,
    seconds: float,
    date: str,
    where: Mapping[str, str],
) -> Record:
    """A record of tests that were run; `modules` are the files that they are in."""
    files = digests(root)
    return {
        **{name: counts.get(name, 0) for name in ("passed", "failed", "skipped")},
        "seconds": round(seconds, 1),
        **where,
        "date": date,
        "src": _whole(files),
        "modules": sorted(set(modules)),
        "files": files,
    }


def _whole(files: Mapping[str, str]) -> str:
    return _digest("".join(f"{path} {digest}\n" for path, digest in files.items()).encode()) if files else ""


def merge(parts: Sequence[Record], root: Path = ROOT) -> Record:
    """One record of all parts; they are of the same sources, and together of every file of tests/gpu."""
    first = parts[0]
    if len({part["src"] for part in parts}) > 1:
        raise SystemExit("the parts are of different sources: run all of them on the same tree")
    modules = sorted({name for part in parts for name in part["modules"]})
    missing = [name for name in suite(root) if name not in modules]
    if missing:
        raise SystemExit(f"no part has run {', '.join(missing)}")
    totals = {name: sum(part[name] for part in parts) for name in ("passed", "failed", "skipped")}
    seconds = round(sum(part["seconds"] for part in parts), 1)
    return first | totals | {"seconds": seconds, "date": max(part["date"] for part in parts), "modules": modules}


def suite(root: Path = ROOT) -> list[str]:
    """The files that the suite is made of."""
    return sorted(path.relative_to(root).as_posix() for path in (root / "tests/gpu").glob("test_*.py"))


def write(record: Record, path: Path) -> None:
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def age(root: Path = ROOT, path: Path = RECORD) -> str:
    """How far the sources have moved since the suite was run, as a line."""
    if not path.exists():
        return "the GPU suite has left no record: run `make test-gpu` on a machine with a GPU"
    record, now = json.loads(path.read_text(encoding="utf-8")), digests(root)
    then: dict[str, str] = record["files"]
    changed = [name for name in then.keys() | now.keys() if then.get(name) != now.get(name)]
    result = f"had {record['failed']} failures" if record["failed"] else f"passed ({record['passed']} tests)"
    left_out = [name for name in suite(root) if name not in record["modules"]]
    return (
        f"{len(changed)} of {len(now)} source files changed since the GPU suite {result} on {record['date'][:10]}"
        f" ({record['device']})" + (f"; it has not run {', '.join(left_out)}" if left_out else "")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="The record of the GPU suite.")
    commands = parser.add_subparsers(dest="command")
    merging = commands.add_parser("merge", help="Make one record of a suite that was run in parts.")
    merging.add_argument("parts", nargs="+", type=Path)
    merging.add_argument("--to", type=Path, default=RECORD)
    asked = parser.parse_args()
    if asked.command == "merge":
        write(merge([json.loads(part.read_text(encoding="utf-8")) for part in asked.parts]), asked.to)
    print(age(path=asked.to if asked.command == "merge" else RECORD))


if __name__ == "__main__":
    main()
