"""What --help-keys says about Detectron2's keys: default, values that both engines accept, and meaning.

Meanings are those of this project's own keys and of what decides the training; detectron2/config/defaults.py has the
others.
"""

from __future__ import annotations

from pretrain.common.config_io import flatten, kind
from pretrain.common.config_overrides import Key

from .config import ALLOWED, REFUSED, default_config, keys
from .config_ranges import RANGES, limits

MEANINGS = {
    "DATASETS.TEST": "as TRAIN; evaluated at the end, and every TEST.EVAL_PERIOD iterations",
    "DATASETS.TRAIN": "names such as coco_2017_train, or 'coco:/path/annotations.json:/path/images'; category ids may "
    "be any; with :skip_bad at the end, bad records are skipped and listed; Detectron2 engine: any name in its "
    "DatasetCatalog",
    "INPUT.FORMAT": "order of the color channels; that of the pretraining",
    "INPUT.MAPPER": "Detectron2 engine: a name in transfer.MAPPERS, which your module of --import registers",
    "MODEL.BACKBONE.FREEZE_AT": "how many stages are not trained; 0: all are trained; 5: the ResNet is frozen",
    "MODEL.DEVICE": "cuda or cpu; cuda falls back to the CPU where there is no GPU",
    "MODEL.PIXEL_MEAN": "per channel, from 0 to 255; that of the pretraining",
    "MODEL.PIXEL_STD": "per channel, from 0 to 255; that of the pretraining",
    "MODEL.RESNETS.DEPTH": "18, 34, 50 or 101 layers",
    "MODEL.RESNETS.NORM": "BN: statistics of each process; SyncBN: of all; FrozenBN: those of the pretraining",
    "MODEL.RESNETS.RES2_OUT_CHANNELS": "64 for a ResNet-18 or ResNet-34, 256 for a ResNet-50 or ResNet-101",
    "MODEL.RESNETS.STRIDE_IN_1X1": "False: torchvision's ResNet; True: MSRA's",
    "MODEL.ROI_HEADS.NUM_CLASSES": "categories in the annotation files",
    "MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS": "keypoints per instance in the annotation files",
    "MODEL.WEIGHTS": "the converted backbone to start from, or a detector to evaluate: a file, or an address of "
    "detectron2:// or https://; empty: random values",
    "OUTPUT_DIR": "the run folder",
    "SEED": "of weights, order of the images and sampling; -1: drawn at the start, and recorded",
    "SOLVER.ACCUMULATE": "parts of each process's batch that go through the detector one by one, for less memory; "
    "batch norms then see a part at a time",
    "SOLVER.AMP.ENABLED": "half precision: float16 on a GPU, or bfloat16 (BF16)",
    "SOLVER.BASE_LR": "learning rate, for a batch of IMS_PER_BATCH images; 0.02 for 16 is usual",
    "SOLVER.BF16": "with AMP.ENABLED: bfloat16 instead of float16; also on a CPU",
    "SOLVER.CHECKPOINT_KEEP": "newest checkpoints kept, in addition to model_final.pth and model_best.pth; 0: all",
    "SOLVER.FROZEN_BN_ITER": "batches that give frozen batch norms their statistics before training, for every "
    "initialization alike; 0: those of the weights",
    "SOLVER.HOOKS": "names in transfer.HOOKS, which your module of --import registers",
    "SOLVER.IMS_PER_BATCH": "images per iteration, of all processes together",
    "SOLVER.MAX_ITER": "iterations; images in the training set / IMS_PER_BATCH of them make an epoch",
    "SOLVER.REFERENCE_WORLD_SIZE": "processes that batch, learning rate and schedule are written for; 0: any number",
    "TEST.AUG.ENABLED": "Detectron2 engine: also evaluate with resized and flipped images; not for keypoints",
    "TEST.BEST": "metric, such as bbox/AP, whose best evaluation (of the first set of DATASETS.TEST) is kept in "
    "model_best.pth; empty: none",
    "TEST.EVAL_PERIOD": "iterations between evaluations; 0: only at the end",
    "TEST.KEYPOINT_OKS_SIGMAS": "one per keypoint; empty: COCO's 17",
    "TEST.PRECISE_BN.ENABLED": "average the statistics of batch normalization over training images before a test",
    "TEST.PRECISE_BN.NUM_ITER": "batches for that, at most the iterations of the training",
}


def described_keys() -> list[Key]:
    """Every key of Detectron2 as --help-keys lists it."""
    refused = dict.fromkeys(keys(REFUSED), "the torchvision engine takes only this value")
    notes = MEANINGS | refused
    return [Key(key, default, _limits(key, default), notes.get(key, "")) for key, default in flatten(default_config())]


def _limits(key: str, default: object) -> str:
    if key in RANGES:
        return limits(key)
    if key in ALLOWED:
        return ", ".join(str(value) or "''" for value in ALLOWED[key])
    return kind(default)
