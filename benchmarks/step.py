"""Steps of the demo's JCL, from views to optimizer, compared with a plain loop written from the paper."""

import argparse
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from fvcore.common.config import CfgNode
from tabulate import tabulate
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

from benchmarks import naive
from benchmarks.measure import measure_milliseconds
from pretrain.config import load_config
from pretrain.data import datasets
from pretrain.data.augmentations import AUGMENTATIONS
from pretrain.data.loader import build_loader
from pretrain.model.encoder import build_network
from pretrain.state import build_train_state
from pretrain.steps import training_step
from tools import ROOT

_DEVICE = torch.device("cpu")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Print median milliseconds of both forms' steps, and their ratio; use one thread.

    Raises:
        UserError: the demo's images are missing.
    """
    torch.set_num_threads(1)
    overrides = ["DEVICE", "cpu", "DATALOADER.NUM_WORKERS", "0"]
    cfg = load_config(ROOT / "configs/examples/demo_jcl_R18_digits.yaml", overrides)
    datasets.check_exists(cfg.DATA.TRAIN, cfg.DATA.ROOT, False)
    loops = {"ours": _run_our_steps(cfg), "plain loop": _run_plain_steps(cfg)}
    for loop in loops.values():  # the first step allocates
        next(loop)
    forms = {name: functools.partial(next, loop) for name, loop in loops.items()}
    milliseconds = measure_milliseconds(forms, args.rounds)
    ratio = milliseconds["ours"] / milliseconds["plain loop"]
    print(f"the demo's JCL, {cfg.SOLVER.IMS_PER_BATCH} images of {cfg.VIEWS.IMAGE_SIZE} pixels per step, one thread")
    print(tabulate([[*milliseconds.values(), ratio]], ["ms", "plain loop, ms", "ratio"], floatfmt=".2f"))
    return {"milliseconds": milliseconds, "ratio": ratio}


def _run_our_steps(cfg: CfgNode) -> Iterator[None]:
    """Run steps of pretrain/train.py without end, from views to optimizer; yield after each."""
    augmentations = [AUGMENTATIONS[cfg.VIEWS.QUERY]] + [AUGMENTATIONS[cfg.VIEWS.KEY]] * cfg.METHOD.NUM_KEYS
    data = datasets.load(cfg.DATA.TRAIN, "train", cfg.DATA.ROOT, False)
    batch_size = cfg.SOLVER.IMS_PER_BATCH
    loader = build_loader(cfg, data, augmentations, _DEVICE, size=cfg.VIEWS.IMAGE_SIZE, batch_size=batch_size)
    state = build_train_state(cfg, _DEVICE, len(loader))
    for number, batch in loader.batches(0, 1 << 30):
        training_step(state, batch._replace(views_VnCHW=batch.views_VnCHW.contiguous()), number)
        yield


def _run_plain_steps(cfg: CfgNode) -> Iterator[None]:
    """Do the same with torchvision's transforms and data loader, a pass per key, and torch's default optimizer."""
    model = cfg.MODEL
    make_views = functools.partial(_make_views, _build_plain_transform(cfg), 1 + cfg.METHOD.NUM_KEYS)
    images = ImageFolder(cfg.DATA.TRAIN.removeprefix("folder:") + "/train", make_views)
    loader = DataLoader(images, cfg.SOLVER.IMS_PER_BATCH, shuffle=True, drop_last=True)
    encoder_q = build_network(
        model.ARCH, model.STEM, hidden_dims=model.HEAD_HIDDEN_DIMS, head_bn=False, dim=model.EMBEDDING_DIM
    )
    encoder_k = copy.deepcopy(encoder_q).requires_grad_(False)
    optimizer = torch.optim.AdamW(encoder_q.parameters(), cfg.SOLVER.BASE_LR, weight_decay=cfg.SOLVER.WEIGHT_DECAY)
    queue_DK = normalize(torch.randn(model.EMBEDDING_DIM, model.QUEUE_SIZE), dim=0)
    hyper = {"temperature": cfg.METHOD.TEMPERATURE, "lambda_": cfg.METHOD.JCL_LAMBDA}
    pointer = 0
    while True:
        for views, _labels in loader:
            with torch.no_grad():
                for p_k, p_q in zip(encoder_k.parameters(), encoder_q.parameters(), strict=True):
                    p_k.data = p_k.data * model.EMA_MOMENTUM + p_q.data * (1 - model.EMA_MOMENTUM)
                keys_MND = torch.stack([_encode_shuffled(encoder_k, view) for view in views[1:]])
            q_ND = normalize(encoder_q(views[0]), dim=1)
            loss = naive.jcl(q_ND, keys_MND, queue_DK, **hyper)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            queue_DK[:, pointer : pointer + len(q_ND)] = keys_MND.mean(dim=0).T
            pointer = (pointer + len(q_ND)) % queue_DK.shape[1]
            yield


def _build_plain_transform(cfg: CfgNode) -> transforms.Compose:
    """Build the transform from an image to a view of the demo's recipe."""
    augmentation = AUGMENTATIONS[cfg.VIEWS.QUERY]
    jitter = cast(Any, augmentation.colors[0])
    return transforms.Compose(
        [
            transforms.RandomResizedCrop(cfg.VIEWS.IMAGE_SIZE, cast(Any, augmentation.crop).scale),
            transforms.RandomApply([transforms.ColorJitter(jitter.brightness, jitter.contrast)], jitter.p),
            transforms.ToTensor(),
            transforms.Normalize(cfg.VIEWS.MEAN, cfg.VIEWS.STD),
        ]
    )


def _make_views(transform: Callable[[Any], Tensor], count: int, image: Any) -> list[Tensor]:
    return [transform(image) for _ in range(count)]


def _encode_shuffled(encoder: nn.Module, view: Tensor) -> Tensor:
    """Encode the keys of a view in another order, as ShuffleBN does on several devices."""
    order = torch.randperm(len(view))
    return normalize(encoder(view[order]), dim=1)[torch.argsort(order)]
