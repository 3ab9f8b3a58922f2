"""What the process imports that ranks are forked from, so that a world begins in a fraction of a second."""

from __future__ import annotations

import torch
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
import torch.nn.utils.parametrizations
import torch.nn.utils.parametrize

import distributed.strategies.bitwise
import distributed.strategies.parts
import distributed.strategies.torch_mesh
import tests.adversarial.rank  # noqa: F401
