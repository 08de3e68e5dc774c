"""The FIFO of negatives: any size K, any batch, MoCo's layout (D, K)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class NegativeQueue(nn.Module):
    """K unit vectors of D dimensions; the newest vectors replace the oldest (He et al. 2020, Sec. 3.2).

    Buffers ``queue`` (D, K) and ``queue_ptr`` (1,) carry MoCo's names. It is initialized with random unit vectors.
    """

    queue: Tensor
    queue_ptr: Tensor

    def __init__(self, dim: int, size: int) -> None:
        super().__init__()
        self.register_buffer("queue", F.normalize(torch.randn(dim, size), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))
        self._ptr: int | None = None  # host copy: reading the buffer would synchronize with the device

    @torch.no_grad()
    def enqueue(self, vectors_ND: Tensor) -> None:
        """Replace the N oldest vectors; of more than K vectors the last K stay."""
        size = self.queue.shape[1]
        if self._ptr is None:
            self._ptr = int(self.queue_ptr)
        count = vectors_ND.shape[0]
        skipped = max(0, count - size)
        start = (self._ptr + skipped) % size
        vectors_DN = vectors_ND[skipped:].T.to(self.queue.dtype)
        first = min(size - start, vectors_DN.shape[1])
        self.queue[:, start : start + first] = vectors_DN[:, :first]
        self.queue[:, : vectors_DN.shape[1] - first] = vectors_DN[:, first:]
        self._ptr = (self._ptr + count) % size
        self.queue_ptr.fill_(self._ptr)

    def _load_from_state_dict(self, *args, **kwargs) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._ptr = None
