"""Every recipe states its command, hardware and published result; every file that a recipe names exists."""

import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from docs import citing, costs, recipes
from pretrain.common.config.yaml_io import flatten, read_settings
from pretrain.config import load_config
from tools.reporting import paper_tables
from transfer.config import load_config as load_detector_config

pytestmark = pytest.mark.docs
ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"


def header(path: Path) -> str:
    """Return the comment lines above the first key."""
    return "".join(line for line in path.read_text().splitlines(keepends=True) if line.startswith("#"))


RECIPES = [path for path in sorted(CONFIGS.rglob("*.yaml")) if "Not run by itself." not in header(path)]  # and plans


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_names_its_command_hardware_time_and_published_result(path: Path) -> None:
    text = header(path)
    commands = re.findall(r"^#   (?:make|python (?:tools/launch|transfer/train_net)\.py) .+$", text, re.MULTILINE)
    name = str(path.relative_to(ROOT))
    method = f"--method {path.name.split('_')[0]}"
    assert any(name in command or command.endswith(method) for command in commands), text
    for field in ("Hardware", "Time", "Published"):
        lines = re.findall(rf"^# {field}: (\S.*)\.$", text, re.MULTILINE)
        assert len(lines) == 1 or (not lines and field == "Time"), field


def test_the_number_of_a_header_is_that_of_its_row() -> None:
    checked = 0
    for file in sorted((CONFIGS / "papers").glob("*.csv")):
        _, rows = paper_tables.read_table(file)
        for row in rows:
            number = row.get("AP") or row.get("top1")
            recipe = ROOT / (row.get("recipe") or row["pretrain"])
            if recipe.is_file() and number and (not row.get("overrides") or is_the_recipes_own(row)):
                assert re.search(rf"^# Published: .*\b{number}\b.*{file.name}", header(recipe), re.MULTILINE), recipe
                assert "launch.py linear" in header(recipe) or "recipe" in row, recipe
                checked += 1
    assert checked == 3 + 12 + 4 + 4 + 4  # JCL's tables, those on VOC, SCE's best cells, TCL's first table


def is_the_recipes_own(row: Mapping[str, str]) -> bool:
    """Return whether a row is the recipe itself; SCE's table names both temperatures even then."""
    if "recipe" in row:  # a detector's row, whose ``pretrain`` is no file
        return False
    return load_config(row["pretrain"], row["overrides"].split()) == load_config(row["pretrain"])


# Recipes that stay although they differ in two keys or fewer: the first command line of the README and its sisters, a
# detector with a custom head, a published method, and the two methods that the demo compares.
_NEAR = {
    ("coco_R50_FPN_1x", "coco_R50_FPN_1x_jcl"),
    ("coco_mask_R50_FPN_1x", "coco_mask_R50_FPN_1x_jcl"),
    ("coco_keypoint_R50_FPN_1x", "coco_keypoint_R50_FPN_1x_jcl"),
    ("coco_R50_FPN_1x", "coco_mask_R50_FPN_1x"),
    ("densecl_R50_IN1k_200ep", "mocov2_R50_IN1k_200ep"),
    ("demo_jcl_R18_digits", "demo_mocov2_R18_digits"),
}


def test_recipes_differ_in_more_than_two_keys() -> None:
    """A variant of one or two keys should be a command with overrides, or a row of a table in configs/papers."""
    configs: dict[str, dict[str, Any]] = {}
    for path in RECIPES:
        sections = {key.partition(".")[0] for key in read_settings(path)}
        if {"DATA", "DATASETS"} & sections and "BRANCHES" not in sections:
            load = load_detector_config if "DATASETS" in sections else load_config
            configs[path.stem] = dict(flatten(load(path)))
    near = {
        (a, b)
        for a, b in itertools.combinations(sorted(configs), 2)
        if sum(configs[a].get(key) != configs[b].get(key) for key in configs[a].keys() | configs[b].keys()) <= 2
    }
    assert near == _NEAR


def test_every_config_file_that_is_named_exists() -> None:
    texts = [
        ROOT / "README.md",
        *(ROOT / "docs").glob("*.md"),
        *CONFIGS.rglob("*.*"),
        *(ROOT / "tools").rglob("*.py"),
        *(ROOT / "benchmarks").rglob("*.py"),
        *(ROOT / "transfer").rglob("*.py"),
    ]
    named = {name for path in texts for name in re.findall(r"configs/[\w/.-]+\.(?:yaml|csv)", path.read_text())}
    assert len(named) > 50
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


def test_the_page_of_costs_is_current() -> None:
    """If this fails after a recipe or the model of cost has changed, run `make docs`."""
    assert (ROOT / "docs" / "costs.md").read_text() == costs.markdown()


def test_the_page_of_citations_is_current_and_whole() -> None:
    """If this fails after CITATION.cff has changed, run `make docs`."""
    page = (ROOT / "docs" / "citing.md").read_text()
    assert page == citing.markdown()
    names = ("MoCo", "MoCo v2", "JCL", "SCE", "ReSSL", "TCL", "SupCon", "SimCLR", "DenseCL", "Detectron2")
    assert [name for name in names if f"\n## {name}\n" not in page] == []


def test_the_table_of_recipes_is_current_and_whole() -> None:
    """If this fails after a recipe has changed, run `make docs`."""
    page = (ROOT / "docs" / "recipes.md").read_text()
    assert page == recipes.markdown()
    of_papers = [path for path in RECIPES if path.parent.name != "examples"]
    assert [path.stem for path in of_papers if f"](../{path.relative_to(ROOT)})" not in page] == []
