"""Checks that refuse a run before it starts."""

import functools
from pathlib import Path
from typing import Any

from tests.errors import refused
from tests.transfer import tiny_coco
from transfer import preflight


def test_what_the_detectron2_engine_cannot_run_is_refused(monkeypatch) -> None:
    def check(**keys: Any) -> None:
        preflight.check_engine(tiny_coco.config(Path("out"), "coco_2017_val", **keys), "detectron2", eval_only=False)

    check(MODEL__META_ARCHITECTURE="RetinaNet")
    for architecture in ("ProposalNetwork", "SemanticSegmentor", "PanopticFPN"):
        words = (f"MODEL.META_ARCHITECTURE is {architecture}", "GeneralizedRCNN")
        refused(functools.partial(check, MODEL__META_ARCHITECTURE=architecture), *words)
    refused(lambda: check(MODEL__LOAD_PROPOSALS=True), "MODEL.LOAD_PROPOSALS is True", "not supported")
    check(DATALOADER__SAMPLER_TRAIN="Random")  # refused for training alone: an evaluation does not read it
    refused(lambda: check(MODEL__RESNETS__NORM="syncBN"), "MODEL.RESNETS.NORM is 'syncBN'", "did you mean 'SyncBN'")
    refused(lambda: check(SOLVER__LR_SCHEDULER_NAME="Cosine"), "SOLVER.LR_SCHEDULER_NAME", "WarmupCosineLR")
    refused(lambda: check(INPUT__RANDOM_FLIP="True"), "INPUT.RANDOM_FLIP is 'True'", "horizontal")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    deformable = {"MODEL__RESNETS__DEFORM_ON_PER_STAGE": [False, True, True, True]}
    refused(lambda: check(**deformable), "MODEL.RESNETS.DEFORM_ON_PER_STAGE", "build")
