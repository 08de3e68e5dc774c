"""Views of a photograph compared with the same recipe in torchvision's transforms."""

import argparse
import io
import itertools
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import cv2
import numpy as np
import torch
from PIL import Image, ImageFilter
from sklearn.datasets import load_sample_image
from tabulate import tabulate
from torchvision import transforms

from benchmarks.measure import measure_milliseconds
from pretrain.common.images import decode
from pretrain.data.augmentations import AUGMENTATIONS
from pretrain.data.loader import VIEW, make_random_stream
from pretrain.data.views import make_views

_PIL = "PIL (torchvision's transforms, Pillow's blur)"


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Print median milliseconds per image of each form, including decoding, and the ratios to ours."""
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    jpeg = encode_photo()
    augmentations = [AUGMENTATIONS["moco_v2"]] * args.views
    counter = itertools.count()
    forms: dict[str, Callable[[], object]] = {
        "ours": lambda: make_views(
            decode(jpeg, "photo"), augmentations, args.size, partial(make_random_stream, 0, 0, VIEW, next(counter))
        ),
        "ours, decoding alone": lambda: decode(jpeg, "photo"),
        _PIL: lambda: _make_pil_views(jpeg, args.views, args.size),
    }
    milliseconds = measure_milliseconds(forms, args.rounds)
    print(f"{args.views} views of {args.size} x {args.size} pixels per image, one core")
    rows = [(name, value, value / milliseconds["ours"]) for name, value in milliseconds.items()]
    print(tabulate(rows, ["views", "ms per image", "ratio to ours"], floatfmt=".2f"))
    return {"views": args.views, "size": args.size, "milliseconds": milliseconds}


def encode_photo(width: int = 500, height: int = 375) -> bytes:
    """Return a photograph as JPEG; where it is enlarged from 640 x 427 pixels, with a camera's noise."""
    photo = Image.fromarray(load_sample_image("china.jpg")).resize((width, height), Image.Resampling.LANCZOS)
    if width > 640:
        noise = np.random.default_rng(0).normal(0, 6, (height, width, 3))
        photo = Image.fromarray(np.clip(np.asarray(photo) + noise, 0, 255).astype(np.uint8))
    buffer = io.BytesIO()
    photo.save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def _make_pil_views(jpeg: bytes, count: int, size: int) -> list[np.ndarray]:
    """Make views with the MoCo v2 recipe in torchvision's transforms, with Pillow's blur as in MoCo's release."""
    colors = transforms.RandomApply([transforms.ColorJitter(0.4, 0.4, 0.4, 0.1)], 0.8)
    blur = transforms.RandomApply([lambda x: x.filter(ImageFilter.GaussianBlur(random.uniform(0.1, 2.0)))], 0.5)
    flip = transforms.RandomHorizontalFlip()
    crop = transforms.RandomResizedCrop(size, (0.2, 1.0))
    transform = transforms.Compose([crop, colors, transforms.RandomGrayscale(0.2), blur, flip])
    image = Image.open(io.BytesIO(jpeg)).convert("RGB")
    return [np.asarray(transform(image)) for _ in range(count)]
