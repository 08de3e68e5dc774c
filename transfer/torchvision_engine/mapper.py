"""Maps a record of `data` to what the detector reads, with the same arithmetic as Detectron2's DatasetMapper.

Boxes, masks, keypoints and the image are moved by one object, a list of fvcore's transforms. A target holds, of G
instances, ``boxes`` (G, 4), ``labels`` (G,) in [0, K), ``masks`` (a list of G lists of polygons, or a bool tensor
(G, H, W)) and ``keypoints`` (G, P, 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from fvcore.common.config import CfgNode
from fvcore.transforms.transform import HFlipTransform, NoOpTransform, Transform, TransformList
from PIL import Image
from pycocotools import mask as coco_mask

from pretrain.common.errors import UserError
from pretrain.common.images import open_upright


class Resize(Transform):
    """Resizes with PIL: images bilinearly, bit masks to the nearest pixel."""

    def __init__(self, size: tuple[int, int], new_size: tuple[int, int]) -> None:
        super().__init__()
        self.new_width_height = (new_size[1], new_size[0])
        self.scale = np.array([new_size[1] * 1.0 / size[1], new_size[0] * 1.0 / size[0]])

    def apply_image(self, img: np.ndarray) -> np.ndarray:
        return np.asarray(Image.fromarray(img).resize(self.new_width_height, Image.Resampling.BILINEAR))

    def apply_segmentation(self, segmentation: np.ndarray) -> np.ndarray:
        return np.asarray(Image.fromarray(segmentation).resize(self.new_width_height, Image.Resampling.NEAREST))

    def apply_coords(self, coords: np.ndarray) -> np.ndarray:
        return coords * self.scale


@dataclass(frozen=True)
class Mapper:
    """Reads a record's image, resizes and flips it and its annotations.

    Attributes:
        sizes: of the shorter side; ``sampling`` draws one of them (choice) or a size between the two (range).
        masks: polygon, bitmask, or empty: no masks.
        keypoints: the index of every keypoint's mirror image; empty: no keypoints.
    """

    sizes: Sequence[int]
    sampling: str
    max_size: int
    flip: bool
    image_format: str  # RGB | BGR
    masks: str
    keypoints: Sequence[int] = ()

    def __call__(self, record: dict[str, Any], rng: np.random.Generator | None) -> dict[str, Any]:
        """``image`` (3, H, W) uint8 and, with ``rng`` (training), ``target``.

        Raises:
            UserError: unreadable image, or a size other than annotated.
        """
        image = self.read(record)
        height, width = image.shape[:2]
        size = self.output_size(height, width, rng)
        flipped = self.flip and rng is not None and rng.random() < 0.5
        moved = TransformList([Resize((height, width), size), HFlipTransform(size[1]) if flipped else NoOpTransform()])
        out = {"file_name": record["file_name"], "height": height, "width": width, "image_id": record["image_id"]}
        out["image"] = torch.from_numpy(np.ascontiguousarray(moved.apply_image(image).transpose(2, 0, 1)))
        if rng is not None:
            out["target"] = self.target(record, moved, size, flipped)
        return out

    def read(self, record: dict[str, Any]) -> np.ndarray:
        """The image, upright, (H, W, 3) uint8 in ``image_format``; its size is compared with the record's, if any."""
        name = record["file_name"]
        image = np.asarray(open_upright(name).convert("RGB"))
        if image.shape[:2] != (record.get("height", image.shape[0]), record.get("width", image.shape[1])):
            raise UserError(
                f"image {name} is {image.shape[1]} x {image.shape[0]}, its annotations say {record['width']} x "
                f"{record['height']}; correct the annotation file"
            )
        return np.ascontiguousarray(image[:, :, ::-1]) if self.image_format == "BGR" else image

    def output_size(self, height: int, width: int, rng: np.random.Generator | None) -> tuple[int, int]:
        """(H, W) whose shorter side is the size drawn, the longer at most ``max_size``; rounded as int(x + 0.5)."""
        if rng is None:
            size = self.sizes[0]
        elif self.sampling == "range":
            size = int(rng.integers(self.sizes[0], self.sizes[1] + 1))
        else:
            size = self.sizes[int(rng.integers(len(self.sizes)))]
        if size == 0:
            return height, width
        scale = float(size) / min(height, width)
        new_h, new_w = (float(size), scale * width) if height < width else (scale * height, float(size))
        if max(new_h, new_w) > self.max_size:
            scale = float(self.max_size) / max(new_h, new_w)
            new_h, new_w = new_h * scale, new_w * scale
        return max(1, int(new_h + 0.5)), max(1, int(new_w + 0.5))  # of 3000 x 2 pixels, one side would be 0

    def target(
        self, record: dict[str, Any], moved: TransformList, size: tuple[int, int], flipped: bool
    ) -> dict[str, Any]:
        """The instances in the resized image, (H, W) ``size``, without those of an empty box or mask."""
        annotations = [a for a in record["annotations"] if not (a["crowd"] or (self.masks and "segmentation" not in a))]
        corners = moved.apply_box(np.array([a["box"] for a in annotations]).reshape(-1, 4))
        boxes = torch.from_numpy(np.clip(corners, 0, [*size[::-1], *size[::-1]]).astype(np.float32))
        masks = [self.mask(a, moved, size) for a in annotations] if self.masks else []
        keep = ((boxes[:, 2:] - boxes[:, :2]) > 1e-5).all(1)
        if self.masks == "bitmask":
            keep &= torch.tensor([mask.any() for mask in masks], dtype=torch.bool)
        kept = torch.where(keep)[0].tolist()
        labels = torch.tensor([annotations[i]["label"] for i in kept], dtype=torch.long)
        target: dict[str, Any] = {"boxes": boxes[kept], "labels": labels}
        if self.masks == "polygon":
            target["masks"] = [masks[i] for i in kept]
        elif self.masks:
            target["masks"] = torch.from_numpy(np.array([masks[i] for i in kept], bool).reshape(-1, *size))
        if self.keypoints:
            points = [self.move_keypoints(annotations[i].get("keypoints"), moved, size, flipped) for i in kept]
            target["keypoints"] = torch.from_numpy(np.array(points, np.float32).reshape(-1, len(self.keypoints), 3))
        return target

    def mask(self, annotation: dict[str, Any], moved: TransformList, size: tuple[int, int]) -> Any:
        """Polygons, or a bit mask (H, W) of the resized image."""
        segmentation = annotation["segmentation"]
        if isinstance(segmentation, list):
            polygons = [p.reshape(-1) for p in moved.apply_polygons([p.reshape(-1, 2) for p in segmentation])]
            if self.masks == "polygon":
                return polygons
            return coco_mask.decode(coco_mask.merge(coco_mask.frPyObjects(polygons, *size)))
        return moved.apply_segmentation(coco_mask.decode(segmentation))

    def move_keypoints(
        self, keypoints: np.ndarray | None, moved: TransformList, size: tuple[int, int], flipped: bool
    ) -> np.ndarray:
        """(P, 3) moved and mirrored; a point outside the image or without a label is all zeros."""
        if keypoints is None:
            return np.zeros((len(self.keypoints), 3))
        xy = moved.apply_coords(keypoints[:, :2])
        inside = ((xy >= 0) & (xy <= [size[1], size[0]])).all(1)
        out = np.concatenate([xy, np.where(inside, keypoints[:, 2], 0)[:, None]], 1)
        out[out[:, 2] == 0] = 0
        return out[list(self.keypoints)] if flipped else out


def build_mapper(cfg: CfgNode, train: bool, flip: Sequence[int]) -> Mapper:
    """The mapper that INPUT describes.

    Args:
        flip: the index of every keypoint's mirror image.
    """
    inputs = cfg.INPUT
    return Mapper(
        sizes=inputs.MIN_SIZE_TRAIN if train else [inputs.MIN_SIZE_TEST],
        sampling=inputs.MIN_SIZE_TRAIN_SAMPLING,
        max_size=inputs.MAX_SIZE_TRAIN if train else inputs.MAX_SIZE_TEST,
        flip=inputs.RANDOM_FLIP == "horizontal",
        image_format=inputs.FORMAT,
        masks=inputs.MASK_FORMAT if cfg.MODEL.MASK_ON else "",
        keypoints=flip if cfg.MODEL.KEYPOINT_ON else (),
    )
