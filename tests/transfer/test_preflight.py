"""Checks that refuse a run before it starts."""

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.errors import refused
from tests.transfer import tiny_coco
from transfer import preflight


def test_what_the_detectron2_engine_cannot_run_is_refused() -> None:
    def check(**keys: Any) -> None:
        preflight.check_engine(tiny_coco.config(Path("out"), "coco_2017_val", **keys), "detectron2", eval_only=False)

    check(MODEL__META_ARCHITECTURE="RetinaNet")
    for architecture in ("ProposalNetwork", "SemanticSegmentor", "PanopticFPN"):
        words = (f"MODEL.META_ARCHITECTURE is {architecture}", "GeneralizedRCNN")
        refused(functools.partial(check, MODEL__META_ARCHITECTURE=architecture), *words)
    refused(lambda: check(MODEL__LOAD_PROPOSALS=True), "MODEL.LOAD_PROPOSALS is True", "not supported")
    check(DATALOADER__SAMPLER_TRAIN="Random")  # refused for training alone: an evaluation does not read it


def test_a_refusal_names_the_other_engine_only_if_that_takes_the_value(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(**keys: Any) -> None:
        preflight.check_supported(tiny_coco.config(Path("out"), "coco_2017_val", **keys))

    key = "SOLVER.CLIP_GRADIENTS.CLIP_TYPE"
    with monkeypatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name: None)
        refused(functools.partial(check, **{key: "full_model"}), key, "`make detectron2`", "may support")
    pytest.importorskip("detectron2")
    for enabled in (True, False):  # if it is not read, it has no effect
        keys = {key: "full_model", "SOLVER.CLIP_GRADIENTS.ENABLED": enabled}
        assert "detectron2" not in refused(functools.partial(check, **keys), key)
    assert "detectron2" not in refused(lambda: check(MODEL__FPN__FUSE_TYPE="mean"), "MODEL.FPN.FUSE_TYPE is 'mean'")
    refused(lambda: check(MODEL__FPN__FUSE_TYPE="avg"), "MODEL.FPN.FUSE_TYPE is 'avg'", "--engine detectron2")
    refused(lambda: check(DATALOADER__SAMPLER_TRAIN="RepeatFactorTrainingSampler"), "--engine detectron2")
