"""The report: what stands beside what, and what is never put together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pretrain.common.errors import UserError
from tools import report


def write(folder: Path, data: dict[str, Any], config: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(data))
    if config:
        (folder / "config.yaml").write_text(config)


IMAGENET = "DATA: {TRAIN: imagenet}\nMODEL: {ARCH: resnet50}\n"


def pretrained(method: str, epochs: float = 200.0) -> dict[str, Any]:
    return {"stage": "pretrain", "method": method, "arch": "resnet50", "epochs": epochs, "metrics": {"knn_top1": 50.0}}


def linear(top1: float) -> dict[str, Any]:
    return {"stage": "linear", "source": {"method": "jcl", "arch": "resnet50"}, "metrics": {"top1": top1, "top5": 88.0}}


def detector(engine: str = "detectron2", schedule: str = "1x", method: str = "jcl", **change: Any) -> dict[str, Any]:
    return {
        "stage": "transfer",
        "engine": {"name": engine, "version": "0.6"},
        "metrics": {
            "bbox": {"AP": 38.0, "AP50": 58.0, "AP75": None},
            "segm": {"AP": 36.0, "AP50": 56.0, "AP75": 38.0},
        },
        "protocol": {
            "detector": "mask", "backbone": "R50-FPN", "norm": "SyncBN", "heads": "0conv2fc",
            "train": ["coco_2017_train"], "test": ["coco_2017_val"], **change,
        },
        "schedule": {"iterations": 90000, "steps": [], "images_per_batch": 16, "base_lr": 0.02, "name": schedule},
        "weights": {"path": "w.pth", "sha256": "0123456789abcdef", "provenance": {"method": method}} if method else {},
    }  # fmt: skip


def cells(text: str, first: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {first} ")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_probes_stand_beside_table_1(tmp_path: Path):
    write(tmp_path / "jcl", pretrained("jcl"), IMAGENET)
    write(tmp_path / "jcl/linear", linear(68.0), IMAGENET)
    text = report.render([tmp_path / "jcl"])
    assert cells(text, "jcl") == ["jcl", "jcl", "resnet50", "200", "50.0", "68.0", "88.0", "68.7", "-0.7"]


def test_another_protocol_is_not_compared(tmp_path: Path):
    write(tmp_path / "jcl", pretrained("jcl", epochs=3), IMAGENET)
    write(tmp_path / "jcl/linear", linear(68.0), IMAGENET)
    text = report.render([tmp_path / "jcl"])
    assert cells(text, "jcl") == ["jcl", "jcl", "resnet50", "3", "50.0", "68.0", "88.0"]
    assert "paper" not in text


def test_detectors_stand_beside_table_2_in_the_papers_task_only(tmp_path: Path):
    write(tmp_path / "coco_mask_jcl", detector())
    write(tmp_path / "coco_mask_random", detector(method=""))
    text = report.render([tmp_path / "coco_mask_jcl", tmp_path / "coco_mask_random"])
    # Table 2's mask numbers are Mask R-CNN's, its box numbers Faster R-CNN's: box AP has no counterpart here.
    assert cells(text, "coco_mask_jcl") == [
        "coco_mask_jcl", "01234567", "38.0", "58.0", "-", "36.0", "56.0", "38.0",
        "35.6 (+0.4)", "56.2 (-0.2)", "38.3 (-0.3)",
    ]  # fmt: skip
    assert cells(text, "coco_mask_random")[1] == "random"
    assert cells(text, "coco_mask_random")[-3:] == ["28.5 (+7.5)", "46.8 (+9.2)", "30.4 (+7.6)"]


@pytest.mark.parametrize(
    "other", [detector("torchvision"), detector(schedule="2x"), detector(heads="4conv1fc BN"), detector(test=["other"])]
)
def test_engines_schedules_heads_and_data_never_share_a_table(other: dict[str, Any], tmp_path: Path):
    write(tmp_path / "a", detector())
    write(tmp_path / "b", other)
    text = report.render([tmp_path / "a", tmp_path / "b"])
    assert text.count("| initialisation ") == 2
    assert len({line for line in text.splitlines() if line.startswith("Engine ")}) == 2


def test_another_engine_beside_the_paper_is_marked(tmp_path: Path):
    write(tmp_path / "a_jcl", detector("torchvision"))
    assert "The paper's engine is Detectron2, this table's is not." in report.render([tmp_path / "a_jcl"])
    write(tmp_path / "a_jcl", detector("detectron2"))
    assert "this table's is not" not in report.render([tmp_path / "a_jcl"])


def test_a_pipelines_branches_are_rows_and_its_failures_are_told(tmp_path: Path):
    stages = [
        ("jcl/pretrain", "pretrain", []), ("jcl/linear", "linear", ["jcl/pretrain"]),
        ("moco/pretrain", "pretrain", []), ("moco/linear", "linear", ["moco/pretrain"]),
    ]  # fmt: skip
    listed = [
        {"key": key, "stage": stage, "folder": str(tmp_path / key), "parents": parents, "produces": "results.json",
         "fingerprint": key}
        for key, stage, parents in stages
    ]  # fmt: skip
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch/pipeline.json").write_text(json.dumps({"stages": listed}))
    for key in ("jcl/pretrain", "jcl/linear"):
        write(tmp_path / key, pretrained("jcl") if key.endswith("pretrain") else linear(60.0))
        (tmp_path / key / "launch").mkdir()
        (tmp_path / key / "launch/complete.json").write_text(json.dumps({"fingerprint": key}))
    failed = tmp_path / "moco/pretrain/launch/ranks"
    failed.mkdir(parents=True)
    (failed / "7.0.failed").write_text(json.dumps({"rank": 3, "error": "loss is not finite"}))
    text = report.render([tmp_path])
    assert cells(text, "jcl")[-2:] == ["60.0", "88.0"]
    assert "- moco/pretrain: failed on rank 3: loss is not finite" in text
    assert "- moco/linear: left out, moco/pretrain is not done" in text
    assert "- jcl" not in text


def test_command_line_writes_the_file(tmp_path: Path, capsys: pytest.CaptureFixture):
    write(tmp_path / "jcl", pretrained("jcl"))
    assert report.main([str(tmp_path / "jcl"), "--output", str(tmp_path / "out.md")]) == 0
    assert (tmp_path / "out.md").read_text() in capsys.readouterr().out


def test_nothing_to_report_is_said(tmp_path: Path):
    with pytest.raises(UserError, match=r"no results.json in"):
        report.render([tmp_path])
    with pytest.raises(UserError, match="is not a folder"):
        report.render([tmp_path / "absent"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"stage": "transfer", "metr', "is half-written or no JSON"),
        ("[1]", "holds a list"),
        ('{"stage": "transfer"}', "is no result of a stage: it lacks 'protocol'"),
        ('{"stage": "linear", "metrics": [1], "source": 3}', "is no result of a stage"),
        (json.dumps(detector() | {"metrics": {"bbox": {"AP": "much"}}}), "is no result of a stage"),
    ],
)
def test_a_spoilt_file_is_named_and_the_others_are_reported(tmp_path: Path, text: str, message: str):
    write(tmp_path / "a", detector())
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "results.json").write_text(text)
    shown = report.render([tmp_path])
    assert cells(shown, f"{tmp_path.name}/a")[2] == "38.0"
    (line,) = [line for line in shown.splitlines() if line.startswith("- ")]
    assert line.startswith(f"- {tmp_path / 'b' / 'results.json'} {message}")
    assert "## Not read" in report.render([tmp_path / "b"])


@pytest.mark.parametrize("key", ["datasets", "metrics"])
def test_each_test_set_has_its_own_numbers(tmp_path: Path, key: str):
    sets = {"coco_2017_val": {"bbox": {"AP": 38.0}}, "other_val": {"bbox": {"AP": 11.0}}}
    write(tmp_path / "a_jcl", detector(test=list(sets)) | {key: sets})
    first, second = report.render([tmp_path / "a_jcl"]).split("## ")[1:]
    assert "-> coco_2017_val." in first and cells(first, "a_jcl")[2] == "38.0" and "Paper" in first
    assert "-> other_val." in second and cells(second, "a_jcl")[2] == "11.0" and "Paper" not in second


def test_flat_numbers_are_those_of_the_first_set(tmp_path: Path):
    write(tmp_path / "a", detector(test=["coco_2017_val", "other_val"]))
    shown = report.render([tmp_path / "a"])
    assert shown.count("| initialisation ") == 1 and "-> coco_2017_val." in shown
