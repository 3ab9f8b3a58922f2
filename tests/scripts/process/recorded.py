"""`record` of torch elastic, which writes an error to the file that its launcher names."""

import os

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main():
    dist.init_process_group("gloo")
    value = torch.tensor(float(os.environ["RANK"]))
    dist.all_reduce(value)
    print(f"loss {value.item()!r}", flush=True)
    dist.barrier()
    if dist.get_rank() == 0:
        raise RuntimeError("recorded")
    dist.barrier()


if __name__ == "__main__":
    main()
