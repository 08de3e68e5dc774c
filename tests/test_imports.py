"""The packages import one another without cycles, and only downward."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = [
    path.relative_to(ROOT) for folder in ("pretrain", "transfer", "tools") for path in (ROOT / folder).rglob("*.py")
]
MODULES = {".".join(path.with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}


def imported_modules(module: str) -> Iterator[str]:
    """Yield what a module imports when it is imported."""
    path = MODULES[module]
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                name = f"{source}.{alias.name}"
                yield name if name in MODULES else source


def test_no_module_imports_itself_through_others():
    graph = {module: {name for name in imported_modules(module) if name in MODULES} for module in MODULES}
    assert "pretrain.common.errors" in graph["tools.launcher.graphs.start"]
    assert "tools.launcher.commands" in graph["tools.launch"]
    tuple(TopologicalSorter(graph).static_order())  # raises CycleError, which names the modules
