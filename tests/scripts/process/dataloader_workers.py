"""DataLoader workers, also those that stay and those that are spawned, under DDP."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, get_worker_info


class Rows(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        assert get_worker_info().num_workers == 2
        assert os.environ["RANK"] in "01"
        return torch.full((4,), index / 48), torch.rand(1)  # the second by the worker's own seed


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    data = Rows()
    sampler = DistributedSampler(data)
    model = DDP(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for way in ("fork", "spawn"):
        settings = {"num_workers": 2, "multiprocessing_context": way, "persistent_workers": True}
        loader = DataLoader(data, batch_size=8, sampler=sampler, **settings)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for x, y in loader:
                loss = nn.functional.mse_loss(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            print(f"{way} epoch {epoch} rank {dist.get_rank()} loss {loss.item()!r}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
