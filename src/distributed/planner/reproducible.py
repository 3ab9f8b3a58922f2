"""reproducible='bitwise': whether a run can have the same bytes at any number of ranks, and what that means for it."""

from __future__ import annotations

from dataclasses import replace

from distributed.core.config import DistributedConfig
from distributed.core.errors import Problem
from distributed.core.plan import BatchPlan, Decision


def plan_leaves(
    config: DistributedConfig,
    batch: BatchPlan,
    *,
    is_stream: bool,
    has_batchnorm: bool,
    decisions: list[Decision],
    problems: list[Problem],
) -> BatchPlan:
    """The batch cut into one leaf for each virtual rank."""
    leaves = config.virtual_ranks
    batch = replace(batch, leaves=leaves, least_leaf=2 if has_batchnorm else 1)
    problems += _problems(batch, is_stream, has_batchnorm)
    sizes = [str(2**n) for n in range(leaves.bit_length())]
    decisions.append(
        Decision(
            f"the same bytes at {' or '.join([', '.join(sizes[:-1]), sizes[-1]] if sizes[1:] else sizes)} ranks",
            f"a step's {batch.global_batch} samples are cut into {leaves} virtual ranks, whose gradients are added in "
            f"one order; each rank runs {leaves // batch.ranks or 1} of them, one after the other. The global batch "
            "must stay as it is",
            "virtual_ranks",
        )
    )
    decisions.append(
        Decision(
            "1 thread a rank and deterministic kernels",
            "more threads add in another order; an operation that has no deterministic kernel is an error",
            "reproducible=off",
        )
    )
    if has_batchnorm:
        reason = "a rank cannot see the others' samples in forward; running statistics are the mean over virtual ranks"
        decisions.append(Decision("BatchNorm sees one virtual rank's samples", reason, "virtual_ranks"))
    return batch


def _problems(batch: BatchPlan, is_stream: bool, has_batchnorm: bool) -> list[Problem]:
    found: list[Problem] = []
    leaves, ranks = batch.leaves, batch.ranks
    if is_stream:
        found.append(
            Problem(
                "reproducible='bitwise', and the training data is a stream",
                why="a stream has no positions that virtual ranks could share",
                do="pass a dataset with __len__ and __getitem__, or set reproducible='off'",
            )
        )
    if leaves % ranks:  # leaves is a power of two, so this finds whatever is not, too
        legal = [2**n for n in range(leaves.bit_length())]
        near = [size for size in legal if size < ranks][-1:] + [size for size in legal if size > ranks][:1]
        more = f", or virtual_ranks={ranks} from the first run on" if ranks & (ranks - 1) == 0 else ""
        found.append(
            Problem(
                f"reproducible='bitwise' cannot run virtual_ranks={leaves} on {ranks} ranks",
                why="each rank runs as many of them as any other, and they are a power of two",
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
                why=f"a global batch has {batch.global_batch} samples, and a virtual rank takes its part of it at once",
                do=f"set virtual_ranks={enough} from the first run on, or batch_size={largest} and "
                "gradient_accumulation_steps so that the global batch stays",
            )
        )
    if has_batchnorm and batch.global_batch < leaves * batch.least_leaf:
        fewer = 2 ** ((batch.global_batch // batch.least_leaf).bit_length() - 1) if batch.global_batch > 1 else 1
        found.append(
            Problem(
                f"virtual_ranks={leaves} leaves BatchNorm fewer than 2 samples of the {batch.global_batch} of a step",
                why="under reproducible='bitwise' its statistics go over one virtual rank's samples",
                do=f"set virtual_ranks={fewer} or fewer, or a larger batch_size",
            )
        )
    return found
