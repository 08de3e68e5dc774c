"""Detectron2's keys without Detectron2: the tree, its three classes, reading, and refusals."""

from __future__ import annotations

import functools
import inspect
import re
from pathlib import Path

import pytest

from pretrain.common.config_io import flatten
from pretrain.common.errors import UserError
from tests.transfer import tiny_coco
from transfer import config

FOLDER = Path(config.__file__).parent
READERS = [*FOLDER.glob("torchvision_engine/*.py"), *(FOLDER / f for f in ("coco/results.py", "train.py", "state.py"))]
COMPUTED = map(inspect.getsource, (config.scale_to_world, config.precise_bn_batches))
SOURCES = "\n".join([*(path.read_text() for path in READERS), *COMPUTED])
REFUSED = config.keys(config.REFUSED)
IRRELEVANT = {key: reason for reason, table in config.IRRELEVANT.items() for key in config.keys(table)}


def plain(value):
    return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value


@pytest.mark.detectron2
def test_every_key_of_detectron2_is_classified_with_its_default():
    from detectron2.config import get_cfg

    theirs = {key: plain(value) for key, value in flatten(get_cfg())}
    ours = {key: plain(value) for key, value in flatten(config.default_config())}
    assert ours == theirs | config.keys(config.OWN)


@pytest.mark.parametrize(("words", "batches"), [((), 6), (("TEST.PRECISE_BN.NUM_ITER", "50"), 50)])
def test_precise_bn_takes_no_more_batches_than_the_training_unless_told(words, batches):
    cfg = config.load_config(None, words)
    assert config.precise_bn_batches(cfg, 6) == batches
    assert config.precise_bn_batches(cfg, 90000) == cfg.TEST.PRECISE_BN.NUM_ITER


def test_every_key_is_in_exactly_one_class():
    honored = config.keys(config.HONORED)
    everything = [*honored, *REFUSED, *config.keys(config.OWN), *IRRELEVANT]
    assert len(everything) == len(set(everything)) == len(dict(flatten(config.default_config())))
    assert set(config.ALLOWED) <= set(honored)


CHECKED = {*config.ALLOWED, "MODEL.RESNETS.RES2_OUT_CHANNELS"}  # these may have one value only, and then no reader


def test_every_honored_key_is_read_by_the_engine():
    names = {key: key.split(".")[-1] for key in set(config.keys(config.HONORED)) - CHECKED}
    assert not [key for key, name in names.items() if not re.search(rf"\b{name}\b", SOURCES)]


def test_another_value_of_a_refused_key_is_named(tmp_path):
    good = tiny_coco.config(tmp_path, "coco_2017_val")
    config.check_supported(good)
    others = {bool: True, int: 7, str: "giou"}
    for key, default in REFUSED.items():
        other = (not default) if isinstance(default, bool) else others.get(type(default), ["x"])
        with pytest.raises(UserError, match=re.escape(f"{key} is {other!r} (only {default!r} is supported)")):
            config.check_supported(changed(good, key, other))
    for key, allowed in config.ALLOWED.items():
        with pytest.raises(UserError, match=re.escape(f"{key} is 'nonsense' (supported: {allowed[0]!r}")):
            config.check_supported(changed(good, key, "nonsense"))


def changed(cfg, key, value):
    cfg = cfg.clone()
    *sections, name = key.split(".")
    functools.reduce(lambda node, section: node[section], sections, cfg)[name] = value
    return cfg


def test_base_files_overrides_and_their_order(tmp_path):
    (tmp_path / "base.yaml").write_text("MODEL: {MASK_ON: True, FPN: {NORM: BN}}\nSOLVER: {BASE_LR: 0.02}\n")
    (tmp_path / "leaf.yaml").write_text("_BASE_: base.yaml\nMODEL: {FPN: {NORM: SyncBN}}\nDATASETS: {TRAIN: [a, b]}\n")
    cfg = config.load_config(tmp_path / "leaf.yaml", ["SOLVER.STEPS", "(10, 20)", "SOLVER.WEIGHT_DECAY_BIAS", "0.0"])
    assert (cfg.MODEL.MASK_ON, cfg.MODEL.FPN.NORM, cfg.SOLVER.BASE_LR) == (True, "SyncBN", 0.02)
    assert tuple(cfg.DATASETS.TRAIN) == ("a", "b")
    assert tuple(cfg.SOLVER.STEPS) == (10, 20)
    assert cfg.SOLVER.WEIGHT_DECAY_BIAS == 0.0


def test_scaling_to_the_number_of_processes():
    keys = {"REFERENCE_WORLD_SIZE": 8, "IMS_PER_BATCH": 16, "BASE_LR": 0.02, "MAX_ITER": 90000, "STEPS": (60000, 80000)}
    cfg = config.load_config(None, [*(f"SOLVER.{k}={v}" for k, v in keys.items()), "TEST.EVAL_PERIOD=10000"])
    cfg.freeze()
    scaled = config.scale_to_world(cfg, 2)
    assert (scaled.SOLVER.IMS_PER_BATCH, scaled.SOLVER.BASE_LR, scaled.SOLVER.MAX_ITER) == (4, 0.005, 360000)
    assert (scaled.SOLVER.STEPS, scaled.TEST.EVAL_PERIOD) == ((240000, 320000), 40000)
    assert config.scale_to_world(cfg, 8) == cfg
    cfg.defrost()
    cfg.SOLVER.IMS_PER_BATCH = 12
    with pytest.raises(UserError, match="IMS_PER_BATCH 12 is not a multiple"):
        config.scale_to_world(cfg, 4)
