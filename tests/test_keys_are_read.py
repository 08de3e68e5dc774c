"""Every key of both stages is read somewhere; short runs record which keys they read."""

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import pytest
from fvcore.common.config import CfgNode

from pretrain import train
from pretrain.common.config.yaml_io import flatten
from pretrain.common.run.state import RunContext
from pretrain.config import default_config
from pretrain.config import load_config as load_pretraining
from pretrain.probe import embedding, knn, linear
from tests.pretrain.runs import overrides
from tests.transfer import tiny_coco
from transfer import api, config, train_net
from transfer.keys import KEYS

pytestmark = pytest.mark.usefixtures("tiny_resnet18")
SHORT = ("SOLVER.MAX_STEPS", "2", "LINEAR.EPOCHS", "1", "LINEAR.STEPS", "[]", "LINEAR.IMS_PER_BATCH", "16")
# The keys of these methods and options, which other runs do not read.
METHODS = {
    "jcl": ("METHOD.DENSE_WEIGHT", "0.5", "SOLVER.OPTIMIZER", "lars", "MODEL.HEAD_HIDDEN_DIMS", "[16]"),
    "sce": ("METHOD.NAME", "sce", "SOLVER.OPTIMIZER", "adamw"),
    "tcl": (),
}


class RecordingNode(CfgNode):
    """A section of a config that records which keys are read; its copies record them, too. Printing does not count."""

    reads: ClassVar[set[str]] = set()

    def __getitem__(self, name: str) -> Any:
        self._record(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._record(name)
        return super().get(name, default)

    def _record(self, name: str) -> None:
        self.reads.add(self.__dict__.get("section", "") + name)


def record_reads(cfg: CfgNode, section: str = "") -> RecordingNode:
    """Return a copy of ``cfg`` that adds each key that is read to `RecordingNode.reads`."""
    node = RecordingNode()
    for name, value in cfg.items():
        node[name] = record_reads(value, f"{section}{name}.") if isinstance(value, CfgNode) else value
    node.__dict__["section"] = section
    if cfg.is_frozen():
        node.freeze()
    return node


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    keys: set[str] = set()
    monkeypatch.setattr(RecordingNode, "reads", keys)
    return keys


def test_every_key_of_pretraining_is_read(images: Path, tmp_path: Path, reads: set[str]) -> None:
    for method, more in METHODS.items():
        words = overrides(images, tmp_path / method, *SHORT, *more, method=method)
        train.main(record_reads(load_pretraining(None, words)))
    train.main(record_reads(load_pretraining(None, [*words, "SOLVER.BASE_LR", "0.1", "SOLVER.CHANGE_RECIPE", "True"])))
    for name, probe in (("knn", knn), ("linear", linear), ("embedding", embedding)):
        words = overrides(images, tmp_path / name, *SHORT)
        probe.main(record_reads(load_pretraining(None, words)), str(tmp_path / "jcl"))
    # It is compared like every key when a run resumes, and the launcher reads it before it starts one.
    assert {key for key, _ in flatten(default_config())} - reads <= {"IMPORTED"}


def test_every_honored_key_of_fine_tuning_is_read(tmp_path: Path, reads: set[str]) -> None:
    name = tiny_coco.write(tmp_path / "data", keypoints=True)
    words = (
        "MODEL.MASK_ON True MODEL.KEYPOINT_ON True MODEL.ROI_HEADS.NUM_CLASSES 1 SOLVER.AMP.ENABLED True "
        "SOLVER.BF16 True SOLVER.CLIP_GRADIENTS.ENABLED True SOLVER.CLIP_GRADIENTS.CLIP_TYPE norm "
        "TEST.PRECISE_BN.ENABLED True TEST.EVAL_PERIOD 1"
    )
    for schedule in ("WarmupMultiStepLR", "WarmupCosineLR"):
        keys = ["SOLVER.LR_SCHEDULER_NAME", schedule, *words.split()]
        command = [*tiny_coco.command(tmp_path / schedule, name, "torchvision"), *keys]
        run = train_net.prepare(train_net.parse(command))
        api.run_rank(dataclasses.replace(run, cfg=config.scale_to_world(record_reads(run.cfg), 1)), RunContext())
    # Checks of the config read keys with a single possible value; test_own_modules.py uses a mapper.
    honored = {row.name for row in KEYS.values() if not row.torchvision}
    assert honored - {"MODEL.RESNETS.RES2_OUT_CHANNELS"} - reads == set()
