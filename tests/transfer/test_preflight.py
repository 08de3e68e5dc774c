"""What is refused before a run starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.errors import refused
from tests.transfer import tiny_coco
from transfer import preflight


@pytest.mark.parametrize(
    ("architecture", "eval_only", "test", "is_refused"),
    [
        ("GeneralizedRCNN", False, True, False),
        ("RetinaNet", False, True, False),
        ("ProposalNetwork", False, True, True),
        ("ProposalNetwork", False, False, False),
        ("ProposalNetwork", True, False, True),  # tools/predict.py
        ("SemanticSegmentor", False, True, True),
        ("SemanticSegmentor", False, False, True),
        ("PanopticFPN", False, False, True),
        ("PanopticFPN", True, True, False),  # its objects have an AP
    ],
)
def test_detectors_without_ap_and_without_their_labels(
    architecture: str, eval_only: bool, test: bool, is_refused: bool
) -> None:
    name = "coco_2017_val"
    keys = {"MODEL__META_ARCHITECTURE": architecture, "DATASETS__TEST": (name,) if test else ()}
    cfg = tiny_coco.config(Path("out"), name, **keys)

    def check() -> None:
        preflight.check_engine(cfg, "detectron2", eval_only=eval_only)

    if is_refused:
        refused(check, f"MODEL.META_ARCHITECTURE is {architecture}", "GeneralizedRCNN")
    else:
        check()


def test_every_data_set_has_its_file_of_proposals(tmp_path: Path) -> None:
    name, file = tiny_coco.write(tmp_path / "data"), tmp_path / "boxes.pkl"
    keys = {"MODEL__LOAD_PROPOSALS": True, "DATASETS__PROPOSAL_FILES_TRAIN": ("https://x.org/a.pkl",)}

    def check(*test_files: str) -> None:
        cfg = tiny_coco.config(tmp_path / "out", name, **keys, DATASETS__PROPOSAL_FILES_TEST=test_files)
        preflight.check_inputs(cfg, eval_only=False, weights=False)

    refused(check, "DATASETS.PROPOSAL_FILES_TEST is []")
    refused(lambda: check(str(file)), "DATASETS.PROPOSAL_FILES_TEST", file)
    file.write_bytes(b"")
    check(str(file))
    keys["DATASETS__PROPOSAL_FILES_TRAIN"] = ()
    refused(lambda: check(str(file)), "DATASETS.PROPOSAL_FILES_TRAIN is []")


@pytest.mark.detectron2
def test_deformable_convolutions_need_compiled_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"MODEL__RESNETS__DEFORM_ON_PER_STAGE": [False, True, True, True]}
    cfg = tiny_coco.config(Path("out"), "coco_2017_val", **keys)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    preflight.check_engine(cfg, "detectron2", eval_only=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check = lambda: preflight.check_engine(cfg, "detectron2", eval_only=False)  # noqa: E731
    refused(check, "MODEL.RESNETS.DEFORM_ON_PER_STAGE", "build")
