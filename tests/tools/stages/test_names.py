"""A stage's name is compared in the stage's own file alone: everybody else asks the stage."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
NAMES = {"pretrain", "knn", "linear", "embedding", "convert", "transfer", "evaluation", "data", "report"}
# Comparisons with a word that is no stage there.
OTHER_MEANINGS = {
    "pretrain/methods/__init__.py": 1,  # a schedule
    "pretrain/common/ranks/process_group.py": 1,  # a package
    "pretrain/common/run/progress.py": 1,  # a package
    "transfer/trial/culprit.py": 1,  # a package
    "tools/launcher/graphs/paper_pipeline.py": 2,  # columns of a table
}


def find_comparisons(tree: ast.AST) -> Iterator[int]:
    """Yield the line of each comparison, loop or table over names of stages."""
    for node in ast.walk(tree):
        match node:
            case ast.Compare(left=left, comparators=others):
                values = [value for value in (left, *others) if list_names(value)]
            case ast.For(iter=value) | ast.comprehension(iter=value) | ast.MatchValue(value=value):
                values = [value] if list_names(value) else []
            case ast.Dict(keys=keys):
                values = [key for key in keys if key and list_names(key)][1:]
            case _:
                values = []
        if values:
            yield values[0].lineno


def list_names(node: ast.expr) -> list[str]:
    """List the names of stages in a text, or in a tuple, list or set of texts."""
    values = node.elts if isinstance(node, (ast.Tuple, ast.List, ast.Set)) else [node]
    return [str(value.value) for value in values if isinstance(value, ast.Constant) and value.value in NAMES]


def test_nobody_compares_the_name_of_a_stage_but_its_own_file():
    found: dict[str, list[int]] = {}
    for package in ("pretrain", "transfer", "tools"):
        for file in sorted((ROOT / package).rglob("*.py")):
            lines = list(find_comparisons(ast.parse(file.read_text(encoding="utf-8"))))
            if lines and file.parent != ROOT / "tools" / "stages":
                found[str(file.relative_to(ROOT))] = lines
    for file, count in OTHER_MEANINGS.items():
        assert len(found.pop(file)) == count, file
    assert found == {}
