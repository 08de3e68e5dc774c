r"""COCO annotations and images to training and test records, with the same arithmetic as Detectron2's DatasetMapper.

Every random choice is a function of (seed, position), the position being a record's place in the infinite training
stream: the same whatever the number of processes, of workers, or where a resumed run begins.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fvcore.common.config import CfgNode
from PIL import Image
from pycocotools import mask as coco_mask

from pretrain.common.errors import UserError
from pretrain.common.image_io import open_upright

from ..coco import data as coco_data

log = logging.getLogger("transfer")
COCO_FLIP = [0, 2, 1, 4, 3, 6, 5, 8, 7, 10, 9, 12, 11, 14, 13, 16, 15]  # COCO's person: the other side's keypoint


@dataclass(frozen=True)
class CocoInfo:
    """What evaluation and flipping need: the files, category ids in class order, every keypoint's mirror image."""

    annotations: Path
    image_dir: Path
    category_ids: list[int]
    flip: list[int]


def load_coco(name: str) -> tuple[list[dict[str, Any]], CocoInfo]:
    """Reads a data set of DATASETS.TRAIN or DATASETS.TEST into records ordered by image id.

    Returns:
        Records of ``file_name, height, width, image_id, annotations``; an annotation has ``box`` (x0, y0, x1, y1),
        ``label`` in [0, K), ``crowd``, ``segmentation`` (polygons or compressed RLE) and ``keypoints`` (P, 3), moved by
        half a pixel to the pixels' centres.

    Raises:
        UserError: unknown name, missing files, or an annotation of an unknown category; `coco_data.prepare` finds more.
    """
    annotations, image_dir = coco_data.resolve(name)
    data = coco_data.read(annotations)
    if "left_out" in data:
        coco_data.say_once(log.warning, data["left_out"]["summary"])
    categories = sorted(data["categories"], key=lambda c: c["id"])
    images = sorted(data["images"], key=lambda i: i["id"])
    labels = {category["id"]: label for label, category in enumerate(categories)}
    by_image: dict[Any, list[dict[str, Any]]] = {image["id"]: [] for image in images}
    for annotation in data["annotations"]:
        if annotation["category_id"] not in labels:
            raise UserError(
                f"{annotations}: annotation {annotation['id']} has category {annotation['category_id']}, unknown"
            )
        kept = _annotation(annotation, labels)
        if kept is not None and annotation["image_id"] in by_image:
            by_image[annotation["image_id"]].append(kept)
    records = [
        {
            "file_name": str(image_dir / image["file_name"]),
            "height": image["height"],
            "width": image["width"],
            "image_id": image["id"],
            "annotations": by_image[image["id"]],
        }
        for image in images
    ]
    flip = _mirror(next((c["keypoints"] for c in categories if c.get("keypoints")), []))
    return records, CocoInfo(annotations, image_dir, [c["id"] for c in categories], flip)


def _annotation(annotation: dict[str, Any], labels: dict[int, int]) -> dict[str, Any] | None:
    x, y, w, h = np.asarray(annotation["bbox"], np.float32)  # Detectron2 adds in float32, then goes on in float64
    kept: dict[str, Any] = {
        "box": np.array([x, y, x + w, y + h], np.float64),
        "label": labels[annotation["category_id"]],
        "crowd": bool(annotation.get("iscrowd", 0)),
    }
    segmentation = annotation.get("segmentation")
    if isinstance(segmentation, dict):
        if isinstance(segmentation["counts"], list):
            uncompressed: Any = segmentation  # pycocotools' stubs know no uncompressed RLE
            segmentation = coco_mask.frPyObjects(uncompressed, *segmentation["size"])
        kept["segmentation"] = segmentation
    elif segmentation:
        polygons = [np.asarray(p, np.float64) for p in segmentation if len(p) % 2 == 0 and len(p) >= 6]
        if not polygons:
            return None  # fewer than three points: no instance, whether masks are used or not
        kept["segmentation"] = polygons
    if annotation.get("keypoints"):
        keypoints = np.asarray(annotation["keypoints"], np.float64).reshape(-1, 3)
        keypoints[:, :2] += 0.5
        kept["keypoints"] = keypoints
    return kept


def _mirror(names: list[str]) -> list[int]:
    swapped = [n.replace("left", "\0").replace("right", "left").replace("\0", "right") for n in names]
    return [names.index(s) if s in names else i for i, s in enumerate(swapped)] or COCO_FLIP


def training_records(cfg: CfgNode) -> tuple[list[dict[str, Any]], CocoInfo]:
    """The records of all data sets in DATASETS.TRAIN that training uses, and the first one's description.

    Raises:
        UserError: other keypoints than NUM_KEYPOINTS, data sets that disagree, or no image left.
    """
    loaded = [load_coco(name) for name in cfg.DATASETS.TRAIN]
    if not loaded:
        raise UserError("DATASETS.TRAIN is empty; name a data set, as in DATASETS.TRAIN \"('coco_2017_train',)\"")
    infos = [info for _, info in loaded]
    points = cfg.MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS
    if cfg.MODEL.KEYPOINT_ON and len(infos[0].flip) != points:
        raise UserError(
            f"{infos[0].annotations} has {len(infos[0].flip)} keypoints; set MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS so, "
            f"not {points}"
        )
    if any((i.category_ids, i.flip) != (infos[0].category_ids, infos[0].flip) for i in infos):
        raise UserError(f"the data sets of DATASETS.TRAIN {cfg.DATASETS.TRAIN} have different categories or keypoints")
    records = list(itertools.chain.from_iterable(r for r, _ in loaded))
    if cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS:
        records = [r for r in records if any(not a["crowd"] for a in r["annotations"])]
    if cfg.MODEL.KEYPOINT_ON:
        least = cfg.MODEL.ROI_KEYPOINT_HEAD.MIN_KEYPOINTS_PER_IMAGE
        records = [r for r in records if _visible(r) >= least]
    if not records:
        raise UserError(f"no image of DATASETS.TRAIN {cfg.DATASETS.TRAIN} has annotations to train on")
    return records, infos[0]


def _visible(record: dict[str, Any]) -> int:
    return sum(int((a["keypoints"][:, 2] > 0).sum()) for a in record["annotations"] if "keypoints" in a)


@dataclass(frozen=True)
class Mapper:
    """A record to what the detector reads: image read, resized (PIL, bilinear) and flipped, annotations with it."""

    sizes: Sequence[int]
    sampling: str  # choice: one of sizes; range: between the two
    max_size: int
    flip: bool
    image_format: str  # RGB | BGR
    masks: str  # "" | polygon | bitmask
    keypoints: Sequence[int] = ()  # mirror order; empty: no keypoints

    def __call__(self, record: dict[str, Any], rng: np.random.Generator | None) -> dict[str, Any]:
        """``image`` (3, H, W) uint8 and, with ``rng`` (training), ``target``; see torchvision_roi_heads.

        Raises:
            UserError: unreadable image, a size other than annotated, a mask that is missing or of the wrong kind.
        """
        image = self.read(record)
        height, width = image.shape[:2]
        new_h, new_w = self.output_size(height, width, rng)
        flipped = bool(self.flip and rng is not None and rng.random() < 0.5)
        if (new_h, new_w) != (height, width):
            image = np.asarray(Image.fromarray(image).resize((new_w, new_h), Image.Resampling.BILINEAR))
        image = image[:, ::-1] if flipped else image
        out = {key: record[key] for key in ("file_name", "height", "width", "image_id")}
        out["image"] = torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))
        if rng is not None:
            annotations = [a for a in record["annotations"] if not a["crowd"]]
            out["target"] = self.target(annotations, (height, width), (new_h, new_w), flipped, record)
        return out

    def read(self, record: dict[str, Any]) -> np.ndarray:
        """The image, upright, (H, W, 3) uint8 in ``image_format``."""
        name = record["file_name"]
        image = np.asarray(open_upright(name).convert("RGB"))
        if image.shape[:2] != (record["height"], record["width"]):
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
        return int(new_h + 0.5), int(new_w + 0.5)

    def target(
        self,
        annotations: list[dict[str, Any]],
        old: tuple[int, int],
        new: tuple[int, int],
        flipped: bool,
        record: dict[str, Any],
    ) -> dict[str, Any]:
        """Boxes, labels, masks and keypoints in the resized image; instances with an empty box or mask are left out."""

        def move(points: np.ndarray) -> np.ndarray:  # (..., 2)
            x, y = points[..., 0] * (new[1] * 1.0 / old[1]), points[..., 1] * (new[0] * 1.0 / old[0])
            return np.stack([new[1] - x if flipped else x, y], -1)

        boxes = np.zeros((len(annotations), 4))
        for row, annotation in zip(boxes, annotations, strict=True):
            corners = move(annotation["box"].reshape(2, 2))
            row[:] = np.minimum(np.concatenate([corners.min(0), corners.max(0)]).clip(min=0), [new[1], new[0]] * 2)
        box = torch.from_numpy(boxes.astype(np.float32))
        keep = (box[:, 2] - box[:, 0] > 1e-5) & (box[:, 3] - box[:, 1] > 1e-5)
        masks: list[Any] = []
        if self.masks:
            masks = [self.mask(a, move, old, new, flipped, record) for a in annotations]
            keep &= torch.tensor(
                [bool(np.any(m)) if isinstance(m, np.ndarray) else len(m) > 0 for m in masks], dtype=torch.bool
            )
        target: dict[str, Any] = {
            "boxes": box[keep],
            "labels": torch.tensor([a["label"] for a in annotations], dtype=torch.long)[keep],
        }
        kept = [i for i, flag in enumerate(keep.tolist()) if flag]
        if self.masks == "polygon":
            target["masks"] = [masks[i] for i in kept]
        elif self.masks:
            stacked = [torch.from_numpy(np.ascontiguousarray(masks[i])) for i in kept]
            target["masks"] = torch.stack(stacked).bool() if stacked else torch.zeros(0, *new, dtype=torch.bool)
        if self.keypoints:
            points = [self.move_keypoints(annotations[i].get("keypoints"), move, new, flipped) for i in kept]
            target["keypoints"] = torch.from_numpy(np.array(points, np.float32).reshape(-1, len(self.keypoints), 3))
        return target

    def mask(self, annotation, move, old: tuple[int, int], new: tuple[int, int], flipped: bool, record) -> Any:
        """Polygons, or a bit map (H, W) of the resized image."""
        segmentation = annotation.get("segmentation")
        if segmentation is None:
            raise UserError(
                f"an instance of {record['file_name']} has no segmentation; annotate it or set MODEL.MASK_ON False"
            )
        if isinstance(segmentation, list):
            polygons = [move(p.reshape(-1, 2)).reshape(-1) for p in segmentation]
            if self.masks == "polygon":
                return polygons
            return coco_mask.decode(coco_mask.merge(coco_mask.frPyObjects(polygons, *new)))
        if self.masks == "polygon":
            raise UserError(f"a mask of {record['file_name']} is RLE, not polygons; set INPUT.MASK_FORMAT bitmask")
        bitmap = Image.fromarray(coco_mask.decode(segmentation))
        resized = np.asarray(bitmap.resize((new[1], new[0]), Image.Resampling.NEAREST))
        return resized[:, ::-1] if flipped else resized

    def move_keypoints(self, keypoints: np.ndarray | None, move, new: tuple[int, int], flipped: bool) -> np.ndarray:
        """(P, 3) moved and mirrored; a point outside the image or unlabelled is all zeros."""
        if keypoints is None:
            return np.zeros((len(self.keypoints), 3))
        xy = move(keypoints[:, :2])
        inside = ((xy >= 0) & (xy <= [new[1], new[0]])).all(1)
        out = np.concatenate([xy, np.where(inside, keypoints[:, 2], 0)[:, None]], 1)
        out = out[list(self.keypoints)] if flipped else out
        out[out[:, 2] == 0] = 0
        return out


def mapper(cfg: CfgNode, train: bool, flip: Sequence[int]) -> Mapper:
    """The mapper that INPUT describes."""
    inputs = cfg.INPUT
    if train and inputs.MIN_SIZE_TRAIN_SAMPLING == "range" and len(inputs.MIN_SIZE_TRAIN) != 2:
        raise UserError(f"INPUT.MIN_SIZE_TRAIN is {inputs.MIN_SIZE_TRAIN}; with sampling 'range' it has two values")
    train_sizes = inputs.MIN_SIZE_TRAIN if isinstance(inputs.MIN_SIZE_TRAIN, (tuple, list)) else [inputs.MIN_SIZE_TRAIN]
    return Mapper(
        sizes=list(train_sizes) if train else [inputs.MIN_SIZE_TEST],
        sampling=inputs.MIN_SIZE_TRAIN_SAMPLING,
        max_size=inputs.MAX_SIZE_TRAIN if train else inputs.MAX_SIZE_TEST,
        flip=inputs.RANDOM_FLIP == "horizontal",
        image_format=inputs.FORMAT,
        masks=inputs.MASK_FORMAT if cfg.MODEL.MASK_ON else "",
        keypoints=list(flip) if cfg.MODEL.KEYPOINT_ON else (),
    )
