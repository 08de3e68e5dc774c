"""Runs that match a row of a paper are compared with it; for others, the report says why not."""

import re
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest
from scipy.stats import t

from tests.tools.reporting.runs import DIGITS, JCL, cells, detector, pretrain, probe, provenance, render, write
from tools import report
from tools.reporting.paper_tables import read_rows

TABLE = "JCL (Cai et al. 2020), Table "
RELEASED = ("METHOD.NUM_KEYS", "4", "METHOD.JCL_LAMBDA", "2.0")


def published(folder: Path, table: str) -> dict[str, list[str]]:
    """Return the rows of a published table with our numbers: for each metric the paper's, ours and the difference."""
    tables = {shown.title: shown for shown in report.build_report([folder]).tables}
    rows = tables[f"Published: {table}"].rows if f"Published: {table}" in tables else []
    return {row[0]: list(row[1:]) for row in rows if row[2] != "-"}


def test_a_probe_stands_next_to_table_1(tmp_path: Path):
    """Keys that do not change the result may differ from the recipe."""
    changes = "SEED 7 DATA.ROOT /scratch DATALOADER.NUM_WORKERS 2 PROBE.KNN_K 20 DEVICE cpu SOLVER.CHECKPOINT_PERIOD 50"
    config = pretrain(tmp_path / "jcl", *changes.split())
    probe(tmp_path / "jcl/linear", config, 68.0, "SEED", 9, recipe="R50_IN1k_100ep")
    assert list(published(tmp_path, f"{TABLE}1").values()) == [["68.7", "68.0", "-0.7", "89.0", "88.0", "-1.0"]]


@pytest.mark.parametrize(
    ("overrides", "linear", "source", "reason"),
    [
        (RELEASED, (), {}, "METHOD.NUM_KEYS 4 (recipe: 5)"),
        (("SOLVER.AMP", "bf16"), (), {}, "SOLVER.AMP bf16 (recipe: none); linear amp bf16"),
        ((), ("LINEAR.BASE_LR", 10.0), {}, "linear base lr 10.0 (recipe: 30.0)"),
        ((), ("DATA.VAL", "imagenet100"), {}, "linear scored on imagenet100 (recipe: imagenet)"),
        ((), (), {"epoch": 100}, "epoch 100 of 200."),
        ((), (), {"encoder": "key"}, "the key encoder; linear encoder key (recipe: query)."),
        ((), (), {"fine_tuned_on": ["coco_2017_train"]}, "fine-tuned on coco_2017_train."),
    ],
)
def test_a_probe_that_is_not_of_the_papers_recipe_is_not_compared(
    tmp_path: Path, overrides: tuple[str, ...], linear: tuple[Any, ...], source: dict[str, Any], reason: str
):
    config = pretrain(tmp_path / "mine", *overrides)
    probe(tmp_path / "x", config, 68.0, *linear, recipe="R50_IN1k_100ep", source=provenance(config, **source))
    text = render([tmp_path])
    assert "68.0" in text and "68.7" not in text
    assert re.search(f"- Not compared with {re.escape(f'{TABLE}1')}: (mine|x): {re.escape(reason)}", text)


def test_a_run_is_compared_with_the_row_that_differs_least(tmp_path: Path):
    """A row is its recipe with overrides, probed by the recipe's own LINEAR keys."""
    for name, overrides in (("sce", ()), ("near", ("METHOD.KEY_TEMPERATURE", "0.045"))):
        config = pretrain(tmp_path / name, *overrides, recipe="sce_R18_stl10_200ep", knn=None)
        probe(tmp_path / name / "linear", config, 80.0, recipe="own")
    table = "SCE (supplement), Table 2"
    assert [row[0] for row in published(tmp_path, table).values()] == ["89.94"]
    assert f"{table}: near: METHOD.KEY_TEMPERATURE 0.045 (recipe: " in render([tmp_path])


def test_small_runs_are_not_compared_with_papers(tmp_path: Path):
    config = pretrain(tmp_path / "jcl", *DIGITS)
    probe(tmp_path / "jcl/linear", config, 79.0, recipe="own")
    write(tmp_path / "d", detector("SOLVER.MAX_ITER", "100"))
    text = render([tmp_path])
    assert "Published" not in text and "aper" not in text.replace("recipe", "").replace(f"{TABLE}2", "")


def test_detectors_stand_next_to_table_2_in_the_papers_task_only(tmp_path: Path):
    config = pretrain(tmp_path / "runs/jcl_R50")
    write(tmp_path / "runs/coco_mask_jcl", detector(leaf=JCL, weights=provenance(config)))
    values = (35.0, 36.0, 37.4)
    for seed, ap in enumerate(values):
        results = detector("SEED", str(seed + 1))
        results["metrics"]["segm"] |= {"AP": ap, "AP50": ap + 20}
        write(tmp_path / f"runs/random{seed}", results)
    text = render([tmp_path / "runs"])
    half = t.ppf(0.975, 2) * stdev(values) / 3**0.5
    # Table 2's mask numbers are Mask R-CNN's, its box numbers Faster R-CNN's: box AP has no counterpart here.
    rows = published(tmp_path, f"{TABLE}2, engine detectron2")
    assert {name: "|".join(row) for name, row in rows.items()} == {
        "mask: jcl": "35.6|36.0|+0.4|56.2|56.0|-0.2|38.3|38.0|-0.3",
        "mask: random": (
            f"28.5|36.1 ± {half:.1f} [n 3]|+7.6|46.8|56.1 ± {half:.1f} [n 3]|+9.3|30.4|38.0 ± 0.0 [n 3]|+7.6"
        ),
    }
    assert "- Every pretraining run: pretrained on imagenet, epochs 200, seed 0.\n" in text
    digest = provenance(config)["source_sha256"][:8]
    assert f"- Weights: coco_mask_jcl: runs/jcl_R50/checkpoint_final.pth ({digest}).\n" in text


def test_the_supervised_row_starts_from_msras_network(tmp_path: Path):
    overrides = next(row["overrides"] for row in read_rows(f"{TABLE}2") if row["init"] == "supervised").split()
    for name, method in (("msra", {"method": "supervised_msra"}), ("torchvisions", {})):
        source = {"source": "r50.pkl", "source_sha256": "1676ba61" * 8, "arch": "resnet50", **method}
        write(tmp_path / name, detector(*overrides, weights=source))
    rows = published(tmp_path, f"{TABLE}2, engine detectron2")
    assert {name: row[:3] for name, row in rows.items()} == {"mask: supervised": ["35.4", "36.0", "+0.6"]}
    assert "; torchvisions: r50.pkl (1676ba61)." in render([tmp_path])


@pytest.mark.parametrize(
    ("pretraining", "overrides", "reason"),
    [
        ((), ("SOLVER.MAX_ITER", "180000"), "SOLVER.MAX_ITER 180000 (recipe: 90000)"),
        ((), ("MODEL.ROI_BOX_HEAD.NUM_CONV", "4"), "MODEL.ROI_BOX_HEAD"),
        ((), ("INPUT.MIN_SIZE_TRAIN", "(800,)"), "INPUT.MIN_SIZE_TRAIN [800] (recipe: "),
        ((), ("DATASETS.TEST", "('other',)"), "test other (recipe: coco_2017_val)"),
        (RELEASED, (), "METHOD.NUM_KEYS 4 (recipe: 5)"),
    ],
)
def test_a_lookalike_of_table_2_is_not_compared(
    tmp_path: Path, pretraining: tuple[str, ...], overrides: tuple[str, ...], reason: str
):
    config = pretrain(tmp_path / "p", *pretraining)
    write(tmp_path / "d", detector(*overrides, leaf=JCL, weights=provenance(config)))
    text = render([tmp_path / "d"])
    assert "36.0" in cells(text, "d") and "35.6" not in text
    assert f"- Not compared with {TABLE}2: d: " in text and reason in text


def test_another_engine_next_to_the_paper_is_marked(tmp_path: Path):
    for engine in ("detectron2", "torchvision"):
        write(tmp_path / engine, detector(engine=engine))
        assert published(tmp_path, f"{TABLE}2, engine {engine}")
    assert render([tmp_path]).count("The paper used Detectron2; these runs used torchvision.") == 1


def test_an_evaluation_alone_is_marked_and_not_compared(tmp_path: Path):
    config = pretrain(tmp_path / "p")
    tuned = provenance(config, fine_tuned_on=["coco_2017_train"])
    write(tmp_path / "d/eval_only", detector(leaf=JCL, weights=tuned, iteration=None))
    text = render([tmp_path / "d"])
    assert cells(text, "eval_only (evaluation only)")[1] == "jcl, then coco_2017_train" and "35.6" not in text


def test_two_probes_of_one_checkpoint_are_one_sample(tmp_path: Path):
    config = pretrain(tmp_path / "a")
    for number, top1 in enumerate((70.0, 70.2)):
        probe(tmp_path / f"a/linear{number}", config, top1, "SEED", number, recipe="R50_IN1k_100ep")
    assert [row[1] for row in published(tmp_path, f"{TABLE}1").values()] == ["70.1"]
    probe(tmp_path / "b/linear", pretrain(tmp_path / "b", "SEED", "2"), 71.1, recipe="R50_IN1k_100ep")
    interval = f"70.6 ± {t.ppf(0.975, 1) * 0.5:.1f} [n 2]"
    assert [row[1] for row in published(tmp_path, f"{TABLE}1").values()] == [interval]
