"""FLOPs and saved activations of a ResNet and of what detectors add to it, in closed form and without torch.

`Work` of one image's forward pass. Training adds twice these FLOPs for the gradients of inputs and weights, and keeps
the activations that they need.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
_WIDTH = 64  # channels of the stem and of the first stage


@dataclass(frozen=True)
class Work:
    """The work of a forward pass.

    Attributes:
        flops: floating-point operations of convolutions and linear layers, 2 per multiply-add.
        outputs: numbers that norms, ReLUs and pooling leave for the next layer, which its gradient needs.
        inputs_of_norms: numbers that convolutions leave for a norm, whose gradient needs them unless it is frozen.
    """

    flops: float = 0.0
    outputs: float = 0.0
    inputs_of_norms: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.flops + other.flops,
            self.outputs + other.outputs,
            self.inputs_of_norms + other.inputs_of_norms,
        )

    def __mul__(self, factor: float) -> Work:
        return Work(self.flops * factor, self.outputs * factor, self.inputs_of_norms * factor)

    @property
    def saved(self) -> float:
        """Numbers that a trained network keeps for its backward pass."""
        return self.outputs + self.inputs_of_norms


@dataclass(frozen=True)
class Stage:
    """The stem, or one of the four stages, of a ResNet.

    Attributes:
        channels, height, width: the shape of its output.
    """

    work: Work
    channels: int
    height: int
    width: int


def count_resnet(depth: int, height: int, width: int, stem: str = "imagenet") -> list[Stage]:
    """Return the stem and the four stages of a ResNet for images of this size."""
    stages = [_count_stem(height, width, stem)]
    for index in range(4):
        stages.append(count_stage(depth, index, stages[-1]))
    return stages


def count_stage(depth: int, index: int, previous: Stage, first_stride: int = 0) -> Stage:
    """Return one of the four stages, ``index`` 0 to 3, behind ``previous``.

    Args:
        first_stride: stride of the first block (default: 1 in the first stage, else 2).
    """
    width = _WIDTH << index
    channels = width * _count_expansion(depth)
    stage = previous
    total = Work()
    for number in range(_BLOCKS[depth][index]):
        stride = (first_stride or (2 if index else 1)) if number == 0 else 1
        stage = _count_block(depth, stage, width, channels, stride)
        total += stage.work
    return Stage(total, stage.channels, stage.height, stage.width)


def count_resnet_parameters(depth: int) -> int:
    """Return the weights and biases of a ResNet without its classifier."""
    channels = _WIDTH
    total = 3 * 49 * _WIDTH + 2 * _WIDTH
    for index, blocks in enumerate(_BLOCKS[depth]):
        width = _WIDTH << index
        out = width * _count_expansion(depth)
        for number in range(blocks):
            convolutions = list(_list_convolutions(depth, channels, width, out))
            if number == 0 and (channels != out or index):
                convolutions.append((channels, out, 1))
            total += sum(a * b * k * k + 2 * b for a, b, k in convolutions)
            channels = out
    return total


def count_dense_head(last: Stage, dim: int) -> Work:
    """Return the work of DenseCL's head on the last feature map: two 1x1 convolutions."""
    positions = last.height * last.width
    hidden = count_convolution(last.channels, last.channels, 1, positions)
    return hidden + count_convolution(last.channels, dim, 1, positions)


def count_linear(sizes: Sequence[int]) -> Work:
    """Return the work of linear layers with ReLU between them."""
    flops = sum(2 * a * b for a, b in itertools.pairwise(sizes))
    return Work(flops, sum(sizes[1:]))


def count_convolution(channels: int, out: int, kernel: int, positions: float) -> Work:
    """Return the work of a convolution without a norm, with a ReLU or whatever else keeps its output."""
    return Work(2.0 * positions * channels * out * kernel**2, positions * out)


def _count_expansion(depth: int) -> int:
    return 4 if depth >= 50 else 1


def _count_stem(height: int, width: int, stem: str) -> Stage:
    kernel = 3 if stem == "cifar" else 7
    shrink = 1 if stem == "cifar" else 2
    height_out = -(-height // shrink)
    width_out = -(-width // shrink)
    positions = height_out * width_out
    outputs = 3 * height * width + positions * _WIDTH  # the image, which the first gradient needs, and the ReLU's
    if stem == "imagenet":
        height_out = -(-height_out // 2)
        width_out = -(-width_out // 2)
        pooled = height_out * width_out * _WIDTH
        outputs += 3 * pooled  # the pooled map, and the positions of its maxima: 8 bytes each
    work = Work(2.0 * positions * 3 * _WIDTH * kernel**2, outputs, positions * _WIDTH)
    return Stage(work, _WIDTH, height_out, width_out)


def _count_block(depth: int, previous: Stage, width: int, channels: int, stride: int) -> Stage:
    height_out = -(-previous.height // stride)
    width_out = -(-previous.width // stride)
    before = previous.height * previous.width
    after = height_out * width_out
    # Where a bottleneck strides, its first convolution still sees the larger map.
    convolutions = list(_list_convolutions(depth, previous.channels, width, channels))
    positions = [before, after, after] if len(convolutions) == 3 else [after, after]
    flops = 0.0
    maps = []
    for (a, b, kernel), count in zip(convolutions, positions, strict=True):
        flops += 2.0 * count * a * b * kernel**2
        maps.append(count * b)
    inputs_of_norms = sum(maps)
    outputs = sum(maps)  # the last ReLU follows the sum with the shortcut
    if previous.channels != channels or stride != 1:
        flops += 2.0 * after * previous.channels * channels
        inputs_of_norms += after * channels
    return Stage(Work(flops, outputs, inputs_of_norms), channels, height_out, width_out)


def _list_convolutions(depth: int, channels: int, width: int, out: int) -> Iterator[tuple[int, int, int]]:
    """Yield input channels, output channels and kernel of a block's convolutions, without the shortcut's."""
    if _count_expansion(depth) == 1:
        yield channels, width, 3
        yield width, out, 3
        return
    yield channels, width, 1
    yield width, width, 3
    yield width, out, 1
