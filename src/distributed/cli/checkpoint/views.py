"""What checkpoints hold, whether they are sound and how they differ, as tables and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import yaml

from distributed.checkpoint.exchange.catalog import Listing, Opened, list_checkpoints, open_all, open_one
from distributed.checkpoint.exchange.diff import Difference, compare
from distributed.checkpoint.exchange.named_tensors import Leaf, leaf_tree, walk
from distributed.checkpoint.exchange.verify import verify_all
from distributed.checkpoint.format.manifest import FORMAT, Part, line_of
from distributed.cli.checkpoint.text import age, byte_bar, console, size, table
from distributed.core.errors import CheckpointError, Problem


def show_listing(directory: str, as_json: bool) -> None:
    listing = list_checkpoints(directory)
    if as_json:
        rows = [asdict(row) | {"sound": row.is_sound} for row in listing.rows]
        whole = {"root": listing.root, "stored_bytes": listing.stored_bytes, "unused_bytes": listing.unused_bytes}
        print(json.dumps(whole | {"checkpoints": rows}, indent=2))
        return
    screen = console()
    screen.print(_listing_table(listing))
    unused = f", {size(listing.unused_bytes)} of it in no checkpoint" if listing.unused_bytes else ""
    screen.print(f"{listing.root}: {len(listing.rows)} checkpoints, {size(listing.stored_bytes)} stored{unused}")


def show_contents(path: str, tensors: bool, as_json: bool) -> None:
    opened = open_one(path)
    found = contents(opened, tensors)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    screen = console()
    screen.print(f"{opened.path}", style="bold")
    for label in ("step", "created", "world_size", "format", "parameters", "metric"):
        if found[label] is not None:
            extra = f" ({age(str(found[label]))})" if label == "created" else ""
            screen.print(f"  {label.replace('_', ' '):<12} {found[label]}{extra}")
    screen.print(f"  {'size':<12} {size(found['bytes'])} in {found['chunks']} chunks")
    screen.print(f"  {'versions':<12} {', '.join(f'{name} {text}' for name, text in found['versions'].items())}")
    screen.print()
    components = table("component", "tensors", "size", "other values", "digest", right=("tensors", "size"))
    for name, part in found["components"].items():
        digest = str(part["digest"])[:12]
        components.add_row(name, str(part["tensors"]), size(part["bytes"]), str(part["scalars"]), digest)
    screen.print(components)
    for label in ("progress", "meta"):
        if found[label]:
            screen.print(f"\n{'saved with it' if label == 'meta' else label}", style="bold")
            screen.print(yaml.safe_dump(found[label], sort_keys=False, allow_unicode=True).rstrip())
    if tensors:
        listed = table("tensor", "type", "shape", "placement", "size", "digest", right=("size",))
        for name, entry in found["tensors"].items():
            shape = " × ".join(map(str, entry["shape"])) or "scalar"
            tied = f"tied to {entry['tied_to']}" if entry["tied_to"] else entry["placement"]
            listed.add_row(name, entry["dtype"], shape, tied, size(entry["bytes"]), entry["digest"][:12])
        screen.print()
        screen.print(listed)


def contents(opened: Opened, tensors: bool) -> dict[str, Any]:
    """Everything that a manifest holds, as plain data."""
    manifest = opened.manifest
    parts = [("", manifest.shared), *((f"rank-{rank}/", part) for rank, part in enumerate(manifest.own))]
    components: dict[str, Any] = {}
    for prefix, part in parts:
        components |= {f"{prefix}{name}": _component(part, name) for name in part.skeleton}
    for name, known in components.items():
        known["digest"] = manifest.digests[name]
    model = list(_tensors(manifest.shared, "model").values())
    parameters = sum(leaf.entry.nbytes // leaf.entry.item_bytes for leaf in model) if model else None
    places = walk(leaf_tree(manifest.shared).get("progress", {}))
    progress = {name: value for name, value in places if not isinstance(value, Leaf)}
    found: dict[str, Any] = {
        "path": opened.path,
        "step": manifest.step,
        "created": manifest.created,
        "world_size": manifest.world_size,
        "format": FORMAT,
        "metric": manifest.metric,
        "parameters": parameters,  # of the model, with its buffers; tied ones count once
        "bytes": manifest.nbytes,
        "chunks": len(manifest.chunks),
        "versions": dict(manifest.versions),
        "components": components,
        "progress": progress,
        "meta": dict(manifest.meta),
    }
    if tensors:
        found["tensors"] = {}
        for prefix, part in parts:
            found["tensors"] |= _tensor_rows(prefix, part)
    return found


def show_verification(path: str) -> None:
    found = open_all(path)
    with byte_bar("verifying") as progress:
        verdicts = verify_all(found, progress=progress)
    screen = console()
    for verdict in verdicts:
        if not verdict.problems:
            screen.print(f"{verdict.path}: sound ({verdict.chunks} chunks, {size(verdict.total_bytes)})", style="green")
    bad = [verdict for verdict in verdicts if verdict.problems]
    if bad:
        raise CheckpointError(
            [
                Problem(
                    f"{verdict.path} cannot be used",
                    why=";\n       ".join(verdict.problems[:20])
                    + (f";\n       and {len(verdict.problems) - 20} more" if len(verdict.problems) > 20 else ""),
                    do=f"use another one: distributed checkpoint ls {verdict.path.rpartition('/')[0] or '.'}",
                )
                for verdict in bad
            ]
        )


def show_difference(a: str, b: str, limit: int, as_json: bool) -> None:
    one, other = open_one(a), open_one(b)
    with byte_bar("comparing") as progress:
        found = compare(one, other, progress=progress)
    if as_json:
        print(json.dumps({"a": one.path, "b": other.path, "equal": found.is_empty} | _plain(found), indent=2))
        return
    screen = console()
    screen.print(f"A: {one.path}\nB: {other.path}")
    screen.print(
        f"{found.equal} tensors are equal, {len(found.changed)} differ; "
        f"{size(found.shared_bytes)} in the same chunks, of {size(found.bytes_a)} in A and {size(found.bytes_b)} in B"
    )
    if found.is_empty:
        screen.print("nothing differs", style="green")
    most = limit or None
    for label, names in (("only in A", found.only_a), ("only in B", found.only_b)):
        if names:
            screen.print(f"\n{label} ({len(names)})", style="bold")
            screen.print("\n".join([*names[:most], *_more(len(names), most)]))
    sections: list[tuple[str, Any, list[tuple[str, ...]], tuple[str, ...]]] = [
        ("another type or shape", ("tensor", "A", "B"), list(found.reshaped), ()),
        (
            "other values",
            ("tensor", "differing", "of", "largest difference"),
            [(c.name, str(c.differing), str(c.elements), f"{c.largest:g}") for c in found.changed],
            ("differing", "of", "largest difference"),
        ),
        ("other numbers and texts", ("name", "A", "B"), [(n, _short(x), _short(y)) for n, x, y in found.scalars], ()),
    ]
    for label, columns, rows, right in sections:
        if rows:
            screen.print(f"\n{label} ({len(rows)})", style="bold")
            made = table(*columns, right=right)
            for row in rows[:most]:
                made.add_row(*row)
            screen.print(made)
            for line in _more(len(rows), most):
                screen.print(line)


def _listing_table(listing: Listing) -> Any:
    has_metric = any(row.metric is not None for row in listing.rows)
    columns = ["step", "saved", "age", "size", "new", "ranks", *(["metric"] if has_metric else []), "status"]
    made = table(*columns, right=("step", "size", "new", "ranks", "metric"))
    for row in listing.rows:
        line = line_of(row.path.rpartition("/")[2])
        step = f"{row.step} ({line})" if line else str(row.step)  # of a run that went back, or that is not the first
        cells = [step, row.created or "?", age(row.created), size(row.total_bytes), size(row.new_bytes)]
        cells.append("?" if row.world_size is None else str(row.world_size))
        if has_metric:
            cells.append("" if row.metric is None else f"{row.metric:g}")
        made.add_row(*cells, row.status + (", best" if row.is_best else ""), style=None if row.is_sound else "red")
    return made


def _component(part: Part, name: str) -> dict[str, Any]:
    found = dict(walk(leaf_tree(part)[name]))
    stored = {value.stored: value for value in found.values() if isinstance(value, Leaf)}
    return {
        "tensors": sum(isinstance(value, Leaf) for value in found.values()),
        "bytes": sum(leaf.entry.nbytes for leaf in stored.values()),
        "scalars": sum(not isinstance(value, Leaf) for value in found.values()),
    }


def _tensors(part: Part, name: str) -> dict[str, Leaf]:
    """The tensors of a component by what they are stored as."""
    values = dict(walk(leaf_tree(part).get(name, {}))).values()
    return {value.stored: value for value in values if isinstance(value, Leaf)}


def _tensor_rows(prefix: str, part: Part) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    first: dict[str, str] = {}
    for path, value in walk(leaf_tree(part)):
        if isinstance(value, Leaf):
            owner = first.setdefault(value.stored, prefix + path)
            rows[prefix + path] = {
                "dtype": value.entry.dtype,
                "shape": list(value.entry.shape),
                "placement": value.entry.placement,
                "bytes": value.entry.nbytes,
                "digest": value.entry.digest,
                "tied_to": owner if owner != prefix + path else "",
            }
    return rows


def _plain(found: Difference) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(json.dumps(asdict(found), default=str))
    return document | {"equal_tensors": document.pop("equal")}


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _more(count: int, most: int | None) -> list[str]:
    return [f"and {count - most} more: --limit 0 shows all"] if most is not None and count > most else []
