"""torchvision's decoding of keypoints as one operator, and what it is in ONNX: a loop over the detections.

Shapes: D detections, P keypoints, S the side of a heat map.
"""

from __future__ import annotations

from typing import Any

import onnxscript
import torch
from onnxscript import FLOAT, opset18
from torch import Tensor
from torchvision.models.detection.roi_heads import heatmaps_to_keypoints

op: Any = opset18  # its types do not know constants
_FLOAT, _INT64 = 1, 7  # ONNX's numbers of its types


def find_keypoints(maps: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor]:
    """Heat maps (D, P, S, S) and boxes (D, 4) -> the best pixels (D, P, 2) and their values (D, P)."""
    found = _best_pixels(maps, boxes)
    return found[..., :2], found[..., 2]


@torch.library.custom_op("pretrain_to_transfer::best_pixels", mutates_args=())
def _best_pixels(maps: Tensor, boxes: Tensor) -> Tensor:
    """(D, P, 3): x, y and value of the best pixel, once a heat map has been resized to its box."""
    points, values = heatmaps_to_keypoints(maps, boxes)
    return torch.cat([points[..., :2], values[..., None]], -1)


@_best_pixels.register_fake
def _(maps: Tensor, boxes: Tensor) -> Tensor:
    return maps.new_empty(maps.shape[0], maps.shape[1], 3)


@onnxscript.script()
def _best_pixels_in_onnx(maps: FLOAT[...], boxes: FLOAT[...]) -> FLOAT[...]:
    count = op.Shape(maps, start=1, end=2)
    found = op.Expand(op.Constant(value_float=0.0), op.Concat(op.Shape(maps, start=0, end=2), [3], axis=0))
    for i in range(op.Squeeze(op.Shape(maps, start=0, end=1))):
        row_of_i = op.Unsqueeze(i, [0])
        box = op.Squeeze(op.Gather(boxes, row_of_i, axis=0), [0])
        corner = op.Slice(box, [0], [2])
        side = op.Max(op.Slice(box, [2], [4]) - corner, 1.0)
        pixels = op.Ceil(side)
        width = op.Cast(op.Slice(pixels, [0], [1]), to=_INT64)
        height = op.Cast(op.Slice(pixels, [1], [2]), to=_INT64)
        resized = op.Resize(
            op.Gather(maps, row_of_i, axis=0), None, None, op.Concat([1], count, height, width, axis=0),
            mode="cubic", cubic_coeff_a=-0.75, coordinate_transformation_mode="half_pixel",
        )  # fmt: skip
        flat = op.Reshape(resized, op.Concat(count, [-1], axis=0))
        best = op.ArgMax(flat, axis=1, keepdims=1)
        y = best / width
        x_y = op.Cast(op.Concat(best - y * width, y, axis=1), to=_FLOAT)
        points = (x_y + 0.5) * (side / pixels) + corner
        row = op.Concat(points, op.GatherElements(flat, best, axis=1), axis=1)
        found = op.ScatterND(found, op.Unsqueeze(row_of_i, [0]), op.Unsqueeze(row, [0]))
    return found


TRANSLATIONS: dict[Any, Any] = {torch.ops.pretrain_to_transfer.best_pixels.default: _best_pixels_in_onnx}
