"""Dense contrast: the locations of a feature map are queries, and the best-matching location of each key is its key.

Wang et al. 2021 (arXiv 2011.09157), Sec. 3.2-3.4, for every objective with a queue. With MoCo v2 it is DenseCL.

Shape letters: M positive keys per image, n images, L locations of the last feature map (7 x 7 of 224 pixels), C its
channels, D dimensions, K negatives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import ResNet

from ..methods import Objective


class Locations(NamedTuple):
    """What an encoder with a dense head finds at the locations of n images; all are unit vectors."""

    embedding_nLD: Tensor  # float32
    pooled_nD: Tensor  # of the mean over an image's locations, float32: a dense negative
    feature_nLC: Tensor  # the backbone's, without gradient; half: ranks exchange them and only the best match matters


class DenseResNet(ResNet):
    """A ResNet with a second head, ``dense``: 1x1 convolution, ReLU, 1x1 convolution. Other names are as before.

    Its forward pass returns the embeddings (n, D) of images, of their locations (n, D, S, S), and the last feature map
    (n, C, S, S) without gradient.
    """

    dense: nn.Sequential

    def _forward_impl(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # pyright: ignore
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1)), self.dense(x), x.detach()


def add_dense_head(encoder: ResNet, channels: int, dim: int) -> None:
    """Makes ``encoder`` with C ``channels`` a `DenseResNet`, in place; later random numbers are as without it."""
    encoder.__class__ = DenseResNet
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(torch.initial_seed() + 1)  # torch.manual_seed would re-seed CUDA, too
        encoder.dense = nn.Sequential(nn.Conv2d(channels, channels, 1), nn.ReLU(), nn.Conv2d(channels, dim, 1))


def locations(embedding_nDSS: Tensor, feature_nCSS: Tensor) -> Locations:
    """The maps of `DenseResNet` as unit vectors."""
    embedding_nLD = embedding_nDSS.float().flatten(2).transpose(1, 2)
    feature_nLC = F.normalize(feature_nCSS.float().flatten(2).transpose(1, 2), dim=2).half()
    return Locations(F.normalize(embedding_nLD, dim=2), F.normalize(embedding_nLD.mean(1), dim=1), feature_nLC)


@torch.no_grad()
def matched_keys(query_nLC: Tensor, key_MnLC: Tensor, key_MnLD: Tensor) -> Tensor:
    """The key (M, n, L, D) of each location of each query: c_s = argmax_t cos(F^q_s, F^k_t) (Sec. 3.3).

    Args:
        query_nLC, key_MnLC: unit-norm backbone features.
        key_MnLD: embeddings of the keys' locations.
    """
    matched = []
    for feature_nLC, embedding_nLD in zip(key_MnLC, key_MnLD, strict=True):  # one key at a time takes less memory
        best_nL = torch.bmm(query_nLC.float(), feature_nLC.float().transpose(1, 2)).argmax(2)
        matched.append(embedding_nLD.gather(1, best_nL[:, :, None].expand(-1, -1, embedding_nLD.shape[2])))
    return torch.stack(matched)


def with_dense(
    result: Objective, method: Callable[..., Objective], queries: Locations, keys: Locations, queue_DK: Tensor,
    weight: float,
) -> Objective:  # fmt: skip
    """L = (1 - w) L_global + w L_dense (Sec. 3.4, Eq. 3).

    Args:
        method: (q_ND, keys_MND, queue_DK) -> the loss; here N is n L.
        keys: of M' keys per image, (M, n, ...).

    Returns:
        The images' ``result`` with the sum as its loss, and the metrics of the locations as ``dense_<name>``.
    """
    matched_MnLD = matched_keys(queries.feature_nLC, keys.feature_nLC, keys.embedding_nLD)
    dense = method(queries.embedding_nLD.flatten(0, 1), matched_MnLD.flatten(1, 2), queue_DK)
    metrics = {"dense_loss": dense.loss.detach(), **{f"dense_{name}": value for name, value in dense.metrics.items()}}
    return result._replace(loss=(1 - weight) * result.loss + weight * dense.loss, metrics={**result.metrics, **metrics})
