"""A script that asks whether somebody is there to answer, and reads to the end where nobody is."""

import sys

import torch.distributed as dist

dist.init_process_group("gloo")
answer = "y" if not sys.stdin.isatty() else input("overwrite? ")
rest = sys.stdin.read()
found = [None] * dist.get_world_size()
dist.all_gather_object(found, (answer, rest))
assert found == [("y", "")] * dist.get_world_size(), found
if dist.get_rank() == 0:
    with open("answers.txt", "w") as file:
        file.write(repr(found))
print("loss 0.0")
dist.destroy_process_group()
