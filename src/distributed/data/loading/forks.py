"""ForkedLoader: a data loader whose workers get what their parent holds, and do not free what it no longer needs."""

from __future__ import annotations

import gc
from typing import Any

from torch.utils.data import DataLoader


class ForkedLoader(DataLoader[Any]):
    """Garbage of the parent may hold a stream or a graph of a GPU. A worker whose collector came upon it would be
    aborted by CUDA, which knows nothing of forks. So none runs while they are forked, and each freezes what it was
    given before it lets its own run (`WorkerStart`).
    """

    def __iter__(self) -> Any:
        if not self.num_workers or not gc.isenabled():
            return super().__iter__()
        gc.disable()
        try:
            return super().__iter__()
        finally:
            gc.enable()
