"""What --help-keys says about Detectron2's keys: default, values that both engines take, and meaning.

Meanings are given for the keys that a user of this project's configs meets; Detectron2's documentation has the others.
"""

from __future__ import annotations

from pretrain.common.config_io import flatten, kind
from pretrain.common.key_words import Key

from .config import ALLOWED, IRRELEVANT, REFUSED, default_config, keys
from .config_ranges import RANGES, limits

MEANINGS = {
    "CUDNN_BENCHMARK": "let cuDNN choose its fastest algorithms, which costs exact repeatability",
    "DATALOADER.FILTER_EMPTY_ANNOTATIONS": "train on images with annotations only",
    "DATALOADER.NUM_WORKERS": "processes that read images, per process of the training",
    "DATALOADER.REPEAT_THRESHOLD": "RepeatFactorTrainingSampler: share of images below which a category is repeated",
    "DATALOADER.SAMPLER_TRAIN": "TrainingSampler; RepeatFactorTrainingSampler repeats images of rare categories",
    "DATASETS.TEST": "as TRAIN; evaluated at the end, and every TEST.EVAL_PERIOD iterations",
    "DATASETS.TRAIN": "names such as coco_2017_train, or 'coco:/path/annotations.json:/path/images'; category ids may "
    "be any; with :skip_bad at the end, bad records are skipped and listed; Detectron2 engine: any name in its "
    "DatasetCatalog",
    "INPUT.FORMAT": "order of the color channels; that of the pretraining",
    "INPUT.MAPPER": "Detectron2 engine: a name in transfer.MAPPERS, which your module of --import registers",
    "INPUT.MAX_SIZE_TEST": "most pixels of the longer side",
    "INPUT.MAX_SIZE_TRAIN": "most pixels of the longer side",
    "INPUT.MIN_SIZE_TEST": "pixels of the shorter side",
    "INPUT.MIN_SIZE_TRAIN": "pixels of the shorter side; one is drawn per image",
    "INPUT.RANDOM_FLIP": "flips half of the training images",
    "MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS": "height / width of the anchors, per level",
    "MODEL.ANCHOR_GENERATOR.SIZES": "side of the anchors in pixels, per level",
    "MODEL.BACKBONE.FREEZE_AT": "how many stages are not trained; 0: all are trained; 5: the ResNet is frozen",
    "MODEL.BACKBONE.NAME": "the ResNet with FPN",
    "MODEL.DEVICE": "cuda or cpu; cuda falls back to the CPU where there is no GPU",
    "MODEL.FPN.IN_FEATURES": "stages of the ResNet that the FPN reads",
    "MODEL.FPN.NORM": "normalization of the FPN; SyncBN shares its statistics among processes",
    "MODEL.FPN.OUT_CHANNELS": "channels of every level",
    "MODEL.KEYPOINT_ON": "adds the keypoint head",
    "MODEL.MASK_ON": "adds the mask head",
    "MODEL.PIXEL_MEAN": "per channel, from 0 to 255; that of the pretraining",
    "MODEL.PIXEL_STD": "per channel, from 0 to 255; that of the pretraining",
    "MODEL.RESNETS.DEPTH": "18, 34, 50 or 101 layers",
    "MODEL.RESNETS.NORM": "BN: statistics of each process; SyncBN: of all; FrozenBN: those of the pretraining",
    "MODEL.RESNETS.OUT_FEATURES": "stages of the ResNet that others read",
    "MODEL.RESNETS.RES2_OUT_CHANNELS": "64 for a ResNet-18 or ResNet-34, 256 for a ResNet-50 or ResNet-101",
    "MODEL.RESNETS.STRIDE_IN_1X1": "False: torchvision's ResNet; True: MSRA's",
    "MODEL.ROI_BOX_HEAD.FC_DIM": "width of the fully connected layers",
    "MODEL.ROI_BOX_HEAD.NAME": "fully connected and convolutional layers",
    "MODEL.ROI_BOX_HEAD.NORM": "normalization of its convolutions",
    "MODEL.ROI_BOX_HEAD.NUM_CONV": "convolutions before the fully connected layers",
    "MODEL.ROI_BOX_HEAD.NUM_FC": "fully connected layers",
    "MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION": "cells per side into which a proposal is pooled",
    "MODEL.ROI_BOX_HEAD.SMOOTH_L1_BETA": "where the box loss changes from L2 to L1; 0: L1",
    "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE": "proposals that the heads learn from, per image",
    "MODEL.ROI_HEADS.IN_FEATURES": "levels of the FPN that proposals are pooled from",
    "MODEL.ROI_HEADS.NAME": "the heads for boxes, masks and keypoints",
    "MODEL.ROI_HEADS.NUM_CLASSES": "categories in the annotation files",
    "MODEL.ROI_HEADS.SCORE_THRESH_TEST": "detections below this score are dropped",
    "MODEL.ROI_KEYPOINT_HEAD.CONV_DIMS": "channels of each convolution of the keypoint head",
    "MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS": "keypoints per instance in the annotation files",
    "MODEL.ROI_MASK_HEAD.CONV_DIM": "channels of its convolutions",
    "MODEL.ROI_MASK_HEAD.NORM": "normalization of its convolutions",
    "MODEL.ROI_MASK_HEAD.NUM_CONV": "convolutions of the mask head",
    "MODEL.RPN.IN_FEATURES": "levels of the FPN that proposals come from",
    "MODEL.RPN.POST_NMS_TOPK_TEST": "proposals kept after NMS, per image",
    "MODEL.RPN.POST_NMS_TOPK_TRAIN": "proposals kept after NMS, per image",
    "MODEL.RPN.PRE_NMS_TOPK_TEST": "proposals kept before NMS, per level",
    "MODEL.RPN.PRE_NMS_TOPK_TRAIN": "proposals kept before NMS, per level",
    "MODEL.WEIGHTS": "the converted backbone to start from, or a detector to evaluate: a file, or an address of "
    "detectron2:// or https://; empty: random values",
    "OUTPUT_DIR": "the run folder",
    "SEED": "of weights, order of the images and sampling; -1: drawn at the start, and recorded",
    "SOLVER.ACCUMULATE": "parts of each process's batch that go through the detector one by one, for less memory; "
    "batch norms then see a part at a time",
    "SOLVER.AMP.ENABLED": "half precision: float16 on a GPU, or bfloat16 (BF16)",
    "SOLVER.BASE_LR": "learning rate, for a batch of IMS_PER_BATCH images; 0.02 for 16 is usual",
    "SOLVER.BF16": "with AMP.ENABLED: bfloat16 instead of float16; also on a CPU",
    "SOLVER.CHECKPOINT_KEEP": "newest checkpoints kept, beside model_final.pth and model_best.pth; 0: all",
    "SOLVER.CHECKPOINT_PERIOD": "iterations",
    "SOLVER.FROZEN_BN_ITER": "batches that give frozen batch norms their statistics before training, for every "
    "initialization alike; 0: those of the weights",
    "SOLVER.GAMMA": "factor of the learning rate at each of STEPS",
    "SOLVER.HOOKS": "names in transfer.HOOKS, which your module of --import registers",
    "SOLVER.IMS_PER_BATCH": "images per iteration, of all processes together",
    "SOLVER.MAX_ITER": "iterations; images in the training set / IMS_PER_BATCH of them make an epoch",
    "SOLVER.MOMENTUM": "of SGD",
    "SOLVER.REFERENCE_WORLD_SIZE": "processes that batch, learning rate and schedule are written for; 0: any number",
    "SOLVER.STEPS": "iterations at which the learning rate falls",
    "SOLVER.WARMUP_ITERS": "iterations in which the learning rate rises",
    "SOLVER.WEIGHT_DECAY": "of SGD",
    "TEST.AUG.ENABLED": "Detectron2 engine: also evaluate with resized and flipped images; not for keypoints",
    "TEST.BEST": "metric, such as bbox/AP, whose best evaluation (of the first set of DATASETS.TEST) is kept in "
    "model_best.pth; empty: none",
    "TEST.DETECTIONS_PER_IMAGE": "most detections per image",
    "TEST.EVAL_PERIOD": "iterations between evaluations; 0: only at the end",
    "TEST.KEYPOINT_OKS_SIGMAS": "one per keypoint; empty: COCO's 17",
    "TEST.PRECISE_BN.ENABLED": "average the statistics of batch normalization over training images before a test",
    "TEST.PRECISE_BN.NUM_ITER": "batches for that; the default is at most the iterations of the training",
}


def described_keys() -> list[Key]:
    """Every key of Detectron2 as --help-keys lists it."""
    refused = dict.fromkeys(keys(REFUSED), "the torchvision engine takes only this value")
    unused = {key: f"no effect: {reason}" for reason, table in IRRELEVANT.items() for key in keys(table)}
    notes = MEANINGS | refused | unused
    return [Key(key, default, _limits(key, default), notes.get(key, "")) for key, default in flatten(default_config())]


def _limits(key: str, default: object) -> str:
    if key in RANGES:
        return limits(key)
    if key in ALLOWED:
        return ", ".join(str(value) or "''" for value in ALLOWED[key])
    return kind(default)
