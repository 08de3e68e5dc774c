"""Published rates of GPUs and published training times, with their sources; none was measured by this project."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

NO_SPEED_UP = 1.0


@dataclass(frozen=True)
class Source:
    """Where a number is published, and of what date."""

    name: str
    date: str
    url: str


LAMBDA = Source(
    "Lambda, deeplearning-benchmark, column resnet50",
    "2025-12-17",
    "https://github.com/lambdal/deeplearning-benchmark/tree/master/pytorch",
)
TIMM = Source(
    "timm, benchmark-train-amp-nhwc-pt112-cu113-rtx3090.csv",
    "2022-07",
    "https://github.com/huggingface/pytorch-image-models/tree/main/results",
)
NVIDIA_CLASSIFICATION = Source(
    "NVIDIA, DeepLearningExamples, ResNet-50 v1.5",
    "2021-03",
    "https://github.com/NVIDIA/DeepLearningExamples/tree/master/PyTorch/Classification/ConvNets/resnet50v1.5",
)
NVIDIA_DETECTION = Source(
    "NVIDIA, DeepLearningExamples, Mask R-CNN for PyTorch",
    "2022-05",
    "https://github.com/NVIDIA/DeepLearningExamples/tree/master/PyTorch/Segmentation/MaskRCNN",
)
NVIDIA_TENSORFLOW = Source(
    "NVIDIA, DeepLearningExamples, Mask R-CNN for TensorFlow 2",
    "2021-02",
    "https://github.com/NVIDIA/DeepLearningExamples/tree/master/TensorFlow2/Segmentation/MaskRCNN",
)
ZOO = Source(
    "Detectron2, MODEL_ZOO.md", "2019-10", "https://github.com/facebookresearch/detectron2/blob/main/MODEL_ZOO.md"
)
MOCO = Source("MoCo, issue 4", "2020-03-25", "https://github.com/facebookresearch/moco/issues/4")
DENSECL = Source("DenseCL, README", "2021", "https://github.com/WXinlong/DenseCL")
SOCO = Source("a user of SoCo, issue 10", "2021-11-29", "https://github.com/ueoo/SoCo/issues/10")
LIGHTLY = Source(
    "lightly, benchmarks.rst",
    "2026-08-21",
    "https://github.com/lightly-ai/lightly/blob/master/docs/source/getting_started/benchmarks.rst",
)
SOURCES = (LAMBDA, TIMM, NVIDIA_CLASSIFICATION, NVIDIA_DETECTION, NVIDIA_TENSORFLOW, ZOO, MOCO, DENSECL, SOCO, LIGHTLY)


@dataclass(frozen=True, eq=False)
class Gpu:
    """A type of GPU.

    Attributes:
        name: for tables.
        gib: its memory.
        supervised: images/s of supervised training of a ResNet-50 at 224 pixels, by precision: ``float32`` (without
            TF32), ``tf32`` or ``half`` (bf16 or fp16).
        group: a number of GPUs in one machine, and their images/s together.
        detection: speed of training Mask R-CNN, as a multiple of a V100 in float32, by precision.
    """

    name: str
    gib: float
    supervised: Mapping[str, float]
    group: tuple[int, Mapping[str, float]]
    detection: Mapping[str, float]

    def measure_scaling(self, count: int, precision: str) -> float:
        """Return the fraction of ``count`` times the speed of one GPU that so many reach together.

        The loss per further GPU is that of `group`.
        """
        size, together = self.group
        loss = (size * self.supervised[precision] / together[precision] - 1) / (size - 1)
        return 1 / (1 + loss * (count - 1))


# Mask R-CNN by NVIDIA's PyTorch code on 8 GPUs: V100 85 images/s in float32 and 135 in half precision, A100 193 and
# 209. Nobody publishes the other cards: the A100's, times the ratio of their speeds for a ResNet-50.
_DETECTION_A100 = {"tf32": 193 / 85, "half": 209 / 85}


def _scale_detection(supervised: Mapping[str, float]) -> dict[str, float]:
    return {name: _DETECTION_A100[name] * supervised[name] / _A100[name] for name in _DETECTION_A100}


_A100 = {"tf32": 1066.0, "half": 1582.0}  # 80 GB, SXM4
_H100 = {"tf32": 1893.0, "half": 2787.0}  # 80 GB, SXM5: the median of five machines
_RTX_3090 = {"tf32": 513.0, "half": 905.0}
_RTX_4090 = {"tf32": 721.0, "half": 1301.0}
_A6000 = {"tf32": 514.0, "half": 916.0}
V100 = Gpu(
    "V100",
    16,
    {"float32": 369.0, "half": 833.0},
    (8, {"float32": 2817.0, "half": 6174.0}),
    {"float32": NO_SPEED_UP, "half": 135 / 85},
)
RTX_3090 = Gpu("RTX 3090", 24, _RTX_3090, (2, {"tf32": 979.0, "half": 1751.0}), _scale_detection(_RTX_3090))
RTX_4090 = Gpu("RTX 4090", 24, _RTX_4090, (2, {"tf32": 1363.0, "half": 2468.0}), _scale_detection(_RTX_4090))
A6000 = Gpu("RTX A6000", 48, _A6000, (2, {"tf32": 995.0, "half": 1775.0}), _scale_detection(_A6000))
A100 = Gpu("A100", 80, _A100, (8, {"tf32": 7397.0, "half": 11439.0}), _DETECTION_A100)
H100 = Gpu("H100", 80, _H100, (8, {"tf32": 14981.0, "half": 22048.0}), _scale_detection(_H100))
GPUS = (V100, RTX_3090, RTX_4090, A6000, A100, H100)
SHOWN = ((RTX_3090, 1), (RTX_4090, 1), (A100, 1), (H100, 1), (A100, 8), (H100, 8))  # in tables

# ResNet-18 and ResNet-50 by the same code on an RTX 3090 (timm): a ResNet-18 also makes more FLOPs per second.
RESNET18_PER_RESNET50 = 3482 / 1218
# Training images of data sets that are named by their recipes.
IMAGES = {
    "imagenet": 1_281_167,
    "imagenet100": 126_689,
    "cifar10": 50_000,
    "cifar100": 50_000,
    "fashion_mnist": 60_000,
    "stl10": 105_000,
    "tiny_imagenet": 100_000,
    "folder:datasets/coco/train2017": 118_287,
}
# Seconds per iteration of 16 images on 8 V100, and GB of one of them, from Detectron2's model zoo; its models are
# trained in float32 with a frozen stem and first stage, and frozen norms.
ZOO_SECONDS = {"faster FPN": 0.210, "mask FPN": 0.261, "keypoint FPN": 0.315, "faster C4": 0.551, "mask C4": 0.584}
ZOO_GB = {"faster FPN": 3.0, "mask FPN": 3.4, "keypoint FPN": 5.0, "faster C4": 4.8, "mask C4": 5.2}


def find_gpu(name: str) -> Gpu | None:
    """Return the GPU of a device's name or SLURM type: ``NVIDIA A100-SXM4-80GB``, ``a100``, ``rtx3090``."""
    text = re.sub(r"[^a-z0-9]", "", name.lower())
    matches = [gpu for gpu in GPUS if re.sub(r"^rtx|[^a-z0-9]", "", gpu.name.lower()) in text]
    return max(matches, key=lambda gpu: len(gpu.name), default=None)


@dataclass(frozen=True)
class PublishedRun:
    """A pretraining whose time is published.

    Attributes:
        trained, encoded: passes per image with and without gradient, which include those of evaluations in between.
        note: what else the time contains.
        dense: with a dense head.
    """

    name: str
    gpu: Gpu
    count: int
    precision: str
    depth: int
    size: int
    stem: str
    trained: int
    encoded: int
    images: float
    hours: float
    source: Source
    note: str = ""
    dense: bool = False


@dataclass(frozen=True)
class PublishedRate:
    """Published images/s of training, by other code than the one whose rates the model uses."""

    name: str
    gpu: Gpu
    count: int
    precision: str
    images_per_second: float
    source: Source


SUPERVISED_RATES = (  # of a ResNet-50
    PublishedRate("V100, float32", V100, 1, "float32", 367, NVIDIA_CLASSIFICATION),
    PublishedRate("V100, half precision", V100, 1, "half", 1200, NVIDIA_CLASSIFICATION),
    PublishedRate("A100, TF32", A100, 1, "tf32", 938, NVIDIA_CLASSIFICATION),
    PublishedRate("A100, half precision", A100, 1, "half", 2470, NVIDIA_CLASSIFICATION),
    PublishedRate("RTX 3090, half precision", RTX_3090, 1, "half", 1218, TIMM),
)
DETECTION_RATES = (  # of Mask R-CNN with FPN and ResNet-50
    PublishedRate("8 V100, float32, 12 images each", V100, 8, "float32", 85, NVIDIA_DETECTION),
    PublishedRate("8 A100, TF32, 12 images each", A100, 8, "tf32", 193, NVIDIA_DETECTION),
    PublishedRate("8 A100, half precision, 12 images each", A100, 8, "half", 209, NVIDIA_DETECTION),
    PublishedRate("8 V100, float32, 2 images each", V100, 8, "float32", 44.55, NVIDIA_TENSORFLOW),
    PublishedRate("A100, TF32, 4 images", A100, 1, "tf32", 18.41, NVIDIA_TENSORFLOW),
    PublishedRate("A100, half precision, 4 images", A100, 1, "half", 28.58, NVIDIA_TENSORFLOW),
    PublishedRate("8 A100, TF32, 2 images each", A100, 8, "tf32", 84.29, NVIDIA_TENSORFLOW),
    PublishedRate("8 A100, half precision, 2 images each", A100, 8, "half", 87.31, NVIDIA_TENSORFLOW),
)
_KNN = "symmetric loss; kNN in each epoch"
# fmt: off
RUNS = (
    PublishedRun("MoCo v1 and v2, ImageNet-1K, 200 epochs", V100, 8, "float32", 50, 224, "imagenet", 1, 1,
                 200 * IMAGES["imagenet"], 53, MOCO),
    PublishedRun("DenseCL, ImageNet-1K, 200 epochs", V100, 8, "float32", 50, 224, "imagenet", 1, 1,
                 200 * IMAGES["imagenet"], 2.3 * 24, DENSECL, dense=True),
    PublishedRun("DenseCL, COCO, 800 epochs", V100, 8, "float32", 50, 224, "imagenet", 1, 1,
                 800 * IMAGES["folder:datasets/coco/train2017"], 24, DENSECL, dense=True),
    PublishedRun("MoCo, a million images", V100, 4, "float32", 50, 224, "imagenet", 1, 1,
                 1e6, 1e6 / (4 * 128 / 0.5) / 3600, SOCO, "0.5 s per step of 512"),
    PublishedRun("MoCo, ResNet-18, CIFAR-10, 800 epochs", A6000, 1, "tf32", 18, 32, "cifar", 2, 3,
                 800 * IMAGES["cifar10"], 417.8 / 60, LIGHTLY, _KNN),
    PublishedRun("SimCLR, ResNet-18, CIFAR-10, 800 epochs", A6000, 1, "tf32", 18, 32, "cifar", 2, 1,
                 800 * IMAGES["cifar10"], 331.1 / 60, LIGHTLY, "kNN in each epoch"),
    PublishedRun("MoCo, ResNet-18, ImageNet-100, 200 epochs", A6000, 1, "tf32", 18, 224, "imagenet", 2, 3,
                 200 * IMAGES["imagenet100"], 1314.2 / 60, LIGHTLY, _KNN),
    PublishedRun("SimCLR, ResNet-18, ImageNet-100, 200 epochs", A6000, 1, "tf32", 18, 224, "imagenet", 2, 1,
                 200 * IMAGES["imagenet100"], 1207.7 / 60, LIGHTLY, "kNN in each epoch"),
    PublishedRun("MoCo, ResNet-18, Imagenette, 800 epochs", A6000, 1, "tf32", 18, 128, "imagenet", 2, 3,
                 800 * 9_469, 231.7 / 60, LIGHTLY, _KNN),
    PublishedRun("SimCLR, ResNet-18, Imagenette, 800 epochs", A6000, 1, "tf32", 18, 128, "imagenet", 2, 1,
                 800 * 9_469, 193.5 / 60, LIGHTLY, "kNN in each epoch"),
    PublishedRun("MoCo v2, ImageNet-1K, one epoch", RTX_4090, 2, "half", 50, 224, "imagenet", 1, 1,
                 IMAGES["imagenet"], 35 / 60, LIGHTLY, "the time of all their methods, with evaluations"),
)
# fmt: on
