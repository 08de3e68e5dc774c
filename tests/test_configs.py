"""Every recipe says how to run it, what it needs and what is published; every file that a recipe names exists."""

from __future__ import annotations

import csv
import re
import shlex
from pathlib import Path

import pytest
import yaml

from tools import make_data
from tools.reporting import recipes
from transfer.config import load_config as load_detector_config

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
PRETRAIN = [path for path in sorted((CONFIGS / "pretrain").glob("*.yaml")) if not path.name.startswith("Base-")]
RECIPES = [*sorted(CONFIGS.glob("*.yaml")), *PRETRAIN, *sorted(CONFIGS.glob("linear/*.yaml"))]
PLANS = [*sorted((CONFIGS / "pipeline").rglob("*.yaml")), *sorted((CONFIGS / "pretrain" / "sweeps").glob("*.yaml"))]
FRAGMENTS = sorted({*CONFIGS.rglob("*.yaml")} - {*RECIPES, *PLANS})


def header(path: Path) -> str:
    """The comment lines above the first key."""
    return "".join(line for line in path.read_text().splitlines(keepends=True) if line.startswith("#"))


@pytest.mark.parametrize("path", [*RECIPES, *PLANS], ids=lambda path: path.stem)
def test_a_recipe_names_its_command_hardware_time_and_published_result(path: Path) -> None:
    text = header(path)
    commands = re.findall(r"^#   (?:make|python (?:tools/launch|transfer/train_net)\.py) .+$", text, re.MULTILINE)
    name = str(path.relative_to(ROOT))
    method = f"--method {path.name.split('_')[0]}"
    assert any(name in command or command.endswith(method) for command in commands), text
    for field in ("Hardware", "Time", "Published"):
        assert len(re.findall(rf"^# {field}: \S.*\.$", text, re.MULTILINE)) == 1, field


@pytest.mark.parametrize("path", FRAGMENTS, ids=lambda path: path.stem)
def test_a_fragment_says_so_and_is_used(path: Path) -> None:
    assert "Not run by itself." in header(path)
    bases = {base.resolve() for recipe in RECIPES for base in bases_of(recipe)}
    assert path.resolve() in bases


def bases_of(path: Path) -> list[Path]:
    base = yaml.safe_load(path.read_text()).get("_BASE_", [])
    return [path.parent / name for name in (base if isinstance(base, list) else [base])]


def test_every_config_file_that_is_named_exists() -> None:
    texts = [
        ROOT / "README.md",
        *(ROOT / "docs").glob("*.md"),
        *CONFIGS.rglob("*.*"),
        *(ROOT / "tools").rglob("*.py"),
        *(ROOT / "transfer").rglob("*.py"),
    ]
    named = {name for path in texts for name in re.findall(r"configs/[\w/.-]+\.(?:yaml|csv)", path.read_text())}
    assert len(named) > 50
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


def test_the_table_of_recipes_is_current_and_whole() -> None:
    """After a recipe has changed: make docs."""
    page = (ROOT / "docs" / "recipes.md").read_text()
    assert page == recipes.markdown()
    assert [path.stem for path in (*RECIPES, *PLANS) if f"](../{path.relative_to(ROOT)})" not in page] == []


def test_the_page_of_the_papers_names_tests_that_exist() -> None:
    page = (ROOT / "docs" / "papers.md").read_text()
    tests = "".join(path.read_text() for path in (ROOT / "tests" / "pretrain").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)(?:\.\.\.)?`", page))
    assert len(named) > 8 and [name for name in sorted(named) if f"def {name}" not in tests] == []
    files = set(re.findall(r"`((?:methods/|probe/)?test_\w+\.py)`", page)) | set(
        re.findall(r"`(pretrain/[\w/]+\.\w+)`", page)
    )
    assert [f for f in sorted(files) if not ((ROOT / "tests/pretrain" / f).is_file() or (ROOT / f).is_file())] == []
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| Item")]
    assert len(rows) > 40 and all(cell.strip() for row in rows for cell in re.split(r"(?<!\\)\|", row)[1:-1])


def test_a_published_result_stands_in_the_header_or_in_the_table_of_its_paper() -> None:
    rows = []
    for file in sorted((CONFIGS / "papers").glob("*.csv")):
        rows += csv.DictReader(line for line in file.read_text().splitlines() if not line.startswith("#"))
    tabled = {Path(row.get("recipe") or row["pretrain"]).stem for row in rows if row["pretrain"]}
    assert len(tabled) == 15 + 3 + 3 + 4 + 4  # JCL's detectors, MoCo's on VOC; JCL, SCE, TCL
    for path in RECIPES:
        published = re.findall(r"^# Published: (.+)$", header(path), re.MULTILINE)[0]
        assert (path.stem not in tabled) or ("configs/papers/" in published and not re.search(r"\d\.\d", published))


def test_the_quick_demo_has_the_demos_stages() -> None:
    demo, quick = (
        yaml.safe_load((CONFIGS / "pipeline" / f"{name}.yaml").read_text()) for name in ("demo", "demo_quick")
    )
    changed = {key for key in quick if quick[key] != demo.get(key)}
    assert changed == {"OUTPUT_DIR", "DATA", "OVERRIDES", "TRANSFER_OVERRIDES"} and set(demo) <= set(quick)
    data = make_data._parser().parse_args(shlex.split(quick["DATA"])).output
    detector = load_detector_config(ROOT / quick["TRANSFER"]["mask"], shlex.split(quick["TRANSFER_OVERRIDES"]))
    for name in (*shlex.split(quick["OVERRIDES"])[1:2], *detector.DATASETS.TRAIN, *detector.DATASETS.TEST):
        assert f":{data}/" in name


def test_the_demo_is_the_one_that_was_measured() -> None:
    """A shorter fine-tuning, on more scenes, ends before it can tell pretrained weights from random ones."""
    plan = yaml.safe_load((CONFIGS / "pipeline" / "demo.yaml").read_text())
    data = make_data._parser().parse_args(plan["DATA"])
    detector = load_detector_config(ROOT / plan["TRANSFER"]["mask"], [])
    solver = detector.SOLVER
    assert (data.scenes, solver.MAX_ITER, [*solver.STEPS], solver.IMS_PER_BATCH) == (100, 300, [240], 4)
    assert data.output in detector.DATASETS.TRAIN[0] and data.output in detector.DATASETS.TEST[0]
