"""Maps a record of `data` to the detector's input, with the same arithmetic as Detectron2's DatasetMapper.

Boxes, masks, keypoints and the image are moved by one object, a list of fvcore's transforms.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
import torch
from fvcore.common.config import CfgNode
from fvcore.transforms.transform import HFlipTransform, NoOpTransform, Transform, TransformList
from PIL import Image
from pycocotools import mask as coco_mask
from torch import Tensor

from pretrain.common.errors import UserError
from pretrain.common.images import read_image

from ..training.samplers import ModelInput, Record


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


class Target(TypedDict):
    """The G ground-truth instances in a resized image, in its pixels; masks and keypoints only if they are trained."""

    boxes: Tensor  # (G, 4): x0, y0, x1, y1
    labels: Tensor  # (G,) in [0, K)
    masks: list[list[np.ndarray]] | Tensor  # G lists of polygons, or (G, H, W) bool
    keypoints: Tensor  # (G, P, 3): x, y, visibility


@dataclass(frozen=True)
class ImageMapper:
    """Reads a record's image, resizes and flips it and, for training, its annotations.

    Attributes:
        sizes: sizes of the shorter side; ``sampling`` draws one of them (choice) or a size between the two (range).
        image_format: RGB or BGR.
        masks: polygon, bitmask, or empty for no masks.
        keypoints: the index of every keypoint's mirror image; empty for no keypoints.
        is_train: return the target, too.
    """

    sizes: Sequence[int]
    sampling: str
    max_size: int
    flip: bool
    image_format: str
    masks: str
    keypoints: Sequence[int] = ()
    is_train: bool = True

    def __call__(self, record: Record, seeds: tuple[int, int]) -> ModelInput:
        """Return the model's input; ``seeds`` determine the size and whether the image is flipped.

        Raises:
            UserError: unreadable image, or a size other than annotated.
        """
        rng = np.random.default_rng(seeds)
        pixels = self.read(record)
        height, width = pixels.shape[:2]
        size = self.output_size(height, width, rng)
        flipped = self.flip and rng.random() < 0.5
        flip = HFlipTransform(size[1]) if flipped else NoOpTransform()
        transforms = TransformList([Resize((height, width), size), flip])
        pixels = transforms.apply_image(pixels).transpose(2, 0, 1)
        name = record["file_name"]
        image: Any = {"file_name": name, "image_id": record["image_id"], "height": height, "width": width}
        image["image"] = torch.from_numpy(np.ascontiguousarray(pixels))
        if self.is_train:
            image["target"] = self.target(record, transforms, size, flipped)
        return image

    def read(self, record: Record) -> np.ndarray:
        """Read the image, upright, (H, W, 3) uint8; check its size against the record's, if it has one."""
        name = record["file_name"]
        pixels = read_image(name)
        height, width = pixels.shape[:2]
        if (height, width) != (record.get("height", height), record.get("width", width)):
            annotated = f"{record['width']} x {record['height']}; correct the annotation file"
            raise UserError(f"image {name} is {width} x {height}, but its annotations say {annotated}")
        return np.ascontiguousarray(pixels[:, :, ::-1]) if self.image_format == "BGR" else pixels

    def output_size(self, height: int, width: int, rng: np.random.Generator) -> tuple[int, int]:
        """Return (H, W) with the drawn shorter side, and the longer at most ``max_size``; rounded as int(x + 0.5)."""
        if self.sampling == "range":
            size = int(rng.integers(self.sizes[0], self.sizes[1] + 1))
        else:
            size = self.sizes[int(rng.integers(len(self.sizes)))]
        if size == 0:
            return height, width
        scale = float(size) / min(height, width)
        new_h, new_w = (float(size), scale * width) if height < width else (scale * height, float(size))
        if max(new_h, new_w) > self.max_size:
            scale = float(self.max_size) / max(new_h, new_w)
            new_h *= scale
            new_w *= scale
        return max(1, int(new_h + 0.5)), max(1, int(new_w + 0.5))  # of 3000 x 2 pixels, one side would be 0

    def target(self, record: Record, transforms: TransformList, size: tuple[int, int], flipped: bool) -> Target:
        """Return the instances in the resized image, (H, W) ``size``, without those of an empty box or mask."""
        annotations = [a for a in record["annotations"] if not (a["crowd"] or (self.masks and "segmentation" not in a))]
        corners = transforms.apply_box(np.array([a["box"] for a in annotations]).reshape(-1, 4))
        boxes = torch.from_numpy(np.clip(corners, 0, [*size[::-1], *size[::-1]]).astype(np.float32))
        masks = [self.mask(a, transforms, size) for a in annotations] if self.masks else []
        is_bitmask = self.masks == "bitmask"
        has_area = (boxes[:, 2:] - boxes[:, :2] > 1e-5).all(1).tolist()
        kept_indices = [i for i, is_kept in enumerate(has_area) if is_kept and (not is_bitmask or masks[i].any())]
        labels = [annotations[i]["label"] for i in kept_indices]
        target: Any = {"boxes": boxes[kept_indices], "labels": torch.tensor(labels, dtype=torch.long)}
        if self.masks:
            masks = [masks[i] for i in kept_indices]
            target["masks"] = torch.from_numpy(np.array(masks, bool).reshape(-1, *size)) if is_bitmask else masks
        if self.keypoints:
            keypoints = [annotations[i].get("keypoints") for i in kept_indices]
            points = [self.move_keypoints(instance, transforms, size, flipped) for instance in keypoints]
            target["keypoints"] = torch.from_numpy(np.array(points, np.float32).reshape(-1, len(self.keypoints), 3))
        return target

    def mask(self, annotation: dict[str, Any], transforms: TransformList, size: tuple[int, int]) -> Any:
        """Return polygons, or a bit mask (H, W), of the resized image."""
        segmentation = annotation["segmentation"]
        if not isinstance(segmentation, list):
            return transforms.apply_segmentation(coco_mask.decode(segmentation))
        polygons = [p.reshape(-1) for p in transforms.apply_polygons([p.reshape(-1, 2) for p in segmentation])]
        if self.masks == "polygon":
            return polygons
        return coco_mask.decode(coco_mask.merge(coco_mask.frPyObjects(polygons, *size)))

    def move_keypoints(
        self, keypoints: np.ndarray | None, transforms: TransformList, size: tuple[int, int], flipped: bool
    ) -> np.ndarray:
        """Move and mirror keypoints (P, 3); a point outside the image or without a label is all zeros."""
        if keypoints is None:
            return np.zeros((len(self.keypoints), 3))
        xy = transforms.apply_coords(keypoints[:, :2])
        is_inside = ((xy >= 0) & (xy <= [size[1], size[0]])).all(1)
        visibility = np.where(is_inside, keypoints[:, 2], 0)
        moved = np.concatenate([xy, visibility[:, None]], 1)
        moved[visibility == 0] = 0
        return moved[list(self.keypoints)] if flipped else moved


def build_mapper(cfg: CfgNode, is_train: bool, flip_indices: Sequence[int] = ()) -> ImageMapper:
    """Build the mapper that INPUT describes.

    Args:
        flip_indices: the index of every keypoint's mirror image.
    """
    inputs = cfg.INPUT
    return ImageMapper(
        sizes=inputs.MIN_SIZE_TRAIN if is_train else [inputs.MIN_SIZE_TEST],
        sampling=inputs.MIN_SIZE_TRAIN_SAMPLING if is_train else "choice",
        max_size=inputs.MAX_SIZE_TRAIN if is_train else inputs.MAX_SIZE_TEST,
        flip=is_train and inputs.RANDOM_FLIP == "horizontal",
        image_format=inputs.FORMAT,
        masks=inputs.MASK_FORMAT if cfg.MODEL.MASK_ON else "",
        keypoints=flip_indices if cfg.MODEL.KEYPOINT_ON else (),
        is_train=is_train,
    )
