"""RankMe: the effective rank of the embeddings of training images, which needs no labels (Garrido et al. 2023)."""

import numpy as np
import torch
from fvcore.common.config import CfgNode
from torch import Tensor
from torchvision.models import ResNet

from ..common.device import translate_torch_errors
from ..common.distributed import gather_objects, mean_
from ..common.ranks.agreement import AgreedStop
from ..data.image_data import ImageData
from .features import extract_features, select_evenly

MOST_IMAGES = 2048  # 16 for each of the usual 128 dimensions; the rank is at most the number of images
_MEMORY_REMEDY = "lower PROBE.IMAGE_SIZE (a resumed run may change it)"
_EPSILON = 1e-7  # the paper's, for float32


def evaluate(
    network: ResNet, data: ImageData, cfg: CfgNode, stop: AgreedStop, device: torch.device
) -> dict[str, float]:
    """Return RankMe of a network in training and the number of images it was computed from; restore its mode.

    The embeddings are the projection head's, before their normalization, as in the paper's experiments. The images are
    at most MOST_IMAGES, evenly spaced in the data set; each is seen as in kNN, without augmentation.

    Args:
        network: backbone and head.
        data: the training images; labels are not used.

    Returns:
        ``rankme`` and ``rankme_images``; {} if no image could be read.
    """
    is_training = network.training
    network.eval()
    try:
        with translate_torch_errors(_MEMORY_REMEDY), torch.no_grad():
            positions = select_evenly(np.arange(len(data)), MOST_IMAGES)
            features_NF, _ = extract_features(network, data, positions, cfg, stop, device)
            images = sum(gather_objects(len(features_NF)))
            return {"rankme": compute_rankme(network.fc(features_NF)), "rankme_images": images} if images else {}
    finally:
        network.train(is_training)


def compute_rankme(embeddings_ND: Tensor) -> float:
    r"""Compute RankMe, Eq. (1) of Garrido et al. 2023 (arXiv 2210.02885): the effective rank of a matrix.

    .. math:: \mathrm{RankMe}(Z) = \exp\Big(-\sum_{k=1}^{\min(N, D)} p_k \log p_k\Big), \quad
              p_k = \frac{\sigma_k(Z)}{\lVert \sigma(Z) \rVert_1} + \epsilon

    The singular values sigma are square roots of the eigenvalues of Z^T Z, which ranks can average: a common factor of
    all sigma cancels.

    Args:
        embeddings_ND: this rank's rows of Z; all ranks have the same D.

    Returns:
        From 1 (all embeddings are parallel) to min(N, D), the same on every rank; NaN if an embedding is not finite.
    """
    z_ND = embeddings_ND.double()
    gram_DD = mean_(z_ND.T @ z_ND).cpu()
    if not gram_DD.isfinite().all():
        return float("nan")
    sigma_D = torch.linalg.eigvalsh(gram_DD).clamp(min=0).sqrt()
    p_D = sigma_D / sigma_D.sum().clamp(min=torch.finfo(torch.float64).tiny) + _EPSILON
    return float((-(p_D * p_D.log()).sum()).exp())
