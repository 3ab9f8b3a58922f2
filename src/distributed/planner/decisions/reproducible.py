"""reproducible='bitwise': whether a run can give the same bytes at any number of ranks, and its virtual ranks."""

from __future__ import annotations

from dataclasses import replace

from distributed.core.batch_plan import BatchPlan
from distributed.core.config import DistributedConfig
from distributed.core.errors import Problem
from distributed.core.plan import Decision


def plan_virtual_ranks(
    config: DistributedConfig,
    batch: BatchPlan,
    *,
    is_stream: bool,
    has_batchnorm: bool,
    decisions: list[Decision],
    problems: list[Problem],
) -> BatchPlan:
    """The batch plan with one leaf (a part of the global batch) for each virtual rank."""
    leaves = config.virtual_ranks
    batch = replace(batch, leaves=leaves, least_leaf=2 if has_batchnorm else 1)
    problems += _problems(batch, is_stream, has_batchnorm)
    sizes = [str(2**n) for n in range(leaves.bit_length())]
    decisions.append(
        Decision(
            f"the same bytes at {' or '.join([', '.join(sizes[:-1]), sizes[-1]] if sizes[1:] else sizes)} ranks",
            f"a step's {batch.global_batch} samples are cut into {leaves} virtual ranks, whose gradients are added in "
            f"a fixed order; each rank runs {leaves // batch.ranks or 1} of them in sequence. The global batch "
            "must not change",
            "virtual_ranks",
        )
    )
    decisions.append(
        Decision(
            "1 thread per rank and deterministic kernels",
            "more threads would add in another order; an operation without a deterministic kernel is an error",
            "reproducible=off",
        )
    )
    if has_batchnorm:
        reason = "virtual ranks run separately, so each normalizes its own samples; running statistics are their mean"
        decisions.append(Decision("BatchNorm sees one virtual rank's samples", reason, "virtual_ranks"))
    return batch


def _problems(batch: BatchPlan, is_stream: bool, has_batchnorm: bool) -> list[Problem]:
    found: list[Problem] = []
    leaves, ranks = batch.leaves, batch.ranks
    if is_stream:
        found.append(
            Problem(
                "reproducible='bitwise', and the training data is a stream",
                why="a stream has no sample positions, by which virtual ranks would be assigned their samples",
                do="pass a dataset with __len__ and __getitem__, or set reproducible='off'",
            )
        )
    if leaves % ranks:  # leaves is a power of two, so any other number of ranks is found here
        legal = [2**n for n in range(leaves.bit_length())]
        near = [size for size in legal if size < ranks][-1:] + [size for size in legal if size > ranks][:1]
        more = f", or virtual_ranks={ranks} from the first run on" if ranks & (ranks - 1) == 0 else ""
        found.append(
            Problem(
                f"reproducible='bitwise' cannot run virtual_ranks={leaves} on {ranks} ranks",
                why="every rank runs the same number of virtual ranks, and their number is a power of two",
                do=f"set num_gpus={' or '.join(map(str, near))}{more}",
            )
        )
        return found
    largest = -(-batch.global_batch // leaves)
    if largest > batch.per_device:
        enough = 2 ** (-(-batch.global_batch // batch.per_device) - 1).bit_length()
        found.append(
            Problem(
                f"virtual_ranks={leaves} makes parts of {largest} samples, but batch_size={batch.per_device}",
                why=f"a global batch has {batch.global_batch} samples, and a virtual rank runs its part at once",
                do=f"set virtual_ranks={enough} from the first run on, or batch_size={largest} and "
                "gradient_accumulation_steps so that the global batch stays",
            )
        )
    if has_batchnorm and batch.global_batch < leaves * batch.least_leaf:
        fewer = 2 ** ((batch.global_batch // batch.least_leaf).bit_length() - 1) if batch.global_batch > 1 else 1
        found.append(
            Problem(
                f"virtual_ranks={leaves} leaves BatchNorm fewer than 2 samples of the {batch.global_batch} of a step",
                why="under reproducible='bitwise' BatchNorm takes its statistics over one virtual rank's samples",
                do=f"set virtual_ranks={fewer} or fewer, or a larger batch_size",
            )
        )
    return found
