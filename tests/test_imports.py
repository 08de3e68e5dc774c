"""The packages import one another without cycles, and only downward."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [
    path.relative_to(ROOT)
    for folder in ("pretrain", "transfer", "tools", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
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
    assert "pretrain.common.errors" in graph["tools.launcher.graphs.checks"]
    assert "tools.launcher.commands" in graph["tools.launch"]
    tuple(TopologicalSorter(graph).static_order())  # raises CycleError, which names the modules


# Imports each module, for the second time, since other libraries change the process when they are imported first.
IMPORT_AGAIN = """
import importlib, logging, os, signal, sys

def state():
    loggers = [logging.root, *map(logging.getLogger, sorted(logging.root.manager.loggerDict))]
    return {
        "sys.path": list(sys.path),
        "signal handlers": [signal.getsignal(number) for number in signal.valid_signals()],
        "blocked signals": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "logging handlers": [(logger.name, list(logger.handlers)) for logger in loggers if logger.handlers],
        "environment": dict(os.environ),
    }

is_without_detectron2, *modules = sys.argv[1:]
if is_without_detectron2 == "True":
    sys.modules["detectron2"] = None
for module in modules:
    importlib.import_module(module)
for name in [name for name in sys.modules if name.split(".")[0] in ("pretrain", "transfer", "detectron2")]:
    del sys.modules[name]
for module in modules:
    before = state()
    importlib.import_module(module)
    after = state()
    for name in before:
        if before[name] != after[name]:
            print(module, "changes", name, before[name], after[name])
"""


@pytest.mark.parametrize("without_detectron2", [True, pytest.param(False, marks=pytest.mark.detectron2)])
def test_importing_the_packages_changes_nothing_else(without_detectron2: bool) -> None:
    """Neither sys.path nor handlers nor the environment: a notebook imports them beside its own modules."""
    modules = [module for module in MODULES if module.split(".")[0] in ("pretrain", "transfer")]
    if without_detectron2:
        modules = [module for module in modules if ".detectron2_engine" not in module]
    command = [sys.executable, "-c", IMPORT_AGAIN, str(without_detectron2), *modules]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done
