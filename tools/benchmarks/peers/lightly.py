"""lightly's side: its data set, views, head, loss with memory bank and momentum update, as in its MoCo v2 example."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
import torchvision
from fvcore.common.config import CfgNode
from lightly.data import LightlyDataset
from lightly.loss import NTXentLoss
from lightly.models.modules import MoCoProjectionHead
from lightly.models.utils import deactivate_requires_grad, update_momentum
from lightly.transforms import MoCoV2Transform
from torch import nn
from torch.utils.data import DataLoader

from pretrain.common import checkpoint
from pretrain.data.recipes import RECIPES, Blur, Gray, Jitter, RandomResizedCrop
from pretrain.optim import build_optimizer
from pretrain.schedule import learning_rate


def load(cfg: CfgNode) -> Iterator[int]:
    """One epoch: the images of each batch, whose two views are ready for the encoder."""
    for views, _, _ in _loader(cfg):
        yield len(views[0])


def train(cfg: CfgNode) -> Path:
    """MoCo v2 for SOLVER.EPOCHS, and a checkpoint of what training would need to continue."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backbone = getattr(torchvision.models, cfg.MODEL.ARCH)()
    features, backbone.fc = backbone.fc.in_features, nn.Identity()
    head = MoCoProjectionHead(features, cfg.MODEL.HEAD_HIDDEN_DIMS[0], cfg.MODEL.EMBEDDING_DIM)
    query = nn.Sequential(backbone, head).to(device)
    key = copy.deepcopy(query)
    deactivate_requires_grad(key)
    bank = (cfg.MODEL.QUEUE_SIZE, cfg.MODEL.EMBEDDING_DIM)
    criterion = NTXentLoss(temperature=cfg.METHOD.TEMPERATURE, memory_bank_size=bank).to(device)
    optimizer = build_optimizer(query, cfg.SOLVER)
    loader, solver, step = _loader(cfg), cfg.SOLVER, 0
    for _ in range(solver.EPOCHS):
        for views, _, _ in loader:
            rate = learning_rate(step, len(loader), solver.EPOCHS, base_lr=solver.BASE_LR, kind=solver.LR_SCHEDULE,
                                 warmup_epochs=solver.WARMUP_EPOCHS)  # fmt: skip
            for group in optimizer.param_groups:
                group["lr"] = rate
            update_momentum(query, key, m=cfg.MODEL.EMA_MOMENTUM)
            x_query, x_key = (view.to(device) for view in views)
            with torch.no_grad():
                keys = key(x_key)
            loss = criterion(query(x_query), keys)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    rest = {"head": head.state_dict(), "key": key.state_dict(), "optimizer": optimizer.state_dict()}
    path = Path("lightly.pth")
    checkpoint.save(path, {"state_dict": backbone.state_dict(), **rest, "bank": criterion.memory_bank.bank})
    return path


def _loader(cfg: CfgNode) -> DataLoader:
    data: Any = LightlyDataset(cfg.DATA.TRAIN.removeprefix("folder:"), transform=cast(Any, transform(cfg)))
    batch_size, workers = cfg.SOLVER.IMS_PER_BATCH, cfg.DATALOADER.NUM_WORKERS
    return DataLoader(data, batch_size=batch_size, shuffle=True, drop_last=True, num_workers=workers)


def transform(cfg: CfgNode) -> MoCoV2Transform:
    """The views of VIEWS.QUERY, which must be those of VIEWS.KEY too: MoCo v2's operations with the recipe's values.

    Raises:
        ValueError: the recipe has other operations, or another order.
    """
    recipe = RECIPES[cfg.VIEWS.QUERY]
    kinds = [type(color) for color in recipe.colors]
    in_order = [kind for kind in (Jitter, Gray, Blur) if kind in kinds]
    if cfg.VIEWS.KEY != cfg.VIEWS.QUERY or not isinstance(recipe.crop, RandomResizedCrop) or kinds != in_order:
        raise ValueError(f"lightly's MoCoV2Transform cannot make the views {cfg.VIEWS.QUERY} and {cfg.VIEWS.KEY}")
    values: dict[str, Any] = {"cj_prob": 0.0, "random_gray_scale": 0.0, "gaussian_blur": 0.0}
    for color in recipe.colors:
        if isinstance(color, Jitter):
            values |= {"cj_prob": color.p, "cj_bright": color.brightness, "cj_contrast": color.contrast,
                       "cj_sat": color.saturation, "cj_hue": color.hue}  # fmt: skip
        elif isinstance(color, Gray):
            values["random_gray_scale"] = color.p
        else:
            values |= {"gaussian_blur": color.p, "sigmas": color.sigma}
    normalize = {"mean": cfg.VIEWS.MEAN, "std": cfg.VIEWS.STD}
    size, scale = cfg.VIEWS.IMAGE_SIZE, recipe.crop.scale
    return MoCoV2Transform(size, min_scale=scale[0], hf_prob=recipe.flip, normalize=normalize, **values)
