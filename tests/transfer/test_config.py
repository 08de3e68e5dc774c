"""Detectron2's keys without Detectron2: the tree, its types, reading, and errors."""

import functools
from pathlib import Path

import pytest

from pretrain.common.config.yaml_io import flatten
from tests.errors import refused
from tests.transfer import tiny_coco
from tools.stages.transfer import Transfer
from transfer import config
from transfer.api import prepare
from transfer.keys import KEYS


def plain(value):
    return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value


@pytest.mark.detectron2
def test_every_key_of_detectron2_is_classified_with_its_default():
    from detectron2.config import get_cfg

    theirs = {key: plain(value) for key, value in flatten(get_cfg())}
    ours = {key: plain(value) for key, value in flatten(config.default_config())}
    assert ours == theirs | {row.name: row.default for row in KEYS.values() if row.is_own}


def test_another_value_of_a_refused_key_is_named(tmp_path):
    good = tiny_coco.config(tmp_path, "coco_2017_val")
    assert config.list_unsupported(good) == {}
    limited = {row.name: row.torchvision[0] for row in KEYS.values() if row.torchvision}
    assert len(limited) > 100
    for key, supported in limited.items():
        unsupported = config.list_unsupported(changed(good, key, "nonsense"))
        assert key in unsupported
        assert "nonsense" in unsupported[key] and str(supported) in unsupported[key]


@pytest.mark.parametrize("is_launched", [False, True])
def test_errors_name_the_file_that_sets_a_key(tmp_path: Path, is_launched: bool) -> None:
    """It is often a _BASE_ that the user has not written; the launcher passes a config on as text."""
    base = tmp_path / "base.yaml"
    recipe = tmp_path / "recipe.yaml"
    base.write_text(f"_BASE_: {tiny_coco.BASE}\nMODEL: {{FPN: {{FUSE_TYPE: mean, NORM: LN}}}}\n")
    recipe.write_text("_BASE_: base.yaml\n")

    def check(*words: str) -> None:
        words = ("OUTPUT_DIR", str(tmp_path / "run"), "DATASETS.TEST", "()", *words)
        if is_launched:
            Transfer.load(Transfer.Options(str(recipe), "torchvision"), words).check(1, starts_later=False)
        else:
            prepare(config.load_config(recipe, words), "torchvision")

    refused(check, f"MODEL.FPN.FUSE_TYPE in {base} is 'mean' (supp", f"MODEL.FPN.NORM in {base} is 'LN' (supp")
    fuse_type = refused(lambda: check("MODEL.FPN.FUSE_TYPE", "max"), "MODEL.FPN.FUSE_TYPE is 'max' (supported: ")
    assert f"MODEL.FPN.NORM in {base} is 'LN'" in fuse_type
    base.write_text(base.read_text() + "SOLVER: {MOMENTUM: 1.5}\n")
    refused(check, f"SOLVER.MOMENTUM in {base} is 1.5", "at most 1")


REFUSALS = [  # a key of each kind of check, its value, and what else the error names
    ("SOLVER.IMS_PER_BATCH", "0", "at least 1"),
    ("SOLVER.MOMENTUM", "1.5", "at most 1"),
    ("FLOAT32_PRECISION", "tf32", "highest"),
    ("SOLVER.CLIP_GRADIENTS.CLIP_VALUE", "-1.0", "at least 0"),  # would reverse the gradients
    ("SOLVER.FROZEN_BN_ITER", "-1", "at least 0"),
    ("SOLVER.FROZEN_BN_ITER", "2", "FREEZE_AT"),
    ("SOLVER.STEPS", "(3, 1)", "increasing"),
    ("DATALOADER.SAMPLER_TRAIN", "Random", "choose one of TrainingSampler, RepeatFactorTrainingSampler"),
    ("SOLVER.BF16", "True", "SOLVER.AMP.ENABLED"),
    ("DATASETS.TRAIN", "[]", "empty"),
    ("MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS", "5", "TEST.KEYPOINT_OKS_SIGMAS"),
    ("TEST.KEYPOINT_OKS_SIGMAS", "[0.0, 0.0]", "above 0"),
    ("TEST.DETECTIONS_PER_IMAGE", "0", "at least 1"),
    ("MODEL.ROI_HEADS.SCORE_THRESH_TEST", "50.0", "at most 1"),
    ("TEST.BEST", "segm/AP", "bbox/AP"),
    ("DATASETS.TEST", "[1]", "names"),
    ("INPUT.MIN_SIZE_TRAIN", "[]", "at least one size"),
    ("INPUT.MIN_SIZE_TRAIN", "[0]", "at least 1"),
    ("INPUT.MAX_SIZE_TRAIN", "-1", "at least 1"),
    ("MODEL.PIXEL_MEAN", "[1, 2]", "3 numbers"),
    ("MODEL.PIXEL_STD", "[1.0, -1.0, 1.0]", "above 0"),
    ("MODEL.ANCHOR_GENERATOR.SIZES", "[[32], [64]]", "one for each of the 5 feature maps"),
    ("MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS", "[[]]", "a list of lists"),
    ("MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS", "[[0.0]]", "above 0"),
    ("MODEL.RPN.IOU_THRESHOLDS", "[0.5]", "it must be 2 numbers in increasing order"),
    ("MODEL.RPN.IOU_THRESHOLDS", "[0.7, 0.3]", "2 numbers in increasing order"),
    ("MODEL.ROI_HEADS.IOU_THRESHOLDS", "[0.5, 0.7]", "1 number in increasing order"),
    ("MODEL.ROI_BOX_HEAD.BBOX_REG_WEIGHTS", "[1, 1]", "4 numbers"),
    ("MODEL.ROI_BOX_HEAD.FC_DIM", "0", "at least 1"),
    ("MODEL.ROI_BOX_HEAD.NUM_FC", "0", "NUM_CONV"),
    ("MODEL.ROI_HEADS.POSITIVE_FRACTION", "2.0", "at most 1"),
    ("MODEL.FPN.OUT_CHANNELS", "-1", "at least 1"),
    ("TEST.BEST", "bbox/ap", "bbox/AP"),
    ("TEST.PATIENCE", "3", "TEST.BEST and TEST.EVAL_PERIOD"),
    ("TEST.PATIENCE", "-1", "at least 0"),
    ("TEST.EXPECTED_RESULTS", "[['bbox', 'AP', 38.5]]", "tolerance"),
    ("TEST.EXPECTED_RESULTS", "[['segm', 'AP', 38.5, 0.1]]", "bbox"),
]


@pytest.mark.parametrize(("key", "value", "named"), REFUSALS)
def test_values_that_cannot_train_are_refused(key, value, named):
    keys = tiny_coco.MODEL_KEYS | {"MODEL.KEYPOINT_ON": True, "DATASETS.TRAIN": ("a",), "DATASETS.TEST": ("a",)}
    cfg = config.load_config(tiny_coco.BASE, [*tiny_coco.words(keys), key, value])

    def check():
        config.check_ranges(cfg)
        config.check_training(cfg)

    refused(check, key, value.strip("[]").partition(",")[0], named)


def test_a_range_of_sizes_has_two_ends():
    cfg = config.load_config(tiny_coco.BASE, ["INPUT.MIN_SIZE_TRAIN_SAMPLING", "range"])  # of six sizes
    refused(
        lambda: config.check_training(cfg),
        "INPUT.MIN_SIZE_TRAIN is [640,",
        "SAMPLING range",
    )


def test_a_cosine_schedule_falls(tmp_path: Path) -> None:
    """To a higher last rate, one engine would raise the rate; Detectron2 would fail."""

    def check(base: float, end: float, schedule: str = "WarmupCosineLR") -> None:
        keys = {"SOLVER.BASE_LR": base, "SOLVER.BASE_LR_END": end, "SOLVER.LR_SCHEDULER_NAME": schedule}
        config.check_training(tiny_coco.config(tmp_path, "coco_2017_val", **keys))

    check(0.1, 0.1)
    check(0.0, 0.1, "WarmupMultiStepLR")
    refused(lambda: check(0.0, 0.0), "SOLVER.BASE_LR is 0", "above 0")
    refused(lambda: check(0.001, 0.1), "SOLVER.BASE_LR_END 0.1", "at most BASE_LR")


def test_what_only_detectron2_can_train_is_not_refused():
    """One flat list of sizes is for all feature maps; images of an own mapper may have four channels."""
    words = (
        "MODEL.ANCHOR_GENERATOR.SIZES [32,64] INPUT.MAPPER mine MODEL.PIXEL_MEAN [0,3000,1,1] "
        "MODEL.PIXEL_STD [1,1,1,300] MODEL.RPN.IOU_THRESHOLDS [0.5] MODEL.RPN.IOU_LABELS [0,1]"
    )
    cfg = config.load_config(tiny_coco.BASE, words.split())
    config.check_ranges(cfg)
    assert cfg.MODEL.ANCHOR_GENERATOR.SIZES == [[32, 64]]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("INPUT.FORMAT L MODEL.PIXEL_MEAN [1] MODEL.PIXEL_STD [0]", "MODEL.PIXEL_STD"),
        ("INPUT.MAPPER mine MODEL.RPN.BBOX_REG_WEIGHTS [1,1,0,1]", "MODEL.RPN.BBOX_REG_WEIGHTS"),
        ("MODEL.ANCHOR_GENERATOR.NAME Rotated MODEL.RPN.BBOX_REG_WEIGHTS [1,1,1,1,0]", "MODEL.RPN.BBOX_REG_WEIGHTS"),
    ],
)
def test_lists_of_another_length_have_the_same_range(words, named):
    """A division by zero makes the loss NaN."""
    cfg = config.load_config(tiny_coco.BASE, words.split())
    refused(lambda: config.check_ranges(cfg), named, "above 0")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("coco:a:b", "('coco:a:b',)"),
        ("('coco:a:b')", "('coco:a:b',)"),
        ("(coco:a:b,)", "('coco:a:b',)"),
        ("[coco:a:b, coco:a b:c]", "('coco:a:b', 'coco:a b:c')"),
        *((word, "('a', 'b')") for word in ("a,b", "(a,b)", "('a', b", '["a","b"')),
    ],
)
def test_a_name_that_is_no_list_is_shown_as_one(value, shown):
    opts = ["DATASETS.TRAIN", value]
    example = tiny_coco.BASE.replace("coco_R50_FPN_1x", "examples/own_faster_R18_FPN")  # has a data set
    text = refused(lambda: config.load_config(example, opts), f'write "{shown}"')
    assert "write it as" not in text


def test_a_batch_is_divided_among_processes_and_micro_batches(tmp_path):
    cfg = tiny_coco.config(tmp_path, "", SOLVER__IMS_PER_BATCH=6, SOLVER__ACCUMULATE=3)
    config.check_batch_division(cfg, 2)
    refused(lambda: config.check_batch_division(cfg, 4), "SOLVER.IMS_PER_BATCH is 6", "multiple of 12")
    cfg.SOLVER.IMS_PER_BATCH = 16
    refused(lambda: config.check_batch_division(cfg, 2), "SOLVER.ACCUMULATE 3", "12 or 18")


def changed(cfg, key, value):
    cfg = cfg.clone()
    *sections, name = key.split(".")
    functools.reduce(lambda node, section: node[section], sections, cfg)[name] = value
    return cfg


def test_scaling_to_the_number_of_processes():
    cfg = config.load_config(tiny_coco.BASE, ["SOLVER.REFERENCE_WORLD_SIZE", "8", "TEST.EVAL_PERIOD", "10000"])
    cfg.freeze()
    scaled = config.scale_to_world(cfg, 2)
    assert (scaled.SOLVER.IMS_PER_BATCH, scaled.SOLVER.BASE_LR, scaled.SOLVER.MAX_ITER) == (4, 0.005, 360000)
    assert (scaled.SOLVER.STEPS, scaled.TEST.EVAL_PERIOD) == ((240000, 320000), 40000)
    assert config.scale_to_world(cfg, 8) == cfg
    short = "SOLVER.REFERENCE_WORLD_SIZE 1 SOLVER.STEPS (3,10,11) SOLVER.MAX_ITER 20 SOLVER.WARMUP_ITERS 3"
    scaled = config.scale_to_world(config.load_config(tiny_coco.BASE, [*short.split(), "TEST.EVAL_PERIOD", "3"]), 8)
    assert (scaled.SOLVER.STEPS, scaled.SOLVER.MAX_ITER, scaled.SOLVER.WARMUP_ITERS) == ((1, 2, 3), 2, 1)
    assert scaled.TEST.EVAL_PERIOD == 1  # 0 would evaluate only at the end
    cfg.defrost()
    cfg.SOLVER.IMS_PER_BATCH = 12
    refused(lambda: config.scale_to_world(cfg, 4), "IMS_PER_BATCH", 12, "8 or 16")
