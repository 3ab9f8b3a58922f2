"""The other side of a measurement on one machine: `python -m distributed.bench.network.process NODE`."""

from __future__ import annotations

import json
import os
import sys

from distributed.bench.network.node import NodeMeasurement
from distributed.bench.network.turns import MeasuredNode, NetworkAsked
from distributed.core.env import take_door
from distributed.core.errors import LaunchError


def main() -> None:
    """Until the measurement is over, or the process that began it is gone."""
    door, began = take_door(), os.getppid()
    assert door is not None, "the benchmark gives it the store"

    def check() -> None:
        if os.getppid() != began:
            raise LaunchError("the process that began the measurement has ended")

    node = MeasuredNode(**json.loads(sys.argv[1]))
    NodeMeasurement(door, node, 2, check=check).run(NetworkAsked(), lambda text, done, in_all: None)


if __name__ == "__main__":
    main()
