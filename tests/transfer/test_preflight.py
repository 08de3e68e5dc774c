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


CLIP_TYPE = "SOLVER.CLIP_GRADIENTS.CLIP_TYPE"


def check_torchvision(**keys: Any) -> None:
    preflight.check_supported(tiny_coco.config(Path("out"), "coco_2017_val", **keys))


def test_a_refusal_names_the_command_that_installs_the_other_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused(lambda: check_torchvision(**{CLIP_TYPE: "full_model"}), CLIP_TYPE, "`make detectron2`", "may support")


@pytest.mark.detectron2
def test_a_refusal_names_the_other_engine_only_if_that_takes_the_value() -> None:
    for enabled in (True, False):  # if it is not read, it has no effect
        keys: dict[str, Any] = {CLIP_TYPE: "full_model", "SOLVER.CLIP_GRADIENTS.ENABLED": enabled}
        assert "detectron2" not in refused(functools.partial(check_torchvision, **keys), CLIP_TYPE)
    mean = refused(lambda: check_torchvision(MODEL__FPN__FUSE_TYPE="mean"), "MODEL.FPN.FUSE_TYPE is 'mean'")
    assert "detectron2" not in mean
    refused(lambda: check_torchvision(MODEL__FPN__FUSE_TYPE="avg"), "FUSE_TYPE is 'avg'", "--engine detectron2")
    sampler = "RepeatFactorTrainingSampler"
    refused(lambda: check_torchvision(DATALOADER__SAMPLER_TRAIN=sampler), "--engine detectron2")
