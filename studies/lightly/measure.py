"""One measured run of `compare` in a separate process.

The arguments are SIDE, the folder of JPEGs and the seed; it prints one JSON line.
"""

import json
import os
import random
import resource
import sys
import time
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import torch
from fvcore.common.config import CfgNode
from torch.utils.data import DataLoader

from pretrain.config import load_config
from pretrain.data import datasets
from pretrain.data.augmentations import AUGMENTATIONS, ColorJitter, GaussianBlur, RandomGrayscale, RandomResizedCrop
from pretrain.data.loader import build_loader
from pretrain.data.views import normalize

_RSS_PER_MIB = 2**20 if sys.platform == "darwin" else 2**10


def load_with_ours(cfg: CfgNode) -> Iterator[int]:
    """Load one epoch with this project's loader; yield the number of images of each batch, ready for the encoder."""
    data = datasets.load(cfg.DATA.TRAIN, "train")
    augmentations = [AUGMENTATIONS[cfg.VIEWS.QUERY], AUGMENTATIONS[cfg.VIEWS.KEY]]
    size = cfg.VIEWS.IMAGE_SIZE
    batch_size = cfg.SOLVER.IMS_PER_BATCH
    loader = build_loader(cfg, data, augmentations, torch.device("cpu"), size=size, batch_size=batch_size)
    for _, batch in loader.batches(0, len(loader)):
        normalize(batch.views_VnCHW, cfg.VIEWS.MEAN, cfg.VIEWS.STD)
        yield len(batch.index_n)


def load_with_lightly(cfg: CfgNode) -> Iterator[int]:
    """Load one epoch with lightly's data set and its MoCo v2 views, with the values of our recipe."""
    from lightly.data import LightlyDataset
    from lightly.transforms import MoCoV2Transform

    augmentation = AUGMENTATIONS[cfg.VIEWS.QUERY]
    jitter, gray, blur = (cast(Any, color) for color in augmentation.colors)
    assert [type(color) for color in augmentation.colors] == [ColorJitter, RandomGrayscale, GaussianBlur]
    assert cfg.VIEWS.KEY == cfg.VIEWS.QUERY and isinstance(augmentation.crop, RandomResizedCrop)
    views = MoCoV2Transform(
        cfg.VIEWS.IMAGE_SIZE,
        min_scale=augmentation.crop.scale[0],
        hf_prob=augmentation.flip,
        cj_prob=jitter.p,
        cj_bright=jitter.brightness,
        cj_contrast=jitter.contrast,
        cj_sat=jitter.saturation,
        cj_hue=jitter.hue,
        random_gray_scale=gray.p,
        gaussian_blur=blur.p,
        sigmas=blur.sigma,
        normalize={"mean": cfg.VIEWS.MEAN, "std": cfg.VIEWS.STD},
    )
    data: Any = LightlyDataset(cfg.DATA.TRAIN.removeprefix("folder:"), transform=cast(Any, views))
    batch_size = cfg.SOLVER.IMS_PER_BATCH
    workers = cfg.DATALOADER.NUM_WORKERS
    for batch, _, _ in DataLoader(data, batch_size=batch_size, shuffle=True, drop_last=True, num_workers=workers):
        yield len(batch[0])


def main(side: str, photos: str, seed: str) -> None:
    """Print rates and peak MiB of this process and its worker, with the keys' defaults, which are MoCo v2's."""
    if hasattr(os, "sched_setaffinity"):  # inherited by workers and threads, so that no side gains by using more cores
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    random.seed(int(seed))
    np.random.seed(int(seed))
    torch.manual_seed(int(seed))
    overrides = ["SEED", seed, "SOLVER.IMS_PER_BATCH", "64", "DATALOADER.NUM_WORKERS", "1"]
    cfg = load_config(None, ["DATA.TRAIN", f"folder:{photos}", *overrides])
    load = {"ours": load_with_ours, "lightly": load_with_lightly}[side]
    users = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    before = [resource.getrusage(user) for user in users]
    batches = [(time.perf_counter(), images) for images in load(cfg)]
    after = [resource.getrusage(user) for user in users]
    cpu_seconds = sum(b.ru_utime - a.ru_utime + b.ru_stime - a.ru_stime for a, b in zip(before, after, strict=True))
    seconds = batches[-1][0] - batches[0][0]
    images = sum(count for _, count in batches)
    numbers = {
        "images_per_cpu_second": images / cpu_seconds,
        "images_per_second": (images - batches[0][1]) / seconds,
        "peak_mib": sum(usage.ru_maxrss for usage in after) / _RSS_PER_MIB,
    }
    print(json.dumps(numbers))


if __name__ == "__main__":
    main(*sys.argv[1:])
