"""Writes the golden checkpoints with real runs of today's code: python -m tests.golden.make FOLDER.

Only for a new format: what is committed stays, as that of the versions that users have.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pretrain.config import load_config
from pretrain.probe import linear
from pretrain.train import main
from tests import tiny
from tests.transfer import tiny_coco
from transfer.convert import convert
from transfer.torchvision_engine import engine
from transfer.train import run
from transfer.weights.load import read_weights


def _write(folder: Path, work: Path) -> None:
    for split in ("train", "val"):
        for name, level in (("dark", 40), ("light", 200)):
            (work / split / name).mkdir(parents=True)
            for number in range(8):
                noise = np.random.default_rng(number).integers(0, 40, (20, 20, 3), dtype=np.uint8)
                Image.fromarray(level + noise.astype(np.uint8)).save(work / split / name / f"{number}.png")
    keys = [
        "METHOD.NAME", "mocov2", "MODEL.ARCH", "resnet18", "MODEL.HEAD_HIDDEN_DIMS", "[16]", "MODEL.EMBEDDING_DIM", "8",
        "MODEL.QUEUE_SIZE", "16", "SOLVER.IMS_PER_BATCH", "8", "SOLVER.EPOCHS", "1", "DATA.TRAIN", f"folder:{work}",
        "VIEWS.IMAGE_SIZE", "32", "DATALOADER.NUM_WORKERS", "0", "PROBE.KNN_K", "5", "LINEAR.EPOCHS", "1",
        "LINEAR.STEPS", "[]", "LINEAR.IMS_PER_BATCH", "8", "LINEAR.AUGMENT", "none", "DEVICE", "cpu",
    ]  # fmt: skip
    main(load_config(None, [*keys, "OUTPUT_DIR", str(work / "run")]))
    shutil.copy(work / "run/checkpoint_final.pth", folder / "pretraining.pth")
    linear.main(load_config(None, [*keys, "OUTPUT_DIR", str(work / "probe")]), str(work / "run"))
    shutil.copy(max((work / "probe").rglob("checkpoint_*.pth")), folder / "linear_probe.pth")
    convert(work / "run", folder / "backbone.pkl")
    (folder / "backbone.pkl.json").unlink()
    sizes = {"MODEL__FPN__OUT_CHANNELS": 4, "MODEL__ROI_BOX_HEAD__FC_DIM": 8, "DATASETS__TEST": ()}
    cfg = tiny_coco.config(work / "detector", tiny_coco.write(work / "coco"), **sizes)
    run(engine, cfg, weights=read_weights(""))
    shutil.copy(work / "detector/model_final.pth", folder / "detector.pth")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary, pytest.MonkeyPatch.context() as patch:
        tiny.use(patch, 2)
        _write(Path(sys.argv[1]), Path(temporary))
