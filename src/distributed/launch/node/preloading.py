"""What the warm parent imports for a program, by its source: nothing whose variables the program sets before itself.

A package reads many variables of the environment once, when it is imported. A script that writes
`os.environ["HF_HOME"] = …` above `import transformers` counts on that order, so its ranks import that themselves.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from distributed.launch.node.import_order import Event, Import, Write, imported, parse, read_events

# torch._dynamo is what the first optimizer or DDP imports.
ALWAYS = ("torch", "torch.distributed", "torch._dynamo", "numpy", "distributed.worker", "distributed.trainers.trainer")
# Packages that start no threads which a fork would miss, and touch no GPU, when they are imported.
_SAFE_BEFORE_FORK = """
PIL accelerate datasets einops h5py joblib lightning lightning_utilities matplotlib networkx numpy omegaconf pandas peft
pydantic pytorch_lightning requests rich safetensors scipy sentencepiece sklearn sympy tiktoken timm tokenizers
torchaudio torchmetrics torchvision tqdm transformers yaml
"""
SAFE_BEFORE_FORK = frozenset(_SAFE_BEFORE_FORK.split())
# Variables that only some packages read when they are imported, and torch does not: how their names begin.
_READERS = (
    (("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "DATASETS_", "ACCELERATE_", "MPL"), frozenset[str]()),
    (("TF_", "KERAS_"), frozenset({"tensorflow", "keras"})),
)
# Variables that are read later: when a device, a process group or a logger is made.
_READ_LATE = (
    *("CUDA_", "NCCL_", "TORCH_NCCL_", "GLOO_", "MASTER_", "WANDB_", "MLFLOW_", "COMET_", "NEPTUNE_", "AWS_", "RAY_"),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "TOKENIZERS_PARALLELISM", "PYTHONHASHSEED", "DISTRIBUTED_", "NO_PROXY"),
)
_OURS = "distributed"  # reads variables when they are used
_WITH = {"numpy": "torch"}  # which is imported with another one
_IMPORT_TORCH = frozenset(
    [
        "accelerate",
        "distributed",
        "lightning",
        "peft",
        "pytorch_lightning",
        "timm",
        "torchaudio",
        "torchmetrics",
        "torchvision",
    ]
)


@dataclass(frozen=True)
class Preloads:
    """The modules to import before the fork; none where what the engine needs must not be among them."""

    modules: tuple[str, ...]
    left_out: tuple[str, ...] = ()  # packages
    why: str = ""  # the line of the program that is the reason


def preloads(path: str | os.PathLike[str] | None, always: tuple[str, ...] = ALWAYS) -> Preloads:
    """The modules to preload for a program: its engine's, and the known ones that it imports at its top.

    None stands for a program without source. It is parsed, not run; a syntax error is left to the rank.

    >>> _ = (tmp / "train.py").write_text("import os, my_model, sklearn.svm as s, torch\\nfrom tqdm.auto import tqdm")
    >>> preloads(tmp / "train.py").modules[len(ALWAYS):]
    ('sklearn.svm', 'tqdm.auto')
    >>> _ = (tmp / "train.py").write_text("import os, torch\\nos.environ['HF_HOME'] = '/hf'\\nimport datasets")
    >>> preloads(tmp / "train.py").left_out, preloads(tmp / "train.py").why
    (('datasets',), 'train.py:2 sets HF_HOME before')
    """
    tree = None if path is None else parse(path)
    if path is None or tree is None:
        return Preloads(always)
    known = [name for name in imported(tree.body) if name.partition(".")[0] in SAFE_BEFORE_FORK]
    wanted = tuple(dict.fromkeys((*always, *known)))
    packages = tuple(dict.fromkeys(name.partition(".")[0] for name in wanted))
    engine = frozenset(name.partition(".")[0] for name in always) - {_OURS}
    events = read_events(os.fspath(path), tree, {*packages, *SAFE_BEFORE_FORK, _OURS})
    last = max((place for place, event in enumerate(events) if _imports_more_than_python(event)), default=0)
    reasons: dict[str, str] = {}  # by package
    begun: set[str] = set()  # packages that are imported before a line in any case
    for event in events[:last]:
        if isinstance(event, Import):
            if event.is_sure:
                begun |= {event.package, "torch"} if event.package in _IMPORT_TORCH else {event.package}
            continue
        for package in packages:
            if package != _OURS and _concerns(event, package, engine) and _WITH.get(package, package) not in begun:
                what = f"sets {event.name}" if event.name else "changes the environment"
                reasons.setdefault(package, f"{event.file}:{event.line} {what} before")
    kept = tuple(name for name in wanted if name.partition(".")[0] not in reasons)
    if not set(always) <= set(kept):  # a fork would save next to nothing
        return Preloads((), tuple(reasons), next(iter(reasons.values())))
    return Preloads(kept, tuple(reasons), next(iter(reasons.values()), ""))


def _imports_more_than_python(event: Event) -> bool:
    return isinstance(event, Import) and event.package not in sys.stdlib_module_names


def _concerns(write: Write, package: str, engine: frozenset[str]) -> bool:
    """Whether a package, or one that it imports, may read the variable at its import.

    Those of the engine are known for what they do not read.
    """
    if write.name.startswith(_READ_LATE):
        return False
    readers = next((packages for names, packages in _READERS if write.name.startswith(names)), None)
    return readers is None or package not in engine or package in readers
