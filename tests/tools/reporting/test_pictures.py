"""The picture of a pipeline's detectors: drawn from what their runs keep, and never at the report's expense."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest

from tests.tools.reporting.runs import cells, detector, pipeline, provenance, write
from tests.tools.reporting.runs import pretrain as pretrained
from tests.transfer import tiny_coco
from tools import report
from tools.reporting.document import markdown

BRANCHES = ("random", "tcl", "jcl")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A finished pipeline with a detector; TCL's finds everything, the others' find nothing."""
    name = tiny_coco.write(tmp_path / "data")
    truth = json.loads((tmp_path / "data/annotations.json").read_text())["annotations"]
    config = pretrained(tmp_path / "elsewhere")
    pipeline(tmp_path / "p", *(f"{branch}/mask" for branch in BRANCHES))
    for branch in BRANCHES:
        weights = None if branch == "random" else provenance(config, method=branch)
        found = detector("DATASETS.TEST", str((name,)), weights=weights)
        write(tmp_path / "p" / branch / "mask", found | {"predictions": {name: "inference/x/found.json"}})
        file = predictions_of(tmp_path / "p", branch)
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps([record | {"score": 0.8} for record in truth if branch == "tcl"]))
    return tmp_path / "p"


def rendered(folders: list[Path], output: Path) -> tuple[str, list[Path]]:
    """The Markdown, and the files of the pictures."""
    content = report.gather(folders, output)
    assert content.is_readable
    return markdown(content), [picture.file for picture in content.pictures]


def predictions_of(folder: Path, branch: str) -> Path:
    return folder / branch / "mask/inference/x/found.json"


def not_read(text: str) -> list[str]:
    return [line for line in text.split("## Not read")[-1].splitlines() if line.startswith("- ")]


def columns_of(picture: Path) -> list[np.ndarray]:
    """What is below the titles of each column: ground truth first."""
    canvas = cv2.imread(str(picture))
    assert canvas is not None
    rows = canvas.reshape(4, 28 + 360, -1, 360 + 4, 3)[:, 28:]
    return [rows[:, :, column, :360] for column in range(rows.shape[2])]


def test_branches_stand_side_by_side(folder: Path, capsys: pytest.CaptureFixture[str]):
    output = folder / "my report.md"
    assert report.main([str(folder), "--output", str(output)]) == 0
    picture = folder / "my report_mask.png"
    assert capsys.readouterr().out.endswith(f")\npicture: {picture}\nreport: {output}\n")
    text = output.read_text()
    assert "ground truth, random, tcl, jcl" in text and "## Not read" not in text
    assert text.endswith("\n![predictions of mask](my%20report_mask.png)\n")
    truth, random, tcl, jcl = columns_of(picture)
    assert (random == jcl).all() and (random != tcl).any() and (random != truth).any()
    outside_labels = (tcl != truth).any(axis=3).mean()  # a prediction's label has its score
    assert outside_labels < 0.03 < (tcl != random).any(axis=3).mean()


def test_a_pipeline_that_was_moved_keeps_its_picture(folder: Path):
    shutil.move(folder, folder.parent / "moved")
    output = folder.parent / "report.md"
    text, (picture,) = rendered([folder.parent / "moved"], output)
    assert "## Not read" not in text and len(columns_of(picture)) == 4 and picture == folder.parent / "report_mask.png"


@pytest.mark.parametrize("content", [None, ""])
def test_a_damaged_file_costs_its_column_only(folder: Path, content: str | None):
    file = predictions_of(folder, "jcl")
    file.unlink() if content is None else file.write_text(content)
    text, (picture,) = rendered([folder], folder / "report.md")
    (line,) = not_read(text)
    assert line.startswith("- the predictions of jcl are not in the picture of mask: ") and str(file) in line
    assert cells(text, "jcl/mask")[2] == "38.0" and len(columns_of(picture)) == 3


@pytest.mark.parametrize("lost", ["annotations.json", "1.png"])
def test_a_picture_that_cannot_be_made_is_one_line(folder: Path, lost: str):
    (folder.parent / "data" / lost).unlink()
    text, pictures = rendered([folder], folder / "report.md")
    (line,) = not_read(text)
    assert line.startswith("- the predictions of mask are not drawn: ") and lost in line
    assert not pictures and "![" not in text
    assert [cells(text, f"{branch}/mask")[2] for branch in BRANCHES] == ["38.0"] * 3


def test_pipelines_and_test_sets_have_a_picture_each(folder: Path):
    sets = [tiny_coco.write(folder.parent / name) for name in ("data", "more")]
    for branch in BRANCHES[:2]:
        path = folder / branch / "mask/results.json"
        content = json.loads(path.read_text())
        content["datasets"] = dict.fromkeys(sets, content["metrics"])
        path.write_text(json.dumps(content | {"predictions": dict.fromkeys(sets, "inference/x/found.json")}))
    shutil.copytree(folder, folder.parent / "q")
    _, pictures = rendered([folder, folder.parent / "q"], folder / "all.md")
    assert [picture.name for picture in pictures] == [f"all_{which}.png" for which in (
        "p_mask", "p_mask_2", "q_mask", "q_mask_2"
    )]  # fmt: skip
    assert [len(columns_of(picture)) for picture in pictures] == [4, 3, 4, 3]
