"""The query/key encoder pair: EMA, ShuffleBN, one forward for all M' keys. Written once for every queue method.

Shape letters: M positive keys an image, N images of the global batch, n images of this rank, D dimensions.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import distributed
from .common.errors import UserError
from .queue import NegativeQueue


class SiameseEncoder(nn.Module):
    """``encoder_q`` (trained), ``encoder_k`` (its moving average) and the queue, under MoCo's names.

    Args:
        encoder_q: module (n, 3, H, W) -> (n, D).
        queue: the negatives; None, with no ``encoder_k`` either, for objectives inside the batch.
    """

    def __init__(self, encoder_q: nn.Module, queue: NegativeQueue | None) -> None:
        super().__init__()
        self.encoder_q = encoder_q
        self.encoder_k: nn.Module | None = None
        self.negatives = queue
        if queue is not None:
            self.encoder_k = copy.deepcopy(encoder_q)
            self.encoder_k.requires_grad_(False)

    @torch.no_grad()
    def update_keys(self, momentum: float) -> None:
        """theta_k <- m theta_k + (1 - m) theta_q (He et al. 2020, Eq. 2); parameters only, BN is its own."""
        assert self.encoder_k is not None
        keys: list[Tensor] = list(self.encoder_k.parameters())
        queries: list[Tensor] = list(self.encoder_q.parameters())
        torch._foreach_lerp_(keys, queries, 1 - momentum)

    @torch.no_grad()
    def encode_keys(self, images_MnCHW: Tensor, total: int, shuffle: torch.Generator, prepare) -> Tensor:
        """All M' keys of this rank's images in one pass over the shuffled global batch (ShuffleBN).

        Args:
            images_MnCHW: this rank's key views, any dtype; what travels between ranks is this (uint8 is 4 times less).
            total: N, images in the global batch.
            shuffle: generator in the same state on every rank; draws one permutation of the M' N rows.
            prepare: raw images -> network input.

        Returns:
            (M, n, D) unit-norm keys.
        """
        assert self.encoder_k is not None
        many, count = images_MnCHW.shape[:2]
        order = torch.randperm(many * total, generator=shuffle)
        plan = distributed.ExchangePlan(order, many, total)
        rows = plan.scatter(images_MnCHW.flatten(0, 1))
        return plan.collect(encode(self.encoder_k, prepare(rows))).view(many, count, -1)

    def moco_state_dict(self) -> dict[str, Tensor]:
        """The state under MoCo's checkpoint names (``module.encoder_q.*``, ``module.queue``, ...)."""
        return {f"module.{name.replace('negatives.', '')}": value for name, value in self.state_dict().items()}

    def load_moco_state_dict(self, state: dict[str, Tensor]) -> None:
        """Strict inverse of `moco_state_dict`."""
        names = {f"module.{name.replace('negatives.', '')}": name for name in self.state_dict()}
        self.load_state_dict({names.get(name, name): value for name, value in state.items()}, strict=True)


def encode(encoder: nn.Module, images: Tensor) -> Tensor:
    """Unit-norm embeddings in float32.

    Raises:
        UserError: batch norm has a single value a channel to take statistics of.
    """
    try:
        embeddings = encoder(images)
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise UserError(
            f"batch norm cannot take statistics of one image ({len(images)} here): raise SOLVER.IMS_PER_BATCH, lower "
            "MODEL.BN_GROUPS or start fewer processes"
        ) from error
    return F.normalize(embeddings.float(), dim=1)
