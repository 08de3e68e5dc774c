"""Small copies between host and device for which the host does not wait."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on ``device``, in order but without waiting for the device, as unpinned memory would."""
    return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)


class AsyncHostCopy:
    """A small tensor on its way to the host, to be read later: at once, the host would wait for all that is queued."""

    def __init__(self, x: Tensor) -> None:
        self._host = x.to("cpu", non_blocking=True)
        self._arrived = torch.cuda.Event() if x.is_cuda else None
        if self._arrived:
            self._arrived.record()

    def read(self) -> Tensor:
        """The tensor on the host."""
        if self._arrived:
            self._arrived.synchronize()
        return self._host
