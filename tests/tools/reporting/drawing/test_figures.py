"""The figure of a pipeline's detectors is drawn from the files of their runs; if it fails, the report is complete."""

import json
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest

from tests.tools.reporting.runs import DIGITS, cells, detector, pipeline, pretrain, probe, write
from tests.transfer import tiny_coco
from tools import report
from tools.reporting.document import render_markdown
from tools.reporting.drawing import figures
from tools.reporting.drawing.page import render_page
from transfer.coco.reading import read_annotations

BRANCHES = ("random", "tcl", "jcl")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a finished pipeline, which was moved; TCL's detector finds everything, the others find nothing."""
    name = tiny_coco.write(tmp_path / "data")
    truth = json.loads((tmp_path / "data/annotations.json").read_text())["annotations"]
    pipeline(tmp_path / "before", *(f"{branch}/mask" for branch in BRANCHES))
    for branch in BRANCHES:
        results = detector("DATASETS.TEST", str((name,))) | {"predictions": {name: "predictions.json"}}
        write(tmp_path / "before" / branch / "mask", results)
        predictions = [record | {"score": 0.8} for record in truth if branch == "tcl"]
        (tmp_path / "before" / branch / "mask/predictions.json").write_text(json.dumps(predictions))
    return (tmp_path / "before").rename(tmp_path / "p")


def columns_of(figure: Path) -> list[np.ndarray]:
    """Return the images of each column, without titles; the ground truth comes first."""
    canvas = cv2.imread(str(figure))
    assert canvas is not None
    rows = canvas.reshape(4, 28 + 360, -1, 360 + 4, 3)[:, 28:]
    return [rows[:, :, column, :360] for column in range(rows.shape[2])]


def test_branches_stand_side_by_side(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    output = folder / "my report.md"
    assert report.main([str(folder), "--output", str(output)]) == 0
    figure = folder / "my report_mask.png"
    assert capsys.readouterr().out.endswith(")\nfigure: my report_mask.png\nreport: my report.md\n")
    text = output.read_text()
    assert "ground truth, random, tcl, jcl" in text and "## Unreadable files" not in text
    assert text.endswith("\n![predictions of mask](my%20report_mask.png)\n")
    truth, random, tcl, jcl = columns_of(figure)
    assert (random == jcl).all() and (random != tcl).any() and (random != truth).any()
    assert report.main([str(folder), "--output", "page.html"]) == 0
    assert "![" not in capsys.readouterr().out  # there is no file that the text could show
    outside_labels = (tcl != truth).any(axis=3).mean()  # a prediction's label has its score
    assert outside_labels < 0.03 < (tcl != random).any(axis=3).mean()


@pytest.mark.parametrize("lost", ["p/jcl/mask/predictions.json", "data/1.png"])
def test_a_lost_file_is_one_line_and_costs_the_figure_alone(folder: Path, lost: str):
    (folder.parent / lost).unlink()
    shown = report.build_report([folder], folder / "report.md")
    text = render_markdown(shown)
    (line,) = [line for line in text.split("## Unreadable files")[1].splitlines() if line.startswith("- ")]
    assert line.startswith("- the predictions of mask are not drawn: ") and lost in line and shown.figures == []
    assert [cells(text, f"{branch}/mask")[2] for branch in BRANCHES] == ["38.0"] * 3


def test_pipelines_and_test_sets_have_a_figure_each(folder: Path):
    sets = [tiny_coco.write(folder.parent / name) for name in ("data", "more")]
    for branch in BRANCHES[:2]:
        path = folder / branch / "mask/results.json"
        content = json.loads(path.read_text())
        content["datasets"] = dict.fromkeys(sets, content["metrics"])
        path.write_text(json.dumps(content | {"predictions": dict.fromkeys(sets, "predictions.json")}))
    shutil.copytree(folder, folder.parent / "q")
    files = [figure.file for figure in report.build_report([folder, folder.parent / "q"], folder / "all.md").figures]
    names = [f"all_{which}.png" for which in ("p_mask", "p_mask_2", "q_mask", "q_mask_2")]
    assert [file.name for file in files] == names
    assert [len(columns_of(file)) for file in files] == [4, 3, 4, 3]


def test_predictions_that_do_not_exist_are_not_drawn(folder: Path):
    (shown,) = report.build_report([folder], folder / "report.md").figures
    assert "Empty, because nothing is predicted: random, jcl." in shown.notes[0]
    (folder / "tcl/mask/predictions.json").write_text("[]")
    text = render_markdown(report.build_report([folder], folder / "report.md"))
    assert "- Predictions of mask: no detector predicts anything on these images.\n" in text
    assert "![predictions" not in text and "Unreadable" not in text


def test_the_legend_of_feature_maps_has_the_classes_of_every_branch():
    figure = figures._draw_panels({"a": {"cat": [(0, 1)]}, "b": {"_dog": [(2, 3)]}}, {"a": None, "b": 50.0})
    assert [text.get_text().strip() for text in figure.legends[0].texts] == ["_dog", "cat"]


def test_the_report_begins_with_the_feature_maps_of_branches(tmp_path: Path):
    plan = tmp_path / "p"
    pipeline(plan, *(f"{branch}/{stage}" for branch in BRANCHES for stage in ("knn", "embedding")))
    config = pretrain(tmp_path / "other", *DIGITS)
    for number, branch in enumerate(BRANCHES):
        probe(plan / branch / "knn", config, 50.0 + number)
        write(plan / branch / "embedding", {"stage": "embedding"})
        points = "".join(f"{x},{number},{x % 3}\n" for x in range(6))
        (plan / branch / "embedding/embedding.csv").write_text(f"x,y,label\n{points}")
    shown = report.build_report([plan], plan / "report.html")
    (figure,) = shown.feature_maps
    assert figure.file == plan / "report_features.png" and figure.file.stat().st_size > 1000
    text = render_markdown(shown)
    assert text.index("report_features.png") < text.index("| run")
    page = render_page(shown, plan / "report.html")
    assert page.index("features of random, tcl, jcl") < page.index("<table>")
    (plan / "jcl/embedding/embedding.csv").unlink()
    shown = report.build_report([plan], plan / "report.html")
    (line,) = shown.collection.unreadable
    assert shown.feature_maps == [] and "embedding.csv cannot be read" in line and len(shown.scores) == 3


def test_the_compared_images_are_the_first_with_an_object(tmp_path: Path) -> None:
    content = read_annotations(tiny_coco.write(tmp_path).split(":")[1])
    content["images"].reverse()
    content["annotations"] = [record for record in content["annotations"] if record["image_id"] != 2]
    assert [image["id"] for image in figures.select_annotated(content, 3)] == [1, 3, 4]
    assert [image["id"] for image in figures.select_annotated(content, 9)] == [1, 3, 4, 5]  # the last has none
