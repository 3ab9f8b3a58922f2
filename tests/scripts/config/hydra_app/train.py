"""An application of Hydra: configured by files and by `key=value`, its outputs in a folder of its own."""

import logging
import os

import hydra
import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from hydra.utils import to_absolute_path
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

log = logging.getLogger(__name__)


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(4, cfg.model.width), nn.ReLU(), nn.Linear(cfg.model.width, 1)))
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    optimizer = kinds[cfg.optimizer.name](model.parameters(), lr=cfg.optimizer.lr)
    torch.manual_seed(rank)
    for epoch in range(cfg.epochs):
        x = torch.randn(cfg.batch_size, 4)
        loss = nn.functional.mse_loss(model(x), x.square().sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"epoch {epoch} rank {rank} loss {loss.item()!r}", flush=True)
    if rank == 0:
        folder = HydraConfig.get().runtime.output_dir
        torch.save(model.module.state_dict(), os.path.join(folder, "model.pt"))
        OmegaConf.save(cfg, to_absolute_path("resolved.yaml"))
    dist.barrier()
    log.info("done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
