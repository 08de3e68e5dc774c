"""Counts the operations of torch, which on a GPU are about as many kernels."""

import collections
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class CountedCalls(TorchDispatchMode):
    """Counts ATen calls by name while active."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))
