"""Dense contrast: the locations of a feature map are queries, and the best-matching location of each key is its key.

Wang et al. 2021 (arXiv 2011.09157), Sec. 3.2-3.4, for every objective with a queue. With MoCo v2 it is DenseCL.

Shape letters: M positive keys per image, n images, L locations of the last feature map (7 x 7 of 224 pixels), C its
channels, D dimensions, K negatives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import ResNet

from ..methods import LossOutput
from .batch_norm import GroupedResNet
from .queue import NegativeQueue


class DenseFeatures(NamedTuple):
    """Dense outputs for n images, as unit vectors; those of keys have a leading axis M.

    Attributes:
        embedding_nLD: embeddings of the locations, float32.
        pooled_nD: embeddings of the mean over an image's locations, float32; a dense negative.
        feature_nLC: the backbone's features, without gradient; in half precision, because ranks exchange them and only
            the best match matters.
    """

    embedding_nLD: Tensor
    pooled_nD: Tensor
    feature_nLC: Tensor

    def select(self, images: slice) -> DenseFeatures:
        """Return the features of some images, for keys, whose second axis is n."""
        return DenseFeatures(*(tensor[:, images] for tensor in self))


class DenseResNet(GroupedResNet):
    """The layers of a ResNet and a second head, ``dense``: 1x1 convolution, ReLU, 1x1 convolution.

    Its forward pass returns the embeddings (n, D) of images, of their locations (n, D, S, S), and the last feature map
    (n, C, S, S) without gradient. Its construction consumes no random numbers.

    Args:
        channels: C.
        dim: D.
    """

    def __init__(self, resnet: ResNet, channels: int, dim: int) -> None:
        super().__init__(resnet)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(torch.initial_seed() + 1)  # torch.manual_seed would re-seed CUDA, too
            self.dense = nn.Sequential(nn.Conv2d(channels, channels, 1), nn.ReLU(), nn.Conv2d(channels, dim, 1))

    def _forward_impl(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # pyright: ignore
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1)), self.dense(x), x.detach()


def normalize_maps(embedding_nDSS: Tensor, feature_nCSS: Tensor) -> DenseFeatures:
    """Normalize the maps of `DenseResNet` to unit vectors."""
    embedding_nLD = embedding_nDSS.float().flatten(2).transpose(1, 2)
    feature_nLC = F.normalize(feature_nCSS.float().flatten(2).transpose(1, 2), dim=2).half()
    return DenseFeatures(F.normalize(embedding_nLD, dim=2), F.normalize(embedding_nLD.mean(1), dim=1), feature_nLC)


@torch.no_grad()
def match_keys(query_nLC: Tensor, key_MnLC: Tensor, key_MnLD: Tensor) -> Tensor:
    """Return the key (M, n, L, D) of each location of each query: c_s = argmax_t cos(F^q_s, F^k_t) (Sec. 3.3).

    Args:
        query_nLC, key_MnLC: unit-norm backbone features.
        key_MnLD: embeddings of the keys' locations.
    """
    matched = []
    for feature_nLC, embedding_nLD in zip(key_MnLC, key_MnLD, strict=True):  # one key at a time takes less memory
        best_nL = torch.bmm(query_nLC.float(), feature_nLC.float().transpose(1, 2)).argmax(2)
        matched.append(embedding_nLD.gather(1, best_nL[:, :, None].expand(-1, -1, embedding_nLD.shape[2])))
    return torch.stack(matched)


@dataclass(frozen=True)
class DenseLoss:
    """The loss of the images' locations, which is added to the images' own (METHOD.DENSE_WEIGHT).

    Attributes:
        weight: w of `mix_dense_loss` from ``warmup_steps`` on; 0 before.
        head: the encoder's dense head.
        negatives: the queue of mean dense keys.
    """

    weight: float
    warmup_steps: int
    head: nn.Module
    negatives: NegativeQueue

    def add(
        self,
        output: LossOutput,
        method: Callable[..., LossOutput],
        queries: DenseFeatures,
        keys: DenseFeatures,
        step: int,
    ) -> LossOutput:
        """Return the images' ``output`` with the locations' loss at a step; ``method`` is as in `mix_dense_loss`."""
        if step < self.warmup_steps:
            # DDP needs a gradient for every parameter; 0 * dense_loss could be NaN.
            return output._replace(loss=output.loss + 0 * sum(p.sum() for p in self.head.parameters()))
        return mix_dense_loss(output, method, queries, keys, self.negatives.queue, self.weight)


def mix_dense_loss(
    output: LossOutput,
    method: Callable[..., LossOutput],
    queries: DenseFeatures,
    keys: DenseFeatures,
    queue_DK: Tensor,
    weight: float,
) -> LossOutput:
    """Return L = (1 - w) L_global + w L_dense (Sec. 3.4, Eq. 3).

    Args:
        output: the images' loss.
        method: (q_ND, keys_MND, queue_DK) -> the loss, where N is n L here.
        keys: features of M' keys per image, (M, n, ...).

    Returns:
        ``output`` with the sum as its loss, and the metrics of the locations as ``dense_<name>``.
    """
    matched_MnLD = match_keys(queries.feature_nLC, keys.feature_nLC, keys.embedding_nLD)
    dense = method(queries.embedding_nLD.flatten(0, 1), matched_MnLD.flatten(1, 2), queue_DK)
    dense_metrics = {f"dense_{name}": value for name, value in dense.metrics.items()}
    metrics = {**output.metrics, "dense_loss": dense.loss.detach(), **dense_metrics}
    return output._replace(loss=(1 - weight) * output.loss + weight * dense.loss, metrics=metrics)
