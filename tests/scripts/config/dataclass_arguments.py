"""A command line made from a dataclass: the annotations are called with the words that were given."""

import argparse
import dataclasses
import json
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


@dataclass
class Options:
    lr: float = 0.1
    steps: int = 4
    name: str = "run"


def parse() -> Options:
    parser = argparse.ArgumentParser()
    for field in dataclasses.fields(Options):
        parser.add_argument(f"--{field.name}", type=field.type, default=field.default)
    return Options(**vars(parser.parse_args()))


def main() -> None:
    options = parse()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
    losses = []
    for step in range(options.steps):
        loss = model(torch.full((2, 3), 1.0 + step + dist.get_rank())).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        print(f"rank {dist.get_rank()} loss {loss.item()!r}", flush=True)
    if dist.get_rank() == 0:
        with open(f"{options.name}.json", "w") as file:
            json.dump({"options": dataclasses.asdict(options), "losses": losses}, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
