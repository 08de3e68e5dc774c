"""The report: what stands beside what, and what is never put together."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from fvcore.common.config import CfgNode

from pretrain.common.config_io import dump, merge_file
from pretrain.common.errors import UserError
from pretrain.config import from_yaml_text, load_config
from pretrain.probe.features import evaluation_size
from tools import report
from transfer import config as transfer_config

CONFIGS = Path(__file__).parents[2] / "configs"
DIGITS = ("DATA.TRAIN", "digits", "MODEL.ARCH", "resnet18", "VIEWS.IMAGE_SIZE", "32", "SOLVER.EPOCHS", "15")


def write(folder: Path, data: dict[str, Any], config: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(data))
    if config:
        (folder / "config.yaml").write_text(config)


def pretrain(folder: Path, *overrides: str, recipe: str = "jcl_R50_IN1k_200ep", knn: float | None = 50.0) -> str:
    """Writes a finished pretraining to ``folder``; returns its config."""
    cfg = load_config(CONFIGS / "pretrain" / f"{recipe}.yaml", [*overrides, "OUTPUT_DIR", str(folder)])
    content = {"stage": "pretrain", "method": cfg.METHOD.NAME, "arch": cfg.MODEL.ARCH, "epochs": cfg.SOLVER.EPOCHS,
               "steps": 10 * cfg.SOLVER.EPOCHS, "metrics": {}}  # fmt: skip
    if knn is not None:
        content |= {"metrics": {"knn_top1": knn, "knn_top5": 90.0}, "knn_protocol": protocol(cfg, "knn")}
    write(folder, content, dump(cfg))
    return dump(cfg)


def protocol(cfg: CfgNode, stage: str) -> dict[str, Any]:
    """What a probe under ``cfg`` records of how it scores."""
    own = dict(cfg.LINEAR) if stage == "linear" else {"k": cfg.PROBE.KNN_K, "temperature": cfg.PROBE.KNN_TEMPERATURE}
    size, resize = evaluation_size(cfg)
    train = cfg.DATA.PROBE_TRAIN or cfg.DATA.TRAIN
    return own | {"image_size": size, "resize": resize, "amp": cfg.SOLVER.AMP, "train": train,
                  "val": cfg.DATA.VAL or train, "train_images": 300, "val_images": 100}  # fmt: skip


def provenance(config: str, **change: Any) -> dict[str, Any]:
    """What a probe or a conversion records of the final checkpoint of a pretraining under ``config``."""
    cfg = from_yaml_text(config)
    return {
        "source": "checkpoint_final.pth", "source_sha256": "0123456789abcdef", "encoder": "query", "stem": "imagenet",
        "arch": cfg.MODEL.ARCH, "config": config, "method": cfg.METHOD.NAME, "epoch": cfg.SOLVER.EPOCHS,
        "step": 10 * cfg.SOLVER.EPOCHS, **change,
    }  # fmt: skip


def probe(
    folder: Path, config: str, top1: float, *overrides: Any, recipe: str = "", source: dict[str, Any] | None = None
) -> None:
    """Writes a kNN, or by a ``recipe`` a linear probe, over the ``config`` of the pretraining."""
    cfg = from_yaml_text(config).clone()
    cfg.defrost()
    if recipe:
        merge_file(cfg, CONFIGS / "linear" / f"{recipe}.yaml")
    cfg.merge_from_list(list(overrides))
    stage = "linear" if recipe else "knn"
    write(folder, {"stage": stage, "source": source or provenance(config), "protocol": protocol(cfg, stage),
                   "metrics": {"top1": top1, "top5": 88.0}}, dump(cfg))  # fmt: skip


def detector(
    leaf: str = "coco_mask_R50_FPN_1x_jcl", weights: dict[str, Any] | None = None, engine: str = "detectron2",
    overrides: tuple[str, ...] = (), **change: Any,
) -> dict[str, Any]:  # fmt: skip
    """The results.json of a fine-tuning by a recipe; ``weights`` is their provenance, none is a random start."""
    cfg = transfer_config.load_config(CONFIGS / f"{leaf}.yaml", overrides)
    return {
        "stage": "transfer",
        "engine": {"name": engine, "version": "0.6"},
        "metrics": {
            "bbox": {"AP": 38.0, "AP50": 58.0, "AP75": None},
            "segm": {"AP": 36.0, "AP50": 56.0, "AP75": 38.0},
        },
        "iteration": cfg.SOLVER.MAX_ITER,
        "protocol": {
            "detector": "mask", "backbone": "R50-FPN", "norm": "SyncBN", "heads": "0conv2fc",
            "train": list(cfg.DATASETS.TRAIN), "test": list(cfg.DATASETS.TEST),
        },
        "schedule": {
            "iterations": cfg.SOLVER.MAX_ITER, "steps": list(cfg.SOLVER.STEPS), "name": "1x",
            "images_per_batch": cfg.SOLVER.IMS_PER_BATCH, "base_lr": cfg.SOLVER.BASE_LR,
        },
        "weights": {"path": "w.pth" if weights else "", "sha256": "fedcba98" * 8, "provenance": weights or {}},
        "config": dump(cfg), **change,
    }  # fmt: skip


def render(folders: list[Path]) -> str:
    return report.render(folders)[0]


def cells(text: str, first: str) -> list[str]:
    """The cells of the one row that begins with ``first``."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {first} ")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def column(text: str, first: str, heading: str) -> str:
    """The cell of a row under ``heading``; the report may hold several tables."""
    lines = text.splitlines()
    (place,) = [i for i, line in enumerate(lines) if line.startswith(f"| {first} ")]
    head = next(line for line in reversed(lines[:place]) if line.startswith("| run "))
    return cells(text, first)[[cell.strip() for cell in head.strip("|").split("|")].index(heading)]


def test_probes_stand_beside_table_1(tmp_path: Path):
    config = pretrain(tmp_path / "jcl")
    probe(tmp_path / "jcl/linear", config, 68.0, recipe="R50_IN1k_100ep")
    text = render([tmp_path / "jcl"])
    assert cells(text, "jcl") == [
        "jcl", "jcl", "resnet50", "imagenet", "200", "0", "50.0", "68.0", "88.0", "68.7", "-0.7"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("recipe", "overrides", "linear", "reason"),
    [
        ("jcl_R50_IN1k_200ep_released", (), (), "METHOD.NUM_KEYS 4 (recipe: 5)"),
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
    assert f"- Not compared with JCL's Table 1: mine: {reason}" in text


def test_what_does_not_change_the_result_may_differ_from_the_recipe(tmp_path: Path):
    config = pretrain(tmp_path / "jcl", "SEED", "7", "DATA.ROOT", "/scratch", "DATALOADER.NUM_WORKERS", "2",
                      "PROBE.KNN_K", "20", "DEVICE", "cpu", "SOLVER.CHECKPOINT_PERIOD", "50")  # fmt: skip
    probe(tmp_path / "jcl/linear", config, 68.0, "SEED", 9, recipe="R50_IN1k_100ep")
    assert column(render([tmp_path]), "jcl", "difference") == "-0.7"


def test_probes_by_one_protocol_share_a_cell(tmp_path: Path):
    config = pretrain(tmp_path / "jcl")
    for seed, top1 in ((0, 68.0), (1, 68.4)):
        probe(tmp_path / f"jcl/linear_{seed}", config, top1, "SEED", seed, recipe="R50_IN1k_100ep")
    probe(tmp_path / "jcl/knn", config, 50.0)  # what the pretraining found at its end: shown once
    text = render([tmp_path])
    assert cells(text, "jcl")[6:] == ["50.0", "68.0 / 68.4", "88.0", "68.7", "-0.7 / -0.3"]


def test_an_unfinished_or_other_backbone_is_not_compared(tmp_path: Path):
    config = pretrain(tmp_path / "jcl")
    for name, change in (("half", {"epoch": 100, "step": 1000}), ("key", {"encoder": "key"}),
                         ("tuned", {"fine_tuned_on": ["coco_2017_train"]})):  # fmt: skip
        probe(tmp_path / name, config, 60.0, recipe="R50_IN1k_100ep", source=provenance(config, **change))
    text = render([tmp_path])
    assert "68.7" not in text
    assert "Not compared with JCL's Table 1: half: epoch 100 of 200." in text
    assert "Not compared with JCL's Table 1: jcl: the key encoder; linear encoder key (recipe: query)." in text
    assert "Not compared with JCL's Table 1: tuned: fine-tuned on coco_2017_train." in text
    assert cells(text, "half")[4] == "100 of 200"  # beside the pretraining's own row, which it is not of
    assert cells(text, "tuned")[1] == "jcl, then coco_2017_train"


def test_small_runs_are_not_measured_by_the_paper_at_all(tmp_path: Path):
    config = pretrain(tmp_path / "jcl", *DIGITS)
    probe(tmp_path / "jcl/linear", config, 79.0, recipe="SCE_small_100ep")
    assert "aper" not in render([tmp_path / "jcl"]).replace("recipe", "")


def test_runs_of_equal_name_have_a_row_each(tmp_path: Path):
    for pipeline, knn in (("demo", 70.2), ("digits_methods", 65.5)):
        config = pretrain(tmp_path / pipeline / "jcl/pretrain", *DIGITS, knn=knn)
        probe(tmp_path / pipeline / "jcl/knn", config, knn)
        random = {"source": "random", "seed": 0, "arch": "resnet18"}
        probe(tmp_path / pipeline / "random/knn", config, knn - 10, source=random)
    text = render([tmp_path / "demo", tmp_path / "digits_methods"])
    assert cells(text, "demo/jcl") == ["demo/jcl", "jcl", "resnet18", "digits", "15", "0", "70.2"]
    assert cells(text, "digits_methods/jcl")[-1] == "65.5"
    assert cells(text, "demo/random") == ["demo/random", "random", "resnet18", "-", "-", "0", "60.2"]
    assert cells(text, "digits_methods/random")[-1] == "55.5"
    assert render([tmp_path, tmp_path / "demo"]).count("demo/jcl") == 1  # given twice, shown once


def test_probes_in_a_folder_of_their_own_join_the_pretraining_they_name(tmp_path: Path):
    config = pretrain(tmp_path / "runs/jcl", *DIGITS)
    pretrain(tmp_path / "runs/other", *DIGITS, knn=40.0)
    probe(tmp_path / "runs/linear_lr10", config, 61.0, "DATA.TRAIN", "digits", recipe="R18_IN100_100ep")
    other = {"source": "r50.pth", "source_sha256": "ab" * 32, "arch": "resnet50", "encoder": ""}
    probe(tmp_path / "runs/knn_r50", config, 33.0, source=other)
    text = render([tmp_path / "runs"])
    assert column(text, "jcl", "linear top-1") == "61.0" and column(text, "other", "linear top-1") == "-"
    assert cells(text, "knn_r50")[:3] == ["knn_r50", "r50.pth (abababab)", "resnet50"]


def test_unequal_protocols_never_share_a_column(tmp_path: Path):
    for name, overrides, top1 in (
        ("a", (), 51.0), ("b", ("PROBE.KNN_K", 5), 70.2), ("c", ("PROBE.IMAGE_SIZE", 64), 55.0)
    ):  # fmt: skip
        config = pretrain(tmp_path / name, *DIGITS, knn=None)
        probe(tmp_path / name / "knn", config, top1, *overrides)
    text = render([tmp_path])
    assert cells(text, "run")[6:] == [
        "kNN top-1 (k 200, image size 32, resize 37)",
        "kNN top-1 (k 5, image size 32, resize 37)",
        "kNN top-1 (k 200, image size 64, resize 73)",
    ]
    assert [cells(text, name)[6:] for name in "abc"] == [["51.0", "-", "-"], ["-", "70.2", "-"], ["-", "-", "55.0"]]
    assert "- kNN: temperature 0.07, amp none, train digits, " in text


def test_protocols_of_an_earlier_version_are_read_from_the_config(tmp_path: Path):
    for name, k in (("a", 200), ("b", 5)):
        config = pretrain(tmp_path / name, *DIGITS, "PROBE.KNN_K", str(k), knn=60.0)
        probe(tmp_path / name / "linear", config, 70.0, recipe="SCE_small_100ep")
        for file in (tmp_path / name / "results.json", tmp_path / name / "linear/results.json"):
            content = json.loads(file.read_text())
            file.write_text(json.dumps({key: v for key, v in content.items() if "protocol" not in key}))
    text = render([tmp_path])
    assert cells(text, "run")[6:] == ["kNN top-1 (k 200)", "kNN top-1 (k 5)", "linear top-1", "linear top-5"]
    assert cells(text, "b")[6:] == ["-", "60.0", "70.0", "88.0"]
    (tmp_path / "b/config.yaml").unlink()
    text = render([tmp_path])
    told = "b/results.json cannot be shown: neither it nor config.yaml records the protocol of its score"
    assert told in text and column(text, "a", "kNN top-1") == "60.0"


def test_the_heading_names_what_was_scored(tmp_path: Path):
    config = pretrain(tmp_path / "photos", *DIGITS, "DATA.TRAIN", "folder:/photos", knn=None)
    probe(tmp_path / "photos/knn", config, 60.0, "DATA.PROBE_TRAIN", "cifar10")
    probe(tmp_path / "photos/knn_100", config, 40.0, "DATA.PROBE_TRAIN", "cifar100")
    first, second = render([tmp_path]).split("\n## ")[1:]
    assert first.startswith("Frozen features: accuracy on the validation images of cifar10, in percent")
    assert second.startswith("Frozen features: accuracy on the validation images of cifar100, in percent")
    assert "train cifar10," in first and cells(first, "photos")[3] == "folder:/photos"
    assert cells(first, "photos")[-1] == "60.0" and cells(second, "photos")[-1] == "40.0"


def test_a_pretraining_without_labels_is_shown(tmp_path: Path):
    pretrain(tmp_path / "photos", *DIGITS, "DATA.TRAIN", "folder:/photos", knn=None)
    text = render([tmp_path])
    assert "## Pretraining without scores" in text and cells(text, "photos")[3] == "folder:/photos"


def test_detectors_stand_beside_table_2_in_the_papers_task_only(tmp_path: Path):
    config = pretrain(tmp_path / "runs/jcl_R50")
    write(tmp_path / "runs/coco_mask_jcl", detector(weights=provenance(config)))
    write(tmp_path / "runs/coco_mask_random", detector("coco_mask_R50_FPN_1x_random"))
    text = render([tmp_path / "runs"])
    # Table 2's mask numbers are Mask R-CNN's, its box numbers Faster R-CNN's: box AP has no counterpart here.
    assert cells(text, "coco_mask_jcl") == [
        "coco_mask_jcl", "jcl", "imagenet", "200", "0", "runs/jcl_R50/checkpoint_final.pth (01234567)",
        "38.0", "58.0", "-", "36.0", "56.0", "38.0", "35.6 (+0.4)", "56.2 (-0.2)", "38.3 (-0.3)",
    ]  # fmt: skip
    assert cells(text, "coco_mask_random")[1:6] == ["random", "-", "-", "-", "-"]
    assert cells(text, "coco_mask_random")[-3:] == ["28.5 (+7.5)", "46.8 (+9.2)", "30.4 (+7.6)"]


def test_supervised_weights_are_known_by_their_hash(tmp_path: Path):
    table = (CONFIGS / "papers/jcl_table2_coco_1x.csv").read_text()
    (digits,) = re.findall(r"^supervised,segm,.*,sha256:(\w+),", table, re.MULTILINE)
    for name, sha in (("msra", digits), ("other", f"1{digits}")):
        source = {"source": "R-50.pkl", "source_sha256": sha, "arch": "resnet50"}
        write(tmp_path / name, detector("coco_mask_R50_FPN_1x_supervised_msra", weights=source))
    text = render([tmp_path])
    assert cells(text, "msra")[-3:] == ["35.4 (+0.6)", "56.5 (-0.5)", "38.1 (-0.1)"]
    assert cells(text, "other")[5] == f"R-50.pkl (1{digits[:7]})" and cells(text, "other")[-3:] == ["-", "-", "-"]


@pytest.mark.parametrize(
    ("leaf", "overrides", "released", "reason"),
    [
        ("Base-Mask-RCNN-FPN-2x", (), False, "SOLVER.MAX_ITER 180000 (recipe: 90000)"),
        ("Base-Mask-RCNN-FPN-1x-4conv1fc", (), False, "MODEL.ROI_BOX_HEAD"),
        ("coco_mask_R50_FPN_1x_jcl", ("INPUT.MIN_SIZE_TRAIN", "(800,)"), False, "INPUT.MIN_SIZE_TRAIN [800] (recipe: "),
        ("coco_mask_R50_FPN_1x_jcl", ("DATASETS.TEST", "('other',)"), False, "test other (recipe: coco_2017_val)"),
        ("coco_mask_R50_FPN_1x_jcl", (), True, "METHOD.NUM_KEYS 4 (recipe: 5)"),
    ],
)
def test_a_lookalike_of_table_2_is_not_compared(
    tmp_path: Path, leaf: str, overrides: tuple[str, ...], released: bool, reason: str
):
    config = pretrain(tmp_path / "p", recipe="jcl_R50_IN1k_200ep" + "_released" * released)
    write(tmp_path / "d", detector(leaf, provenance(config), overrides=overrides))
    text = render([tmp_path / "d"])
    assert "36.0" in cells(text, "d") and "35.6" not in text
    assert "- Not compared with JCL's Table 2: d: " in text and reason in text


def detector_named(engine: str = "detectron2", leaf: str = "coco_mask_R50_FPN_1x_random", *overrides: str):
    return detector(leaf, engine=engine, overrides=overrides)


@pytest.mark.parametrize(
    "other",
    [
        detector_named("torchvision"),
        detector_named("detectron2", "coco_mask_R50_FPN_1x_random", "SOLVER.MAX_ITER", "180000"),
        detector_named("detectron2", "coco_mask_R50_FPN_1x_random", "MODEL.ROI_BOX_HEAD.NORM", "BN"),
        detector_named("detectron2", "coco_mask_R50_FPN_1x_random", "INPUT.MIN_SIZE_TEST", "600"),
        detector_named("detectron2", "coco_mask_R50_FPN_1x_random", "DATASETS.TEST", "('other',)"),
    ],
)
def test_engines_schedules_heads_and_data_never_share_a_table(other: dict[str, Any], tmp_path: Path):
    write(tmp_path / "a", detector_named())
    write(tmp_path / "b", other)
    text = render([tmp_path])
    heads = [part.split("\n| run ")[0] for part in text.split("\n## ")[1:]]
    assert len(heads) == 2 and heads[0] != heads[1]


def test_equal_runs_in_other_places_share_a_table(tmp_path: Path):
    write(tmp_path / "a", detector_named())
    write(tmp_path / "b", detector_named("detectron2", "coco_mask_R50_FPN_1x_random", "OUTPUT_DIR", "/x", "SEED", "5",
                                         "MODEL.DEVICE", "cpu", "DATALOADER.NUM_WORKERS", "0"))  # fmt: skip
    assert render([tmp_path]).count("| run ") == 1


def test_another_engine_beside_the_paper_is_marked(tmp_path: Path):
    for engine, marked in (("torchvision", True), ("detectron2", False)):
        write(tmp_path / "a", detector_named(engine))
        assert ("The paper's engine is Detectron2, this table's is not." in render([tmp_path])) == marked


def test_an_evaluation_alone_is_marked_and_not_compared(tmp_path: Path):
    config = pretrain(tmp_path / "p")
    tuned = provenance(config, fine_tuned_on=["coco_2017_train"])
    write(tmp_path / "d/eval_only", detector(weights=tuned, iteration=None))
    text = render([tmp_path / "d"])
    assert cells(text, "eval_only (evaluation only)")[1] == "jcl, then coco_2017_train" and "35.6" not in text


@pytest.mark.parametrize("key", ["datasets", "metrics"])
def test_each_test_set_has_its_own_numbers(tmp_path: Path, key: str):
    sets = {"coco_2017_val": {"bbox": {"AP": 38.0}}, "other_val": {"bbox": {"AP": 11.0}}}
    found = detector_named()
    found["protocol"]["test"] = list(sets)
    write(tmp_path / "a", found | {key: sets})
    first, second = render([tmp_path / "a"]).split("\n## ")[1:]
    assert "-> coco_2017_val" in first and cells(first, "a")[6] == "38.0" and "Paper:" in first
    assert "-> other_val" in second and cells(second, "a")[6] == "11.0" and "Paper:" not in second


def test_flat_numbers_are_those_of_the_first_set(tmp_path: Path):
    found = detector_named()
    found["protocol"]["test"] = ["coco_2017_val", "other_val"]
    write(tmp_path / "a", found)
    shown = render([tmp_path / "a"])
    assert shown.count("| run ") == 1 and "-> coco_2017_val" in shown


def pipeline(folder: Path, *keys: str, parents: dict[str, list[str]] | None = None) -> None:
    """Writes what the launcher keeps of a pipeline whose stages are ``keys``; all but those of moco are complete."""
    listed = [
        {"key": key, "stage": "any", "folder": str(folder / key), "parents": (parents or {}).get(key, []),
         "produces": "results.json", "fingerprint": key}
        for key in keys
    ]  # fmt: skip
    (folder / "launch").mkdir(parents=True)
    (folder / "launch/pipeline.json").write_text(json.dumps({"stages": listed}))
    for key in keys:
        if not key.startswith("moco"):
            (folder / key / "launch").mkdir(parents=True)
            (folder / key / "launch/complete.json").write_text(json.dumps({"fingerprint": key}))


def test_a_pipelines_branches_are_rows_and_its_failures_are_told(tmp_path: Path):
    keys = ("jcl/pretrain", "jcl/linear", "moco/pretrain", "moco/linear")
    pipeline(tmp_path / "p", *keys, parents={"jcl/linear": ["jcl/pretrain"], "moco/linear": ["moco/pretrain"]})
    config = pretrain(tmp_path / "p/jcl/pretrain", *DIGITS)
    probe(tmp_path / "p/jcl/linear", config, 60.0, recipe="SCE_small_100ep")
    failed = tmp_path / "p/moco/pretrain/launch/ranks"
    failed.mkdir(parents=True)
    (failed / "7.0.failed").write_text(json.dumps({"rank": 3, "error": "loss is not finite"}))
    (tmp_path / "p").rename(tmp_path / "moved")  # a pipeline may be moved as a whole
    text = render([tmp_path])
    assert cells(text, "jcl")[-3:] == ["50.0", "60.0", "88.0"]
    assert "- moco/pretrain: failed on rank 3: loss is not finite" in text
    assert "- moco/linear: skipped, because moco/pretrain is not done" in text
    assert "- jcl" not in text


def test_command_line_writes_the_file(tmp_path: Path, capsys: pytest.CaptureFixture):
    pretrain(tmp_path / "jcl")
    assert report.main([str(tmp_path / "jcl"), "--output", str(tmp_path / "out.md")]) == 0
    assert (tmp_path / "out.md").read_text() in capsys.readouterr().out


def test_a_number_that_is_not_finite_is_named_and_not_shown(tmp_path: Path):
    config = pretrain(tmp_path / "jcl", *DIGITS)
    probe(tmp_path / "jcl/linear", config, float("nan"), recipe="SCE_small_100ep")
    found = detector_named()
    found["metrics"]["bbox"]["AP"] = float("inf")
    write(tmp_path / "d", found)
    text = render([tmp_path])
    assert cells(text, "jcl")[-3:] == ["50.0", "-", "88.0"] and cells(text, "d")[6:8] == ["-", "58.0"]
    assert f"- {tmp_path}/jcl/linear/results.json: metrics.top1 is not finite; '-' stands for it" in text
    assert f"- {tmp_path}/d/results.json: metrics.bbox.AP is not finite; '-' stands for it" in text
    assert "nan" not in text and "inf" not in text.replace("not finite", "")


@pytest.mark.parametrize("content", ["", "{}", '{"stage": "linear"}'])
def test_a_report_of_nothing_that_can_be_read_fails(tmp_path: Path, capsys: pytest.CaptureFixture, content: str):
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(UserError, match="no result could be read"):
        report.main([str(tmp_path)])
    assert f"- {tmp_path}/results.json " in capsys.readouterr().out
    pretrain(tmp_path / "jcl")
    assert report.main([str(tmp_path)]) == 0


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (".", "is a folder; name a file in it"),
        ("file/report.md", "cannot write file/report.md: Not a directory; choose another folder"),
        ("loop/report.md", "cannot write loop/report.md: Too many levels of symbolic links"),
        ("/proc/report.md", "cannot write /proc/report.md: "),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, output: str, message: str
):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("loop").symlink_to("loop")
    pretrain(tmp_path / "jcl")
    with pytest.raises(UserError, match=message):
        report.main([str(tmp_path), "--output", output])
    assert capsys.readouterr().out == ""


def test_runs_may_lie_below_a_folder_named_as_the_launchers(tmp_path: Path):
    write(tmp_path / "launch/a", detector_named())
    write(tmp_path / "launch/a/launch/20260101-000000-abcdef/code/b", detector_named())
    assert render([tmp_path / "launch"]).count("| a ") == 1


def test_nothing_to_report_is_said(tmp_path: Path):
    with pytest.raises(UserError, match=r"no results.json in"):
        render([tmp_path])
    with pytest.raises(UserError, match="is not a folder"):
        render([tmp_path / "absent"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"stage": "transfer", "metr', " is not JSON (Unterminated string"),
        (b"", " is not JSON (Expecting value"),
        (b"\xff\xfe", " is not JSON ('utf-8' codec can't decode"),
        (b"[" * 100_000, " is not JSON (nested too deeply)"),
        (b"[1]", " holds a JSON list, not an object"),
        (b"{}", " cannot be shown: it lacks 'stage'"),
        (b'{"stage": []}', " cannot be shown"),
        (b'{"stage": "transfer"}', " cannot be shown: it lacks 'protocol'"),
        (b'{"stage": "linear", "metrics": [1], "source": 3}', " cannot be shown"),
        (b'{"stage": "linear", "metrics": {"top1": "much"}, "source": {}}', " cannot be shown: top1 is 'much'"),
        (b'{"stage": "linear", "metrics": {"top1": 1}, "source": {}, "protocol": [3]}', " cannot be shown"),
        (b'{"stage": "pretrain", "metrics": [], "method": "jcl", "arch": []}', " cannot be shown"),
        (json.dumps(detector_named() | {"metrics": {"bbox": {"AP": "much"}}}).encode(), " cannot be shown"),
        (json.dumps(detector_named() | {"config": "a: [" * 5000}).encode(), " cannot be shown"),
        (json.dumps(detector_named() | {"weights": []}).encode(), ""),
    ],
)
def test_a_damaged_result_is_named_and_the_others_are_reported(tmp_path: Path, content: bytes, message: str):
    write(tmp_path / "a", detector_named())
    (tmp_path / "b").mkdir()
    (tmp_path / "b/results.json").write_bytes(content)
    shown = render([tmp_path])
    assert cells(shown, "a")[6] == "38.0"
    named = [line for line in shown.split("## Not read")[-1].splitlines() if line.startswith("- ")]
    assert [line.startswith(f"- {tmp_path / 'b' / 'results.json'}{message}") for line in named] == [True] or not message
    if message:
        assert "## Not read" in render([tmp_path / "b"])  # and there is nothing else to say of it


@pytest.mark.parametrize("content", [b"", b"\xff", b"[]", b'{"stages": 3}', b'{"stages": [[]]}', b"[" * 100_000])
@pytest.mark.parametrize("file", ["launch/pipeline.json", "a/launch/complete.json", "a/launch/ranks/0.failed"])
def test_damaged_records_of_the_launcher_hide_nothing(tmp_path: Path, file: str, content: bytes):
    pipeline(tmp_path, "a", "moco")
    write(tmp_path / "a", detector_named())
    (tmp_path / file).parent.mkdir(exist_ok=True, parents=True)
    (tmp_path / file).write_bytes(content)
    if file.startswith("a/launch/ranks"):
        (tmp_path / "a/launch/complete.json").unlink()
    text = render([tmp_path])
    assert cells(text, "a")[6] == "38.0"
    if file.startswith("launch"):
        assert f"- {tmp_path / file} " in text.split("## Not read")[1]
    else:
        assert "- a: " in text.split("## Not done")[1]


@pytest.mark.parametrize("content", [b"", b"\xff", b"[]", b"a: [", b"DATA: []", b"[" * 5000])
def test_a_damaged_config_is_named_and_its_run_is_shown(tmp_path: Path, content: bytes):
    pretrain(tmp_path / "jcl")
    (tmp_path / "jcl/config.yaml").write_bytes(content)
    text = render([tmp_path])
    assert column(text, "jcl", "kNN top-1") == "50.0" and column(text, "jcl", "seed") == "-"
    assert (f"- {tmp_path / 'jcl/config.yaml'}: " in text) == (content != b"DATA: []")


def test_a_path_that_is_not_utf8_prints(tmp_path: Path, capsys: pytest.CaptureFixture):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/runs\xff"))
    pretrain(tmp_path / "jcl", *DIGITS)
    folder.mkdir()
    (tmp_path / "jcl").rename(folder / os.fsdecode(b"jcl\xff"))  # a folder renamed later; a run refuses such a name
    write(folder / "bad|\nname", detector_named())
    (folder / "broken").mkdir()
    (folder / "broken/results.json").write_text("")
    output = folder / "report.md"
    assert report.main([str(folder), "--output", str(output)]) == 0
    text = output.read_text()
    assert cells(text, "jcl\\udcff")[1] == "jcl" and r"| bad\| name " in text
    assert f"- {tmp_path}/runs\\udcff/broken/results.json is not JSON" in text
    assert "written to" in capsys.readouterr().out
    empty = Path(os.fsdecode(os.fsencode(tmp_path) + b"/empty\xff"))
    empty.mkdir()
    with pytest.raises(UserError, match=r"no results\.json in .*empty\\udcff"):
        render([empty])
