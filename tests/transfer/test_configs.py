"""The recipes are plain Detectron2 YAML with the values of the published protocol; each has a smoke form."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.common.errors import UserError
from tests.transfer import tiny_coco
from transfer import train_net
from transfer.config import check_supported, load_config

CONFIGS = Path(__file__).parents[2] / "configs"
LEAVES = sorted(path.name for path in CONFIGS.glob("coco_*.yaml"))
INITS = ("random", "supervised", "moco", "mocov2", "jcl")
SMOKE = {  # a leaf's own heads and recipe, small: 64-96 pixels, ResNet-18, 2 iterations of 2 images on a CPU
    key: value
    for key, value in tiny_coco.MODEL_KEYS.items()
    if not key.startswith(("MODEL.PIXEL", "MODEL.ROI_BOX_HEAD.NUM_FC", "MODEL.BACKBONE", "INPUT.FORMAT"))
} | {"SOLVER.MAX_ITER": 2, "SOLVER.STEPS": [], "TEST.PRECISE_BN.NUM_ITER": 1, "MODEL.WEIGHTS": ""}


def smoke_words(tmp_path: Path, leaf: str) -> list[str]:
    keypoints = "keypoint" in leaf
    name = tiny_coco.write(tmp_path / "data", keypoints=keypoints)
    data = {"DATASETS.TRAIN": (name,), "DATASETS.TEST": (name,), "OUTPUT_DIR": str(tmp_path / "out")}
    return tiny_coco.words(SMOKE | data | {"MODEL.ROI_HEADS.NUM_CLASSES": 1 if keypoints else 3})


def test_there_is_a_leaf_for_every_row_of_table_2() -> None:
    for detector in ("", "mask_", "keypoint_"):
        assert f"coco_{detector}R18_FPN_1x_simclr.yaml" in LEAVES
        assert {f"coco_{detector}R50_FPN_1x_{init}.yaml" for init in (*INITS, "tcl", "sce")} <= set(LEAVES)
        assert {f"coco_{detector}R50_FPN_2x_{init}.yaml" for init in ("mocov2", "jcl")} <= set(LEAVES)


@pytest.mark.parametrize("leaf", LEAVES)
def test_protocol(leaf: str) -> None:
    cfg = load_config(CONFIGS / leaf)
    check_supported(cfg)
    times = 2 if "_2x_" in leaf else 1
    assert (16, 0.02, 90000 * times) == (cfg.SOLVER.IMS_PER_BATCH, cfg.SOLVER.BASE_LR, cfg.SOLVER.MAX_ITER)
    assert tuple(cfg.SOLVER.STEPS) == (60000 * times, 80000 * times)
    assert (cfg.MODEL.RESNETS.NORM, cfg.MODEL.FPN.NORM) == ("SyncBN", "SyncBN")
    assert cfg.MODEL.BACKBONE.FREEZE_AT == 0 and cfg.TEST.PRECISE_BN.ENABLED
    assert cfg.INPUT.FORMAT == "RGB" and cfg.MODEL.RESNETS.STRIDE_IN_1X1 is False
    assert (min(cfg.INPUT.MIN_SIZE_TRAIN), max(cfg.INPUT.MIN_SIZE_TRAIN), cfg.INPUT.MIN_SIZE_TEST) == (640, 800, 800)
    assert ("_mask_" in leaf) == cfg.MODEL.MASK_ON and ("_keypoint_" in leaf) == cfg.MODEL.KEYPOINT_ON
    heads = (cfg.MODEL.ROI_BOX_HEAD.NUM_CONV, cfg.MODEL.ROI_BOX_HEAD.NUM_FC, cfg.MODEL.ROI_BOX_HEAD.NORM)
    assert heads == ((4, 1, "SyncBN") if "4conv1fc" in leaf else (0, 2, ""))
    assert f"runs/{leaf.removesuffix('.yaml')}" == cfg.OUTPUT_DIR
    assert bool(cfg.MODEL.WEIGHTS) == ("random" not in leaf)


@pytest.mark.parametrize("leaf", LEAVES)
def test_header_has_the_commands_and_the_papers_numbers(leaf: str) -> None:
    text = (CONFIGS / leaf).read_text()
    assert f"python transfer/train_net.py --config-file configs/{leaf}" in text and "Hardware:" in text
    assert ("python tools/convert_to_d2.py" in text) == ("random" not in leaf)
    if leaf.endswith(("_tcl.yaml", "_sce.yaml", "_simclr.yaml")):
        assert "Published: none" in text
    elif "_1x_" in leaf and "4conv1fc" not in leaf:
        task = "segm" if "_mask_" in leaf else "keypoints" if "_keypoint_" in leaf else "bbox"
        init = leaf.removesuffix(".yaml").rsplit("_", 1)[1].replace("moco", "mocov1").replace("mocov1v2", "mocov2")
        with open(CONFIGS / "papers" / "jcl_table2_coco_1x.csv") as file:
            lines = [line for line in file if not line.startswith("#")]
            row = next(r for r in csv.DictReader(lines) if (r["init"], r["task"]) == (init, task))
        found = re.search(
            r"The paper's result \(JCL, Table 2\), (\w+): AP ([\d.]+), AP50 ([\d.]+), AP75 ([\d.]+)\.", text
        )
        assert found is not None and found.groups() == (task, row["AP"], row["AP50"], row["AP75"])


@pytest.mark.detectron2
@pytest.mark.parametrize("leaf", LEAVES)
def test_stock_detectron2_reads_it_as_we_do(leaf: str) -> None:
    from detectron2.config import get_cfg

    stock = get_cfg()
    stock.merge_from_file(str(CONFIGS / leaf))
    ours = get_cfg()
    ours.merge_from_other_cfg(load_config(CONFIGS / leaf))
    assert json.loads(json.dumps(ours)) == json.loads(json.dumps(stock))  # a tuple is a list


QUICK = {
    ("detectron2", "coco_mask_R50_FPN_1x_4conv1fc_jcl.yaml"),
    ("torchvision", "coco_keypoint_R50_FPN_1x_random.yaml"),
}
MARK = {"detectron2": [pytest.mark.detectron2], "torchvision": []}
FORMS = [  # one an engine in the ordinary suite (each engine's own tests have all three detectors), all in the slow one
    pytest.param(leaf, engine, marks=[*MARK[engine], *([] if (engine, leaf) in QUICK else [pytest.mark.slow])])
    for engine in MARK
    for leaf in LEAVES
]


@pytest.mark.parametrize(("leaf", "engine"), FORMS)
def test_smoke_form_trains(tmp_path: Path, leaf: str, engine: str) -> None:
    words = ["--config-file", str(CONFIGS / leaf), "--engine", engine, *smoke_words(tmp_path, leaf)]
    results: dict[str, Any] = train_net.work(train_net.argument_parser().parse_args(words))
    assert results["engine"]["name"] == engine and results["metrics"]["bbox"]["AP"] is not None
    assert results["protocol"]["heads"].startswith("4conv1fc" if "4conv1fc" in leaf else "0conv2fc")
    state = torch.load(tmp_path / "out" / "model_final.pth")["model"]
    assert "backbone.bottom_up.res5.1.conv2.weight" in state


@pytest.mark.detectron2
def test_stock_detectron2_trains_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Detectron2's own trainer on a leaf, its data set registered by its own function, from a converted backbone."""
    from detectron2.config import get_cfg
    from detectron2.data import DatasetCatalog
    from detectron2.data.datasets import register_coco_instances
    from detectron2.engine import DefaultTrainer

    from tests.resnets import resnet_state
    from transfer.convert import convert

    torch.save(resnet_state(head=False), tmp_path / "s.pth")
    convert(tmp_path / "s.pth", tmp_path / "w.pkl")
    _, annotations, images = tiny_coco.write(tmp_path / "data").split(":")
    name = f"stock_{tmp_path.name}"
    register_coco_instances(name, {}, annotations, images)
    cfg = get_cfg()
    cfg.merge_from_file(str(CONFIGS / "coco_mask_R50_FPN_1x_jcl.yaml"))
    data = {"DATASETS.TRAIN": (name,), "DATASETS.TEST": (), "OUTPUT_DIR": str(tmp_path)}
    cfg.merge_from_list(tiny_coco.words(SMOKE | data | {"MODEL.WEIGHTS": str(tmp_path / "w.pkl")}))
    trainer = DefaultTrainer(cfg)
    trainer.resume_or_load(False)
    loaded = trainer.model.backbone.bottom_up.state_dict()["res4.0.shortcut.norm.running_var"]
    assert torch.equal(loaded, torch.load(tmp_path / "s.pth")["layer3.0.downsample.1.running_var"])
    monkeypatch.setattr(DefaultTrainer, "test", classmethod(lambda cls, cfg, model, evaluators=None: {}))
    trainer.train()
    DatasetCatalog.remove(name)
    assert (tmp_path / "model_final.pth").is_file()


def test_asking_for_detectron2_where_it_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train_net.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="make detectron2"):
        train_net.pick_engine("detectron2")
    assert train_net.pick_engine("auto")[0] == "torchvision"
    for engine, lines in (("auto", 1), ("torchvision", 0)):
        with pytest.raises(UserError, match="no config file"):
            train_net.main(["--config-file", "nowhere.yaml", "--engine", engine])
        said = capsys.readouterr().err.splitlines()
        assert len(said) == lines and all("the torchvision engine is used instead" in line for line in said)


def test_mistakes_of_the_command_line(tmp_path: Path) -> None:
    leaf = str(CONFIGS / "coco_R50_FPN_1x_jcl.yaml")
    with pytest.raises(UserError, match="machine-rank 2"):
        train_net.main(["--config-file", leaf, "--num-machines", "2", "--machine-rank", "2"])
    with pytest.raises(UserError, match="one machine only"):
        train_net.main(["--config-file", leaf, "--num-machines", "2"])
    with pytest.raises(UserError, match="is not tcp://HOST:PORT"):
        train_net.main(["--config-file", leaf, "--num-gpus", "2", "--dist-url", "somewhere"])
    with pytest.raises(UserError, match=r"did you mean 'coco_R50_FPN_1x_jcl\.yaml'"):
        train_net.main(["--config-file", str(CONFIGS / "coco_R50_FPN_1x_jlc.yaml")])
    for engine in ("torchvision", "detectron2"):
        with pytest.raises(UserError, match=r"SOLVER\.BASE_LRR.* did you mean 'SOLVER\.BASE_LR'|make detectron2"):
            train_net.main(["--config-file", leaf, "--engine", engine, "SOLVER.BASE_LRR", "1"])
