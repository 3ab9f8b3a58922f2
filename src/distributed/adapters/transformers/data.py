"""The datasets of a transformers Trainer as DataLoaders: its order, its collator, without columns that are not used."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from distributed.adapters.transformers.models import base_model, label_names
from distributed.core.registry import import_extra
from distributed.data.drawn import SeededOrder


class PlainBatches:
    """A collator whose batches are dicts of tensors, of the columns that the model takes."""

    def __init__(self, collate: Any, columns: Sequence[str] | None) -> None:
        """`columns` None: all."""
        self._collate, self._columns = collate, columns

    def __call__(self, features: list[Any]) -> Any:
        if self._columns is not None:
            features = [self._with_known(feature) for feature in features]
        batch = self._collate(features)
        return dict(batch) if isinstance(batch, Mapping) else batch

    def _with_known(self, feature: Any) -> Any:
        assert self._columns is not None
        is_mapping = isinstance(feature, Mapping)
        return {name: feature[name] for name in feature if name in self._columns} if is_mapping else feature


def training_data(args: Any, dataset: Any, collate: PlainBatches) -> DataLoader[Any]:
    """In the order of a transformers Trainer of the same seed, on any number of ranks."""
    options = _options(args)
    if not isinstance(dataset, IterableDataset):
        options["drop_last"] = args.dataloader_drop_last
        if args.train_sampling_strategy == "random":
            seed = args.seed if args.data_seed is None else args.data_seed
            options["sampler"] = SeededOrder(len(dataset), seed)
    return DataLoader(dataset, batch_size=args.per_device_train_batch_size, collate_fn=collate, **options)


def evaluation_data(args: Any, dataset: Any, collate: PlainBatches) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=args.per_device_eval_batch_size, collate_fn=collate, **_options(args))


def collator_of(args: Any, model: Any, collate: Any, processing_class: Any) -> PlainBatches:
    """The one that was passed, or the one that a transformers Trainer takes."""
    transformers = import_extra("transformers", "transformers", "hf_trainer")
    if collate is None:
        pads = isinstance(processing_class, transformers.PreTrainedTokenizerBase)
        collate = transformers.DataCollatorWithPadding(processing_class) if pads else transformers.default_data_collator
    if not args.remove_unused_columns:
        return PlainBatches(collate, None)
    taken = inspect.signature(base_model(model).forward).parameters
    columns = [*taken, "label", "label_ids", *label_names(args, model)]
    return PlainBatches(collate, columns)


def _options(args: Any) -> dict[str, Any]:
    workers = args.dataloader_num_workers
    if not workers:
        return {"pin_memory": args.dataloader_pin_memory}
    return {
        "num_workers": workers,
        "pin_memory": args.dataloader_pin_memory,
        "persistent_workers": args.dataloader_persistent_workers,
        "prefetch_factor": args.dataloader_prefetch_factor,
        "multiprocessing_context": args.dataloader_multiprocessing_context,
    }
