"""The notebooks run from top to bottom, with very little training; their stored outputs are those of a whole run."""

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import pretrain
import transfer
from tests.snippets import ROOT
from tools import make_data

pytestmark = pytest.mark.docs
NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))
FEWER_IMAGES = ["--images", "70", "--val-images", "60", "--scenes", "6", "--val-scenes", "4"]
PRETRAINING = {"SOLVER.MAX_STEPS": 2, "SOLVER.IMS_PER_BATCH": 16, "MODEL.QUEUE_SIZE": 32}
FINE_TUNING = {"SOLVER.MAX_ITER": 2, "SOLVER.STEPS": [], "SOLVER.IMS_PER_BATCH": 2, "TEST.PRECISE_BN.NUM_ITER": 1}


def read_cells(notebook: Path, kind: str) -> list[dict[str, Any]]:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [{**cell, "source": "".join(cell["source"])} for cell in cells if cell["cell_type"] == kind]


def test_first_hour_ends_with_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    monkeypatch.setattr(sys, "path", [*sys.path])
    make, train, tune = make_data.main, pretrain.pretrain, transfer.fine_tune
    monkeypatch.setattr(make_data, "main", lambda words: make([*words, *FEWER_IMAGES]))
    monkeypatch.setattr(pretrain, "pretrain", lambda file, keys: train(file, keys | PRETRAINING))
    monkeypatch.setattr(transfer, "fine_tune", lambda file, keys, **options: tune(file, keys | FINE_TUNING, **options))
    variables: dict[str, Any] = {}
    for cell in read_cells(ROOT / "docs/notebooks/first_hour.ipynb", "code"):
        exec(cell["source"], variables)
    assert Path.cwd() == tmp_path
    assert variables["grid"].size == (6 * 40, 2 * 40) and variables["picture"].size == (3 * 140, 128)
    report = (tmp_path / "runs/first_hour/report.md").read_text()
    assert re.search(r"\| mocov2/mask +\| mocov2 \|", report) and re.search(r"\| random/mask +\| random \|", report)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_short_plain_and_has_its_outputs(notebook: Path) -> None:
    text = notebook.read_text(encoding="utf-8")
    assert len(text) < 400_000
    assert not re.search(r"/(root|home|work|tmp|usr|opt)/", text), "a path of one machine"
    cells = read_cells(notebook, "code")
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]  # of one run, in order
    assert [cell["source"] for cell in cells if "print(" in cell["source"] and not cell["outputs"]] == []
    assert sum(not cell["outputs"] for cell in cells) <= 2
    for cell in cells:
        assert cell["source"].count("\n") < 12, cell["source"]
        ast.parse(cell["source"])  # plain Python: no magic
        assert {output["output_type"] for output in cell["outputs"]} <= {"stream", "execute_result", "display_data"}


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_links_of_a_notebook_lead_to_pages(notebook: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)", "".join(cell["source"] for cell in read_cells(notebook, "markdown")))
    assert links and [link for link in links if not (notebook.parent / link).is_file()] == []
