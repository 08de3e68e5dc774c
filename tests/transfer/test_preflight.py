"""What is refused before a run starts."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.errors import refused
from tests.transfer import tiny_coco
from transfer import preflight


def test_networks_that_are_no_detectors_and_files_of_proposals_are_refused() -> None:
    def check(**keys: Any) -> None:
        preflight.check_engine(tiny_coco.config(Path("out"), "coco_2017_val", **keys), "detectron2", eval_only=False)

    check(MODEL__META_ARCHITECTURE="RetinaNet")
    for architecture in ("ProposalNetwork", "SemanticSegmentor", "PanopticFPN"):
        words = (f"MODEL.META_ARCHITECTURE is {architecture}", "GeneralizedRCNN")
        refused(functools.partial(check, MODEL__META_ARCHITECTURE=architecture), *words)
    refused(lambda: check(MODEL__LOAD_PROPOSALS=True), "MODEL.LOAD_PROPOSALS")


@pytest.mark.detectron2
def test_deformable_convolutions_need_compiled_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"MODEL__RESNETS__DEFORM_ON_PER_STAGE": [False, True, True, True]}
    cfg = tiny_coco.config(Path("out"), "coco_2017_val", **keys)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    preflight.check_engine(cfg, "detectron2", eval_only=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check = lambda: preflight.check_engine(cfg, "detectron2", eval_only=False)  # noqa: E731
    refused(check, "MODEL.RESNETS.DEFORM_ON_PER_STAGE", "build")
