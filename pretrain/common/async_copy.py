"""Small copies between host and device without a host-device synchronization."""

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to ``device`` from pinned memory: from other memory, the copy would wait for the device."""
    return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)


class AsyncHostCopy:
    """A copy to the host of a small tensor, to be read later: reading it now would wait for the device."""

    def __init__(self, x: Tensor) -> None:
        self._host = x.to("cpu", non_blocking=True)
        self._arrived = torch.cuda.Event() if x.is_cuda else None
        if self._arrived:
            self._arrived.record()

    def read(self) -> Tensor:
        """Return the tensor on the host."""
        if self._arrived:
            self._arrived.synchronize()
        return self._host
