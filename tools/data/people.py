"""Drawn figures as a COCO keypoint data set: 17 keypoints, boxes, polygons, crowds, images with nobody in them.

Left and right limbs look alike, so a mirrored picture with swapped names is as good as a drawn one. An image folder
holds crops around the figures of the same scenes, by how many hands are raised: a class that depends on the pose alone.
"""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np

from tools.data.coco_writer import CocoWriter, write_jpeg

KEYPOINTS = [
    "nose", "left_eye", "right_eye", "left_ear", "right_ear", "left_shoulder", "right_shoulder", "left_elbow",
    "right_elbow", "left_wrist", "right_wrist", "left_hip", "right_hip", "left_knee", "right_knee", "left_ankle",
    "right_ankle",
]  # fmt: skip
_SKELETON = [
    [16, 14], [14, 12], [17, 15], [15, 13], [12, 13], [6, 12], [7, 13], [6, 7], [6, 8], [7, 9], [8, 10], [9, 11],
    [2, 3], [1, 2], [1, 3], [2, 4], [3, 5], [4, 6], [5, 7],
]  # fmt: skip
_CATEGORY = {"id": 1, "name": "person", "supercategory": "person", "keypoints": KEYPOINTS, "skeleton": _SKELETON}
_LIMBS = [(5, 7), (7, 9), (6, 8), (8, 10), (11, 13), (13, 15), (12, 14), (14, 16)]
_UNLABELLED_SHARE = 0.05  # of keypoints in the picture that no one marked
_CROP, _MARGIN = 64, 0.1  # pixels per side of a crop; space around the figure, as a share of its box's longer side
_LEAST_VISIBLE = 0.3  # of a figure: what would hide more of it is placed elsewhere or left out


def write_people(folder: Path, images: dict[str, int], size: int, seed: int) -> None:
    """Writes ``folder/coco/{train,val}/*.jpg`` and ``folder/coco/annotations/keypoints_{train,val}.json``.

    Crops go to ``folder/images/{train,val}/<hands raised>/*.jpg``. Of ten images, one has no figure, one has a crowd
    (``iscrowd`` 1, run lengths) next to its figures.

    Args:
        images: scenes by split.
        size: pixels of a scene's longer side.
        seed: of everything drawn.
    """
    for number, split in enumerate(("train", "val")):
        rng = np.random.default_rng((seed, 2, number))
        writer = CocoWriter(folder / "coco", split, [_CATEGORY])
        for raised in range(3):
            (folder / "images" / split / f"{raised}_raised").mkdir(parents=True)
        for i in range(images[split]):
            height, width = ((size, size), (size * 3 // 4, size), (size, size * 3 // 4))[rng.integers(3)]
            figures, crowd = 0 if i % 10 == 4 else int(rng.integers(1, 4)), i % 10 == 7
            crops = _write_scene(writer, height, width, rng, figures=figures, crowd=crowd)
            for number, (raised, crop) in enumerate(crops):
                write_jpeg(folder / "images" / split / f"{raised}_raised" / f"{i:05d}_{number}.jpg", crop)
        writer.write("keypoints")


def _write_scene(
    writer: CocoWriter, height: int, width: int, rng: np.random.Generator, figures: int, crowd: bool
) -> list[tuple[int, np.ndarray]]:
    """Adds a scene; returns the number of raised hands and the crop of each figure whose arms are in the picture."""
    image = rng.normal(96, 12, (height, width, 3)).clip(0, 255).astype(np.uint8)
    owner = np.full((height, width), -1)  # who is on top
    crowd_mask = _draw_crowd(image, rng) if crowd else None
    drawn: list[np.ndarray] = []
    tries = 0
    while len(drawn) < figures and tries < 50:
        tries += 1
        points = _pose(height, width, rng)
        attempt = image.copy()
        mask = _draw_figure(attempt, points, rng)
        hidden = [((owner == n) & mask).sum() / max(1, (owner == n).sum()) for n in range(len(drawn))]
        if mask.sum() < 60 or max(hidden, default=0) > 1 - _LEAST_VISIBLE:
            continue
        image, owner[mask] = attempt, len(drawn)
        drawn.append(points)
    if figures:
        _draw_box(image, owner, rng)
    image_id = writer.add_image(image)
    crops: list[tuple[int, np.ndarray]] = []
    for number, points in enumerate(drawn):
        mask = owner == number
        if mask.any():
            keypoints = _keypoints(points, owner, number, rng)
            writer.add_object(image_id, 1, mask, keypoints=keypoints, num_keypoints=sum(v > 0 for v in keypoints[2::3]))
            shoulders, wrists = points[[5, 6]].round(), points[[9, 10]].round()
            if ((wrists >= 0) & (wrists < (width, height))).all():
                crops.append((int((wrists[:, 1] < shoulders[:, 1]).sum()), _crop(image, mask)))
    if crowd_mask is not None:
        visible = crowd_mask & (owner == -1)
        if visible.any():
            writer.add_crowd(image_id, 1, visible, keypoints=[0] * 51, num_keypoints=0)
    return crops


def _crop(image: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """(_CROP, _CROP, 3): a square around a figure's visible pixels, moved and shrunk to lie in the picture."""
    left, top, width, height = cv2.boundingRect(mask.astype(np.uint8))
    side = min(round(max(width, height) * (1 + 2 * _MARGIN)), *mask.shape)
    x, y = (
        min(max(start + (length - side) // 2, 0), limit - side)
        for start, length, limit in ((left, width, mask.shape[1]), (top, height, mask.shape[0]))
    )
    return cv2.resize(image[y : y + side, x : x + side], (_CROP, _CROP), interpolation=cv2.INTER_AREA)


def _pose(height: int, width: int, rng: np.random.Generator) -> np.ndarray:
    """(17, 2) x, y in pixels of a figure that faces us: its left is on the right of the picture."""
    unit = height * rng.uniform(0.35, 0.85) / 7.5  # the figure is about 7.5 heads tall
    points = np.zeros((17, 2))
    points[0] = 0, -0.1
    for left, right, x, y in ((1, 2, 0.18, -0.2), (3, 4, 0.42, -0.1), (5, 6, 0.95, 1.0), (11, 12, 0.6, 3.4)):
        points[left], points[right] = (x, y), (-x, y)
    for side, (shoulder, elbow, wrist, hip, knee, ankle) in ((1, (5, 7, 9, 11, 13, 15)), (-1, (6, 8, 10, 12, 14, 16))):
        upper, lower = rng.uniform(-0.2, 2.4), rng.uniform(-0.6, 1.6)  # radians away from hanging down
        points[elbow] = points[shoulder] + 1.4 * np.array([side * np.sin(upper), np.cos(upper)])
        points[wrist] = points[elbow] + 1.2 * np.array([side * np.sin(upper + lower), np.cos(upper + lower)])
        thigh, shin = rng.uniform(-0.1, 0.6), rng.uniform(-0.5, 0.1)
        points[knee] = points[hip] + 1.7 * np.array([side * np.sin(thigh), np.cos(thigh)])
        points[ankle] = points[knee] + 1.6 * np.array([side * np.sin(thigh + shin), np.cos(thigh + shin)])
    lean = rng.uniform(-0.3, 0.3)
    turn = np.array([[np.cos(lean), -np.sin(lean)], [np.sin(lean), np.cos(lean)]])
    center = np.array([width * rng.uniform(0.1, 0.9), height * rng.uniform(0.25, 0.75)])
    return (points - (0, 2.8)) @ turn.T * unit + center


def _draw_figure(image: np.ndarray, points: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draws a figure in place and returns its pixels, (H, W) bool."""
    unit = float(np.linalg.norm(points[5] - points[6])) / 1.9
    skin, cloth = rng.integers(150, 256, 3).tolist(), rng.integers(0, 200, 3).tolist()
    mask = np.zeros(image.shape[:2], np.uint8)
    at = [tuple(round(c) for c in point) for point in points]
    thick = max(2, round(0.55 * unit))
    for canvas, limb, body, eye in ((image, skin, cloth, [20] * 3), (mask, 1, 1, 1)):
        for one, other in _LIMBS:
            cv2.line(canvas, at[one], at[other], limb, thick)
        cv2.fillPoly(canvas, [np.array([at[5], at[6], at[12], at[11]])], body)
        cv2.polylines(canvas, [np.array([at[5], at[6], at[12], at[11]])], True, body, thick)
        cv2.circle(canvas, tuple(round(c) for c in points[[3, 4]].mean(axis=0)), max(2, round(0.55 * unit)), limb, -1)
        for point in (0, 1, 2):
            cv2.circle(canvas, at[point], max(1, round(0.08 * unit)), eye, -1)
    return mask.astype(bool)


def _draw_crowd(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Small figures side by side, far away; returns the pixels of all of them."""
    height, width = image.shape[:2]
    mask = np.zeros((height, width), bool)
    top, left = rng.uniform(0.1, 0.3) * height, rng.uniform(0.0, 0.4) * width
    for n in range(6):
        points = _pose(height // 4, width // 4, rng)
        mask |= _draw_figure(image, points - points.mean(axis=0) + (left + n * width * 0.07, top), rng)
    return mask


def _draw_box(image: np.ndarray, owner: np.ndarray, rng: np.random.Generator) -> None:
    """Draws an object in front of the figures, in half of the pictures."""
    height, width = owner.shape
    if rng.random() < 0.5:
        return
    w, h = int(width * rng.uniform(0.1, 0.25)), int(height * rng.uniform(0.1, 0.25))
    top, left = int(rng.integers(0, height - h)), int(rng.integers(0, width - w))
    covered = owner[top : top + h, left : left + w]
    for number in np.unique(covered[covered >= 0]):
        if (covered == number).sum() > (1 - _LEAST_VISIBLE) * (owner == number).sum():
            return
    covered[:] = -2
    image[top : top + h, left : left + w] = rng.integers(0, 256, 3)


def _keypoints(points: np.ndarray, owner: np.ndarray, number: int, rng: np.random.Generator) -> list[int]:
    """COCO's [x, y, v] * 17: v 2 visible, 1 hidden by something in front, 0 (and x = y = 0) outside or not marked."""
    flat: list[int] = []
    height, width = owner.shape
    for x, y in points.round().astype(int).tolist():
        inside = 0 <= x < width and 0 <= y < height
        if not inside or rng.random() < _UNLABELLED_SHARE:
            flat += [0, 0, 0]
        else:
            flat += [x, y, 2 if owner[y, x] == number else 1]
    return flat
