"""An image classifier with averages in its output, the best model kept, and `--resume`."""

import argparse
import os
import shutil

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser(description="image classification")
parser.add_argument("--epochs", default=2, type=int, metavar="N")
parser.add_argument("--start-epoch", default=0, type=int, metavar="N")
parser.add_argument("-b", "--batch-size", default=32, type=int, help="of all ranks together")
parser.add_argument("-j", "--workers", default=1, type=int)
parser.add_argument("--lr", "--learning-rate", default=0.1, type=float, dest="lr")
parser.add_argument("--resume", default="", metavar="PATH")
parser.add_argument("-e", "--evaluate", action="store_true")
parser.add_argument("--dist-backend", default="gloo")
parser.add_argument("--dist-url", default="env://")


class AverageMeter:
    """The last value and the mean of all, over the ranks where `all_reduce` was called."""

    def __init__(self, name):
        self.name, self.val, self.sum, self.count = name, 0.0, 0.0, 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n

    def all_reduce(self):
        total = torch.tensor([self.sum, self.count], dtype=torch.float64)
        dist.all_reduce(total)
        self.sum, self.count = total.tolist()

    @property
    def avg(self):
        return self.sum / self.count

    def __str__(self):
        return f"{self.name} {self.val:.4e} ({self.avg:.4e})"


def accuracy(output, target, topk=(1,)):
    found = output.topk(max(topk), dim=1).indices.eq(target[:, None])
    return [found[:, :k].any(1).float().mean().item() * 100 for k in topk]


def pictures(count, seed):
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(8, (count,), generator=random)
    images = torch.randn(count, 3, 12, 12, generator=random)
    images[torch.arange(count), labels % 3, labels, :] += 3
    return TensorDataset(images, labels)


def main():
    args = parser.parse_args()
    dist.init_process_group(args.dist_backend, init_method=args.dist_url)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(5),
        nn.Flatten(),
        nn.Linear(200, 8),
    )
    model = nn.parallel.DistributedDataParallel(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    best_acc1 = 0.0
    if args.resume:
        checkpoint = torch.load(args.resume, map_location="cpu")
        args.start_epoch = checkpoint["epoch"]
        best_acc1 = checkpoint["best_acc1"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        print(f"=> loaded checkpoint '{args.resume}' (epoch {checkpoint['epoch']})")

    train_data, val_data = pictures(128, 1), pictures(60, 2)
    train_sampler = DistributedSampler(train_data)
    val_sampler = DistributedSampler(val_data, shuffle=False, drop_last=True)
    batch_size = args.batch_size // world
    train_loader = DataLoader(train_data, batch_size, num_workers=args.workers, sampler=train_sampler)
    val_loader = DataLoader(val_data, batch_size, num_workers=args.workers, sampler=val_sampler)

    if args.evaluate:
        validate(val_loader, model, criterion)
        return
    for epoch in range(args.start_epoch, args.epochs):
        train_sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer, epoch)
        acc1 = validate(val_loader, model, criterion)
        scheduler.step()
        is_best, best_acc1 = acc1 > best_acc1, max(acc1, best_acc1)
        if rank == 0:
            state = {
                "epoch": epoch + 1,
                "state_dict": model.state_dict(),
                "best_acc1": best_acc1,
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
            }
            torch.save(state, "checkpoint.pth.tar")
            if is_best:
                shutil.copyfile("checkpoint.pth.tar", "model_best.pth.tar")


def train(loader, model, criterion, optimizer, epoch):
    losses, top1, top3 = AverageMeter("loss"), AverageMeter("Acc@1"), AverageMeter("Acc@3")
    model.train()
    for i, (images, target) in enumerate(loader):
        output = model(images)
        loss = criterion(output, target)
        acc1, acc3 = accuracy(output, target, topk=(1, 3))
        losses.update(loss.item(), len(images))
        top1.update(acc1, len(images))
        top3.update(acc3, len(images))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 2 == 0 and os.environ["LOCAL_RANK"] == "0":
            print(f"Epoch [{epoch}][{i}/{len(loader)}]", losses, top1, top3, sep="\t", flush=True)


def validate(loader, model, criterion):
    losses, top1 = AverageMeter("loss"), AverageMeter("Acc@1")
    model.eval()

    def run(some):
        with torch.no_grad():
            for images, target in some:
                output = model(images)
                losses.update(criterion(output, target).item(), len(images))
                top1.update(accuracy(output, target)[0], len(images))

    run(loader)
    losses.all_reduce()
    top1.all_reduce()
    covered = len(loader.sampler) * dist.get_world_size()
    if covered < len(loader.dataset):  # what the sampler dropped, on every rank
        run(DataLoader(Subset(loader.dataset, range(covered, len(loader.dataset))), loader.batch_size))
    print(f"* rank {dist.get_rank()} {losses} {top1}", flush=True)
    return top1.avg


if __name__ == "__main__":
    main()
