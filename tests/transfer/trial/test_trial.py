"""What a library would refuse later is refused before a run, in one line that names the key."""

import json
import logging
import random
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pretrain.common.config import extensions
from pretrain.common.run.state import RunContext
from tests import tiny
from tests.errors import refused
from tests.transfer import tiny_coco
from transfer import MAPPERS, api, train_net
from transfer.train import load_engine
from transfer.trial import culprit, try_config

ENGINES = ["torchvision", pytest.param("detectron2", marks=pytest.mark.detectron2)]

BOX_LOSS = "BBOX_REG_LOSS_TYPE"
CROP = "INPUT.CROP.ENABLED True INPUT.CROP"
CLIP = "SOLVER.CLIP_GRADIENTS.ENABLED True SOLVER.CLIP_GRADIENTS"
UNEVEN = "[[16,32],[32],[64],[128],[256]]"
# Config overrides, of which the last key is refused, and what else the refusal names.
REFUSED = [
    ("MODEL.META_ARCHITECTURE GeneralisedRCNN", "did you mean 'GeneralizedRCNN'"),
    ("MODEL.BACKBONE.NAME build_resnet_fpn", "did you mean 'build_resnet_fpn_backbone'"),
    ("MODEL.PROPOSAL_GENERATOR.NAME RPNN", "did you mean 'RPN'"),
    ("MODEL.RPN.HEAD_NAME RPNHead", "did you mean 'StandardRPNHead'"),
    ("MODEL.ROI_HEADS.NAME StandardRoIHeads", "did you mean 'StandardROIHeads'"),
    ("MODEL.ROI_BOX_HEAD.NAME FastRCNNHead", "did you mean 'FastRCNNConvFCHead'"),
    ("MODEL.ROI_BOX_HEAD.POOLER_TYPE ROIAlignV3", "did you mean 'ROIAlignV2'"),
    (f"MODEL.ROI_BOX_HEAD.{BOX_LOSS} giuo", "did you mean 'giou'"),
    (f"MODEL.RPN.{BOX_LOSS} giuo", "did you mean 'giou'"),
    ("MODEL.FPN.FUSE_TYPE mean", "choose one of avg, sum"),
    ("MODEL.RESNETS.NORM syncBN", "did you mean 'SyncBN'"),
    ("MODEL.RESNETS.DEPTH 77", "choose one of 18, 34, 50, 101, 152"),
    ("MODEL.RESNETS.RES2_OUT_CHANNELS 256", "= 64 for R18/R34"),  # the default is the wrong value
    ("MODEL.RPN.IN_FEATURES ['p2','p3','p4','p5','p7']", "input_shape[f]"),
    ("MODEL.ROI_HEADS.IN_FEATURES ['p2','p4']", "do not form a pyramid"),
    (f"MODEL.ANCHOR_GENERATOR.SIZES {UNEVEN}", "the same number of anchors"),
    ("SOLVER.WARMUP_METHOD cosine", "did you mean 'linear'"),
    ("SOLVER.LR_SCHEDULER_NAME Cosine", "did you mean 'WarmupCosineLR'"),
    (f"{CLIP}.CLIP_TYPE full_model", "choose one of value, norm"),
    ("SOLVER.MOMENTUM 0.0 SOLVER.NESTEROV True", "requires a momentum"),
    (f"{CROP}.TYPE random", "choose one of relative_range"),
    (f"{CROP}.SIZE [2.0,2.0]", "crop_size=[2.0, 2.0]"),
    ("INPUT.RANDOM_FLIP horizontl", "its default is 'horizontal'"),
    ("INPUT.FORMAT RBG", "mode"),
    ("MODEL.MASK_ON True INPUT.MASK_FORMAT polygn", "did you mean 'polygon'"),
    ("TEST.AUG.ENABLED True TEST.AUG.MIN_SIZES []", "[400"),
    ("TEST.AUG.ENABLED True MODEL.KEYPOINT_ON True", "TTA for keypoint is not supported"),
]


def attempt(engine: str, words: str, *, eval_only: bool = False) -> set[str]:
    values = words.split()
    keys: Any = dict(zip(values[::2], values[1::2], strict=True))
    cfg = tiny_coco.config(Path("out"), "coco_2017_val", **keys)
    return try_config(load_engine(engine), cfg, eval_only=eval_only)


@pytest.mark.detectron2
@pytest.mark.parametrize(("words", "named"), REFUSED)
def test_what_detectron2_refuses_is_one_line_that_names_the_key(words: str, named: str) -> None:
    refused(lambda: attempt("detectron2", words), f"{words.split()[-2]} is ", named)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "words", ["SOLVER.STEPS [3,4]", "MODEL.MASK_ON True INPUT.MASK_FORMAT bitmask", "MODEL.KEYPOINT_ON True"]
)
def test_detectors_pass_and_leave_no_trace(engine: str, words: str) -> None:
    """The losses of a run are the same without a trial: it draws no random numbers of the run's."""
    states = (torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate())  # type: ignore[index]
    keys = attempt(engine, words)
    assert (torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()) == states  # type: ignore[index]
    assert logging.root.manager.disable == 0
    assert {"MODEL.RESNETS.DEPTH", "SOLVER.MOMENTUM", "INPUT.FORMAT"} <= keys
    assert "SOLVER.MOMENTUM" not in attempt(engine, words, eval_only=True)


def test_the_torchvision_engine_refuses_uneven_anchors_alike() -> None:
    words = f"MODEL.ANCHOR_GENERATOR.SIZES {UNEVEN}"
    refused(lambda: attempt("torchvision", words), "MODEL.ANCHOR_GENERATOR.SIZES is", "the same number of anchors")


@pytest.mark.detectron2
def test_code_of_a_users_module_is_not_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An assertion in it may hold in the run, whose images are larger; but names are looked up before it runs."""
    code = """
        from detectron2.modeling import META_ARCH_REGISTRY, GeneralizedRCNN

        @META_ARCH_REGISTRY.register()
        class {name}(GeneralizedRCNN):
            def forward(self, batch):
                assert batch[0]["image"].shape[-1] > 500, "images are too small"
        """
    name = f"Own{tmp_path.name.title().replace('_', '')}"
    (tmp_path / f"module_of_{name}.py").write_text(code.replace("\n        ", "\n").format(name=name))
    monkeypatch.syspath_prepend(tmp_path)
    __import__(f"module_of_{name}")
    assert attempt("detectron2", f"MODEL.META_ARCHITECTURE {name}") == set()
    words = f"MODEL.META_ARCHITECTURE {name} MODEL.FPN.NORM batch"
    refused(lambda: attempt("detectron2", words), "MODEL.FPN.NORM is 'batch'", "choose one of BN")
    del sys.modules[f"module_of_{name}"]


def test_a_bug_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps its traceback, which the run shows."""

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("transfer.torchvision_engine.engine.build_optimizer", fail)
    assert attempt("torchvision", "") == set()


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["total_loss"] for line in (folder / "out" / "metrics.json").read_text().splitlines()]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_losses_are_those_of_a_run_without_a_trial(engine: str, tmp_path: Path, monkeypatch) -> None:
    tiny.use(monkeypatch)
    losses_of = {}
    for start in (api.run_rank, api.start):
        name = tiny_coco.write(tmp_path / start.__name__ / "data")
        command = tiny_coco.command(tmp_path / start.__name__, name, engine)
        start(train_net.prepare(train_net.parse(command)), RunContext())
        losses_of[start] = losses(tmp_path / start.__name__)
    assert losses_of[api.run_rank] == losses_of[api.start] != []


@pytest.mark.parametrize("engine", ENGINES)
def test_one_value_per_channel_is_explained(engine: str, tmp_path: Path, monkeypatch) -> None:
    tiny.use(monkeypatch)
    """The last feature map of an image of 32 pixels has one."""
    keys: dict[str, Any] = {"SOLVER__IMS_PER_BATCH": 1, "INPUT__MIN_SIZE_TRAIN": [24], "INPUT__MAX_SIZE_TRAIN": 32}
    name = tiny_coco.write(tmp_path / "data")
    remedy = ("SOLVER.IMS_PER_BATCH", "INPUT.MIN_SIZE_TRAIN")
    refused(lambda: tiny_coco.train(tmp_path, name, engine, **keys, MODEL__RESNETS__NORM="BN"), *remedy)
    frozen = {"MODEL__RESNETS__NORM": "FrozenBN", "MODEL__FPN__NORM": "", "SOLVER__FROZEN_BN_ITER": 1}
    refused(lambda: tiny_coco.train(tmp_path, name, engine, **keys, **frozen), *remedy)


@pytest.mark.detectron2
def test_an_error_in_a_users_mapper_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is raised before the weights are read, with the image; one in Detectron2's code is one line."""
    module = tmp_path / f"mapper_of_{tmp_path.name}.py"
    module.write_text("def build(cfg, is_train):\n    return lambda record: record['caption']\n")
    monkeypatch.setenv(extensions.VARIABLE, str(module))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("transfer.train._read_weights", None)
    extensions.load()
    monkeypatch.setitem(MAPPERS, "own", sys.modules[module.stem].build)
    name = tiny_coco.write(tmp_path / "data")
    with pytest.raises(KeyError, match="caption") as raised:
        tiny_coco.train(tmp_path, name, "detectron2", INPUT__MAPPER="own")
    assert re.fullmatch(rf"while mapping {tmp_path}/data/\d.png", raised.value.__notes__[0])
    assert str(module) in raised.value.__notes__[1]

    def flip(*_: Any, **__: Any) -> None:
        raise AssertionError("no such flip")

    monkeypatch.setattr("detectron2.data.detection_utils.transform_instance_annotations", flip)
    monkeypatch.setattr("transfer.trial.culprit._MODULES", {*culprit._MODULES, "tests"})
    refused(lambda: tiny_coco.train(tmp_path, name, "detectron2"), "no such flip", f"{tmp_path}/data/")


@pytest.mark.parametrize(
    "error", ["RuntimeError(\"4 rois are too few for head 'StandardROIHeads'\")", "ImportError('fvcore')"]
)
def test_what_a_users_module_or_a_missing_package_raises_is_no_keys_fault(error: str, tmp_path: Path) -> None:
    """Their text may contain any name; the trial is smaller than the run, which decides."""
    module: dict[str, Any] = {"__name__": "my_heads"}
    exec(f"def fail(cfg):\n    raise {error}", module)
    cfg = tiny_coco.config(tmp_path, "coco:a.json:b")
    with pytest.raises((RuntimeError, ImportError)) as raised:
        module["fail"](cfg)
    assert culprit.explain(raised.value, cfg, ["MODEL.ROI_HEADS.NAME", "MODEL.MASK_ON"], lambda changed: None) == ""


def test_a_package_that_a_library_needs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Crops of polygons need shapely, which no library here installs."""

    def crop(*_: Any, **__: Any) -> None:
        raise ModuleNotFoundError("No module named 'shapely'", name="shapely")

    monkeypatch.setattr("transfer.trial.parts.run", crop)
    cfg = tiny_coco.config(tmp_path, "coco:a.json:b")
    engine = load_engine("torchvision")
    assert try_config(engine, cfg, eval_only=False) == set()  # raised by a module that is no library
    monkeypatch.setattr("transfer.trial.culprit._MODULES", {*culprit._MODULES, "tests"})
    refused(lambda: try_config(engine, cfg, eval_only=False), "pip install shapely")
