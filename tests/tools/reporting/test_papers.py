"""Which runs stand beside a paper's numbers, and which are told why they do not."""

from __future__ import annotations

from pathlib import Path
from statistics import stdev
from typing import Any

import pytest
from scipy.stats import t

from tests.tools.reporting.runs import (
    DIGITS,
    JCL,
    cells,
    column,
    detector,
    pretrain,
    probe,
    provenance,
    render,
    write,
)
from tools import report

TABLE = "JCL (Cai et al. 2020), Table "
RELEASED = ("METHOD.NUM_KEYS", "4", "METHOD.JCL_LAMBDA", "2.0")


def test_probes_stand_beside_table_1(tmp_path: Path):
    config = pretrain(tmp_path / "jcl")
    probe(tmp_path / "jcl/linear", config, 68.0, recipe="R50_IN1k_100ep")
    text = render([tmp_path / "jcl"])
    assert cells(text, "jcl") == ["jcl", "jcl", "50.0", "68.0", "88.0", "68.7", "-0.7"]


@pytest.mark.parametrize(
    ("recipe", "overrides", "linear", "reason"),
    [
        ("jcl_R50_IN1k_200ep", RELEASED, (), "METHOD.NUM_KEYS 4 (recipe: 5)"),
        ("jcl_R50_IN1k_200ep", ("SOLVER.EPOCHS", "100"), (), "SOLVER.EPOCHS 100 (recipe: 200)"),
        ("jcl_R50_IN1k_200ep", ("SOLVER.AMP", "bf16"), (), 'SOLVER.AMP bf16 (recipe: none); linear amp bf16'),
        ("jcl_R50_IN1k_200ep", (), ("LINEAR.BASE_LR", 10.0), "linear base lr 10.0 (recipe: 30.0)"),
        ("jcl_R50_IN1k_200ep", (), ("PROBE.IMAGE_SIZE", 160), "linear image size 160 (recipe: 224)"),
        ("jcl_R50_IN1k_200ep", (), ("DATA.VAL", "imagenet100"), "linear scored on imagenet100 (recipe: imagenet)"),
    ],
)  # fmt: skip
def test_a_run_that_is_not_of_the_papers_recipe_is_not_compared(
    tmp_path: Path, recipe: str, overrides: tuple[str, ...], linear: tuple[Any, ...], reason: str
):
    config = pretrain(tmp_path / "mine", *overrides, recipe=recipe)
    probe(tmp_path / "mine/linear", config, 68.0, *linear, recipe="R50_IN1k_100ep")
    text = render([tmp_path / "mine"])
    assert "68.0" in text and "68.7" not in text
    assert f"- Not compared with {TABLE}1: mine: {reason}" in text


def test_every_papers_table_has_its_rows(tmp_path: Path):
    """A row is its recipe with overrides, probed by the recipe's own LINEAR keys."""
    for name, recipe, overrides in (
        ("tcl", "tcl_supervised_R50_cifar100_100ep", ()),
        ("supcon", "tcl_supervised_R50_cifar100_100ep", ("METHOD.NAME", "supcon", "METHOD.K1", "1.0")),
        ("long", "tcl_supervised_R50_cifar100_100ep", ("SOLVER.EPOCHS", "200")),
        ("sce", "sce_R18_stl10_200ep", ()),
        ("near", "sce_R18_stl10_200ep", ("METHOD.KEY_TEMPERATURE", "0.045")),
    ):
        config = pretrain(tmp_path / name, *overrides, recipe=recipe, knn=None)
        probe(tmp_path / name / "linear", config, 80.0, recipe="own")
    text = render([tmp_path])
    found = {name: column(text, name, "paper's top-1") for name in ("tcl", "supcon", "long", "sce", "near")}
    assert found == {"tcl": "79.3", "supcon": "78.5", "long": "81.6", "sce": "89.9", "near": "-"}
    papers = [line for line in text.splitlines() if line.startswith("- Paper: ")]
    assert all("TCL (supplement), Table 1" in p and "TCL (supplement), Table 2" in p for p in papers if "TCL" in p)
    assert "- Paper: SCE (supplement), Table 2." in papers and len(papers) == 2
    assert "SCE (supplement), Table 2: near: METHOD.KEY_TEMPERATURE 0.045 (recipe: " in text


def test_what_does_not_change_the_result_may_differ_from_the_recipe(tmp_path: Path):
    config = pretrain(tmp_path / "jcl", "SEED", "7", "DATA.ROOT", "/scratch", "DATALOADER.NUM_WORKERS", "2",
                      "PROBE.KNN_K", "20", "DEVICE", "cpu", "SOLVER.CHECKPOINT_PERIOD", "50")  # fmt: skip
    probe(tmp_path / "jcl/linear", config, 68.0, "SEED", 9, recipe="R50_IN1k_100ep")
    assert column(render([tmp_path]), "jcl", "difference") == "-0.7"


def test_an_unfinished_or_other_backbone_is_not_compared(tmp_path: Path):
    config = pretrain(tmp_path / "jcl")
    for name, change in (("half", {"epoch": 100, "step": 1000}), ("key", {"encoder": "key"}),
                         ("tuned", {"fine_tuned_on": ["coco_2017_train"]})):  # fmt: skip
        probe(tmp_path / name, config, 60.0, recipe="R50_IN1k_100ep", source=provenance(config, **change))
    text = render([tmp_path])
    assert "68.7" not in text
    assert f"Not compared with {TABLE}1: half: epoch 100 of 200." in text
    assert f"Not compared with {TABLE}1: jcl: the key encoder; linear encoder key (recipe: query)." in text
    assert f"Not compared with {TABLE}1: tuned: fine-tuned on coco_2017_train." in text
    assert column(text, "half", "epochs") == "100 of 200"  # beside the pretraining's own row, which it is not of
    assert cells(text, "tuned")[1] == "jcl, then coco_2017_train"


def test_small_runs_are_not_measured_by_the_paper_at_all(tmp_path: Path):
    config = pretrain(tmp_path / "jcl", *DIGITS)
    probe(tmp_path / "jcl/linear", config, 79.0, recipe="own")
    assert "aper" not in render([tmp_path / "jcl"]).replace("recipe", "")


def test_detectors_stand_beside_table_2_in_the_papers_task_only(tmp_path: Path):
    config = pretrain(tmp_path / "runs/jcl_R50")
    write(tmp_path / "runs/coco_mask_jcl", detector(leaf=JCL, weights=provenance(config)))
    write(tmp_path / "runs/coco_mask_random", detector())
    text = render([tmp_path / "runs"])
    # Table 2's mask numbers are Mask R-CNN's, its box numbers Faster R-CNN's: box AP has no counterpart here.
    assert cells(text, "coco_mask_jcl") == [
        "coco_mask_jcl", "jcl", "38.0", "58.0", "-", "36.0", "56.0", "38.0",
        "35.6 (+0.4)", "56.2 (-0.2)", "38.3 (-0.3)",
    ]  # fmt: skip
    assert "- Every pretraining: pretrained on imagenet, epochs 200, seed 0.\n" in text
    digest = provenance(config)["source_sha256"][:8]
    assert f"- Weights: coco_mask_jcl: runs/jcl_R50/checkpoint_final.pth ({digest}).\n" in text
    assert cells(text, "coco_mask_random")[1:3] == ["random", "38.0"]
    assert cells(text, "coco_mask_random")[-3:] == ["28.5 (+7.5)", "46.8 (+9.2)", "30.4 (+7.6)"]


def test_the_supervised_row_starts_from_msras_network(tmp_path: Path):
    leaf = "coco_mask_R50_FPN_1x_supervised_msra"
    for name, method in (("msra", {"method": "supervised_msra"}), ("torchvisions", {})):
        source = {"source": "r50.pkl", "source_sha256": "1676ba61" * 8, "arch": "resnet50", **method}
        write(tmp_path / name, detector(leaf=leaf, weights=source))
    text = render([tmp_path])
    assert cells(text, "msra")[-3:] == ["35.4 (+0.6)", "56.5 (-0.5)", "38.1 (-0.1)"]
    assert "; torchvisions: r50.pkl (1676ba61)." in text and cells(text, "torchvisions")[-3:] == ["-"] * 3


@pytest.mark.parametrize(
    ("leaf", "overrides", "released", "reason"),
    [
        (JCL, ("SOLVER.MAX_ITER", "180000"), False, "SOLVER.MAX_ITER 180000 (recipe: 90000)"),
        ("coco_mask_R50_FPN_1x_4conv1fc", (), False, "MODEL.ROI_BOX_HEAD"),
        (JCL, ("INPUT.MIN_SIZE_TRAIN", "(800,)"), False, "INPUT.MIN_SIZE_TRAIN [800] (recipe: "),
        (JCL, ("SOLVER.ACCUMULATE", "4"), False, "SOLVER.ACCUMULATE 4 (recipe: 1)"),
        (JCL, ("DATASETS.TEST", "('other',)"), False, "test other (recipe: coco_2017_val)"),
        (JCL, (), True, "METHOD.NUM_KEYS 4 (recipe: 5)"),
    ],
)
def test_a_lookalike_of_table_2_is_not_compared(
    tmp_path: Path, leaf: str, overrides: tuple[str, ...], released: bool, reason: str
):
    config = pretrain(tmp_path / "p", *(RELEASED if released else ()), recipe="jcl_R50_IN1k_200ep")
    write(tmp_path / "d", detector(*overrides, leaf=leaf, weights=provenance(config)))
    text = render([tmp_path / "d"])
    assert "36.0" in cells(text, "d") and "35.6" not in text
    assert f"- Not compared with {TABLE}2: d: " in text and reason in text


@pytest.mark.parametrize(("engine", "is_marked"), [("torchvision", True), ("detectron2", False)])
def test_another_engine_beside_the_paper_is_marked(tmp_path: Path, engine: str, is_marked: bool):
    write(tmp_path / "a", detector(engine=engine))
    assert ("The paper's engine is Detectron2, this table's is not." in render([tmp_path])) == is_marked


def test_an_evaluation_alone_is_marked_and_not_compared(tmp_path: Path):
    config = pretrain(tmp_path / "p")
    tuned = provenance(config, fine_tuned_on=["coco_2017_train"])
    write(tmp_path / "d/eval_only", detector(leaf=JCL, weights=tuned, iteration=None))
    text = render([tmp_path / "d"])
    assert cells(text, "eval_only (evaluation only)")[1] == "jcl, then coco_2017_train" and "35.6" not in text


def test_a_papers_whole_table_has_the_mean_of_our_seeds_beside_its_numbers(tmp_path: Path):
    values = (37.0, 38.0, 39.4)
    for seed, ap in enumerate(values):
        found = detector("SEED", str(seed + 1))
        found["metrics"]["segm"] |= {"AP": ap, "AP50": ap + 20, "AP75": None}
        write(tmp_path / f"d{seed}", found)
    other = detector(engine="torchvision")
    other["metrics"]["segm"] |= {"AP": 20.0, "AP50": 30.0, "AP75": 31.0}
    write(tmp_path / "other", other)
    tables = {table.title: table for table in report.gather([tmp_path]).tables}
    shown = tables[f"Published: {TABLE}2, engine detectron2"]
    assert len(shown.rows) == 15 and shown.head[:4] == ["published row", "paper's AP", "our AP", "difference"]
    rows = {row[0]: row[1:] for row in shown.rows}
    half = t.ppf(0.975, 2) * stdev(values) / 3**0.5
    assert rows["mask: random"] == [
        "28.5", f"38.1 ± {half:.1f} [n 3]", "+9.6", "46.8", f"58.1 ± {half:.1f} [n 3]", "+11.3", "30.4", "-", "-",
    ]  # fmt: skip
    assert rows["box: random"] == ["30.1", "-", "-", "48.6", "-", "-", "31.9", "-", "-"]
    apart = tables[f"Published: {TABLE}2, engine torchvision"]
    assert ["mask: random", "28.5", "20.0", "-8.5"] in [list(row[:4]) for row in apart.rows]
    assert "The paper's engine is Detectron2, this table's is not." in apart.notes


def test_a_papers_table_without_a_comparable_run_is_not_shown(tmp_path: Path):
    write(tmp_path / "d", detector("SOLVER.MAX_ITER", "100"))
    assert "Published" not in render([tmp_path])


def test_two_probes_of_one_checkpoint_are_one_sample(tmp_path: Path):
    config = pretrain(tmp_path / "a")
    for number, top1 in enumerate((70.0, 70.2)):
        probe(tmp_path / f"a/linear{number}", config, top1, "SEED", number, recipe="R50_IN1k_100ep")
    assert measured_top1(tmp_path) == ["70.1"]
    probe(tmp_path / "b/linear", pretrain(tmp_path / "b", "SEED", "2"), 71.1, recipe="R50_IN1k_100ep")
    assert measured_top1(tmp_path) == [f"70.6 ± {t.ppf(0.975, 1) * 0.5:.1f} [n 2]"]


def measured_top1(folder: Path) -> list[str]:
    (table,) = [one for one in report.gather([folder]).tables if one.title == f"Published: {TABLE}1"]
    return [row[2] for row in table.rows if row[2] != "-"]
