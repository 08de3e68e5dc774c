"""Drawn people as a COCO keypoint data set: 17 keypoints, boxes, polygons, crowds, and images without people.

    python -m studies.people.draw datasets/people

Left and right limbs look alike, so that mirrored images with swapped keypoint names are valid, too. An image folder
contains crops around the people of the same scenes. Their class is the number of raised hands, which depends only on
the pose.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from pretrain.common.command_line import run_program

    run_program("studies.people.draw")

import cv2
import numpy as np
from pycocotools import mask as run_lengths

from tools import make_data
from tools.data.coco_writer import CocoWriter, write_jpeg

_PARTS = ("eye", "ear", "shoulder", "elbow", "wrist", "hip", "knee", "ankle")
KEYPOINTS = ["nose", *(f"{side}_{part}" for part in _PARTS for side in ("left", "right"))]  # in COCO's order
# Pairs of keypoints, numbered from 1 as in COCO.
_PAIRS = "16-14 14-12 17-15 15-13 12-13 6-12 7-13 6-7 6-8 7-9 8-10 9-11 2-3 1-2 1-3 2-4 3-5 4-6 5-7"
_SKELETON = [[int(number) for number in pair.split("-")] for pair in _PAIRS.split()]
_CATEGORY = {"id": 1, "name": "person", "supercategory": "person", "keypoints": KEYPOINTS, "skeleton": _SKELETON}
_LIMBS = [(5, 7), (7, 9), (6, 8), (8, 10), (11, 13), (13, 15), (12, 14), (14, 16)]
_UNLABELED_FRACTION = 0.05  # fraction of the keypoints inside the image that are not labeled
_CROP = 64  # pixels per side of a crop
_MARGIN = 0.1  # margin of a crop around a person, relative to the longer side of the person's box
_MAX_OCCLUSION = 0.7  # maximum occluded fraction of a person; objects that would occlude more are moved or skipped
_IMAGES = {"train": 400, "val": 100}
_SIZE = 160  # pixels of the longer side of a scene


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description="Write the drawn people of this study to a folder."
    )
    parser.add_argument("output", metavar="FOLDER", help="folder to write")
    output = parser.parse_args(argv).output
    make_data.make(
        Path(output).absolute(), {"kind": "people"}, lambda folder: write_people(folder, _IMAGES, _SIZE, seed=0)
    )


def write_people(folder: Path, images: dict[str, int], size: int, seed: int) -> None:
    """Write ``folder/coco/{train,val}/*.jpg`` and ``folder/coco/annotations/keypoints_{train,val}.json``.

    Crops go to ``folder/images/{train,val}/<hands raised>/*.jpg``. One image in ten has no people, and one in ten has
    a crowd (``iscrowd`` 1, run lengths) next to its people.

    Args:
        images: number of scenes in each split.
        size: pixels of the longer side of a scene.
        seed: seed of everything that is drawn.
    """
    for number, split in enumerate(("train", "val")):
        rng = np.random.default_rng((seed, 2, number))
        writer = CocoWriter(folder / "coco", split, [_CATEGORY])
        for raised in range(3):
            (folder / "images" / split / f"{raised}_raised").mkdir(parents=True)
        for i in range(images[split]):
            height, width = ((size, size), (size * 3 // 4, size), (size, size * 3 // 4))[rng.integers(3)]
            people = 0 if i % 10 == 4 else int(rng.integers(1, 4))
            crops = _write_scene(writer, height, width, rng, people, has_crowd=i % 10 == 7)
            for index, (raised, crop) in enumerate(crops):
                write_jpeg(folder / "images" / split / f"{raised}_raised" / f"{i:05d}_{index}.jpg", crop)
        writer.write("keypoints")


def _write_scene(
    writer: CocoWriter, height: int, width: int, rng: np.random.Generator, people: int, has_crowd: bool
) -> list[tuple[int, np.ndarray]]:
    """Write a scene; return the number of raised hands and the crop of each person whose arms are in the image."""
    image = rng.normal(96, 12, (height, width, 3)).clip(0, 255).astype(np.uint8)
    owner = np.full((height, width), -1)  # number of the person on top
    crowd = _draw_crowd(image, rng) if has_crowd else None
    poses: list[np.ndarray] = []
    attempts = 0
    while len(poses) < people and attempts < 50:
        attempts += 1
        points = _draw_pose(height, width, rng)
        canvas = image.copy()
        mask = _draw_person(canvas, points, rng)
        occluded = [((owner == n) & mask).sum() / max(1, (owner == n).sum()) for n in range(len(poses))]
        if mask.sum() < 60 or max(occluded, default=0) > _MAX_OCCLUSION:
            continue
        image = canvas
        owner[mask] = len(poses)
        poses.append(points)
    if people:
        _draw_box(image, owner, rng)
    image_id = writer.add_image(image)
    crops: list[tuple[int, np.ndarray]] = []
    for number, points in enumerate(poses):
        mask = owner == number
        if mask.any():
            keypoints = _label_keypoints(points, owner, number, rng)
            labeled = sum(flag > 0 for flag in keypoints[2::3])
            writer.add_object(image_id, 1, mask, keypoints=keypoints, num_keypoints=labeled)
            shoulders = points[[5, 6]].round()
            wrists = points[[9, 10]].round()
            if ((wrists >= 0) & (wrists < (width, height))).all():
                crops.append((int((wrists[:, 1] < shoulders[:, 1]).sum()), _crop(image, mask)))
    if crowd is not None:
        visible = crowd & (owner == -1)
        if visible.any():
            add_crowd(writer, image_id, visible)
    return crops


def add_crowd(writer: CocoWriter, image_id: int, mask: np.ndarray) -> None:
    """Add a crowd (``iscrowd`` 1) from its pixels, as uncompressed run lengths."""
    pixels = np.asfortranarray(mask, np.uint8)
    changes = np.flatnonzero(np.diff(pixels.ravel(order="F"), prepend=0))  # the first run consists of zeros
    counts = np.diff(changes, prepend=0, append=pixels.size).tolist()
    encoded: Any = run_lengths.encode(pixels)
    box = run_lengths.toBbox(encoded).tolist()
    area = float(run_lengths.area(encoded))
    segmentation = {"size": list(mask.shape), "counts": counts}
    more = {"segmentation": segmentation, "keypoints": [0] * 51, "num_keypoints": 0}
    writer.add_record(image_id, 1, box, area, iscrowd=1, **more)


def _crop(image: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return (_CROP, _CROP, 3): a square around a person's visible pixels, moved and shrunk to lie in the image."""
    left, top, width, height = cv2.boundingRect(mask.astype(np.uint8))
    side = min(round(max(width, height) * (1 + 2 * _MARGIN)), *mask.shape)
    x = min(max(left + (width - side) // 2, 0), mask.shape[1] - side)
    y = min(max(top + (height - side) // 2, 0), mask.shape[0] - side)
    return cv2.resize(image[y : y + side, x : x + side], (_CROP, _CROP), interpolation=cv2.INTER_AREA)


def _draw_pose(height: int, width: int, rng: np.random.Generator) -> np.ndarray:
    """Draw a random pose, (17, 2) x, y in pixels, of a person who faces us: the left side is on the image's right."""
    unit = height * rng.uniform(0.35, 0.85) / 7.5  # a person is about 7.5 heads tall
    points = np.zeros((17, 2))
    points[0] = 0, -0.1
    for left, right, x, y in ((1, 2, 0.18, -0.2), (3, 4, 0.42, -0.1), (5, 6, 0.95, 1.0), (11, 12, 0.6, 3.4)):
        points[left] = x, y
        points[right] = -x, y
    for side, (shoulder, elbow, wrist, hip, knee, ankle) in ((1, (5, 7, 9, 11, 13, 15)), (-1, (6, 8, 10, 12, 14, 16))):
        upper = rng.uniform(-0.2, 2.4)  # angle from hanging down, in radians
        lower = rng.uniform(-0.6, 1.6)
        points[elbow] = points[shoulder] + 1.4 * np.array([side * np.sin(upper), np.cos(upper)])
        points[wrist] = points[elbow] + 1.2 * np.array([side * np.sin(upper + lower), np.cos(upper + lower)])
        thigh = rng.uniform(-0.1, 0.6)
        shin = rng.uniform(-0.5, 0.1)
        points[knee] = points[hip] + 1.7 * np.array([side * np.sin(thigh), np.cos(thigh)])
        points[ankle] = points[knee] + 1.6 * np.array([side * np.sin(thigh + shin), np.cos(thigh + shin)])
    lean = rng.uniform(-0.3, 0.3)
    turn = np.array([[np.cos(lean), -np.sin(lean)], [np.sin(lean), np.cos(lean)]])
    center = np.array([width * rng.uniform(0.1, 0.9), height * rng.uniform(0.25, 0.75)])
    return (points - (0, 2.8)) @ turn.T * unit + center


def _draw_person(image: np.ndarray, points: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw a person into ``image`` and return the person's pixels, (H, W) bool."""
    unit = float(np.linalg.norm(points[5] - points[6])) / 1.9
    skin = rng.integers(150, 256, 3).tolist()
    cloth = rng.integers(0, 200, 3).tolist()
    mask = np.zeros(image.shape[:2], np.uint8)
    pixels = [tuple(round(c) for c in point) for point in points]
    torso = [np.array([pixels[5], pixels[6], pixels[12], pixels[11]])]
    head = tuple(round(c) for c in points[[3, 4]].mean(axis=0))
    thickness = max(2, round(0.55 * unit))
    for canvas, limb, body, eye in ((image, skin, cloth, [20] * 3), (mask, 1, 1, 1)):
        for start, end in _LIMBS:
            cv2.line(canvas, pixels[start], pixels[end], limb, thickness)
        cv2.fillPoly(canvas, torso, body)
        cv2.polylines(canvas, torso, True, body, thickness)
        cv2.circle(canvas, head, thickness, limb, -1)
        for point in (0, 1, 2):
            cv2.circle(canvas, pixels[point], max(1, round(0.08 * unit)), eye, -1)
    return mask.astype(bool)


def _draw_crowd(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw small people side by side, far away; return the pixels of all of them."""
    height, width = image.shape[:2]
    mask = np.zeros((height, width), bool)
    top = rng.uniform(0.1, 0.3) * height
    left = rng.uniform(0.0, 0.4) * width
    for n in range(6):
        points = _draw_pose(height // 4, width // 4, rng)
        mask |= _draw_person(image, points - points.mean(axis=0) + (left + n * width * 0.07, top), rng)
    return mask


def _draw_box(image: np.ndarray, owner: np.ndarray, rng: np.random.Generator) -> None:
    """Draw an object in front of the people, in half of the images."""
    height, width = owner.shape
    if rng.random() < 0.5:
        return
    w = int(width * rng.uniform(0.1, 0.25))
    h = int(height * rng.uniform(0.1, 0.25))
    top = int(rng.integers(0, height - h))
    left = int(rng.integers(0, width - w))
    covered = owner[top : top + h, left : left + w]
    for number in np.unique(covered[covered >= 0]):
        if (covered == number).sum() > _MAX_OCCLUSION * (owner == number).sum():
            return
    covered[:] = -2
    image[top : top + h, left : left + w] = rng.integers(0, 256, 3)


def _label_keypoints(points: np.ndarray, owner: np.ndarray, number: int, rng: np.random.Generator) -> list[int]:
    """Return COCO's [x, y, v] * 17: v is 2 if visible, 1 if occluded, 0 (and x = y = 0) if outside or not labeled."""
    flat: list[int] = []
    height, width = owner.shape
    for x, y in points.round().astype(int).tolist():
        inside = 0 <= x < width and 0 <= y < height
        if not inside or rng.random() < _UNLABELED_FRACTION:
            flat += [0, 0, 0]
        else:
            flat += [x, y, 2 if owner[y, x] == number else 1]
    return flat
