"""The files a report is made of: every run's results.json, in the pipeline's order where there is one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from pretrain.common.errors import UserError

Result = tuple[str, Path, dict[str, Any]]  # the row's name, the run folder, results.json


def find_results(folders: Iterable[Path]) -> Iterable[Result | str]:
    """Every run's result, or a line that says which file is none.

    Raises:
        UserError: a folder that does not exist.
    """
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder")
        order = [Path(stage["folder"]) for stage in read_json(folder / "launch" / "pipeline.json").get("stages", [])]
        found = [path.parent for path in sorted(folder.glob("**/results.json")) if "launch" not in path.parts]
        found.sort(key=lambda run: order.index(run.absolute()) if run.absolute() in order else len(order))
        for run in found:
            try:
                data: Any = json.loads((run / "results.json").read_text())
            except (OSError, ValueError) as error:
                yield f"{run / 'results.json'} is half-written or no JSON: {error}"
                continue
            if not isinstance(data, dict):
                yield f"{run / 'results.json'} holds a {type(data).__name__}, not the result of a stage"
                continue
            inside = run.relative_to(folder).parts
            # A pipeline's layout is branch/stage; a single run's probes lie in the run.
            name = inside[0] if order and inside else str(folder.name if not inside else Path(folder.name, *inside))
            if not order and data.get("stage") in ("knn", "linear") and len(inside) >= 1:
                name = str(Path(folder.name, *inside[:-1]))
            yield name, run, data


def read_json(path: Path) -> dict[str, Any]:
    """A file's object; {} where there is none or no good one."""
    try:
        found: Any = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def read_yaml(path: Path) -> dict[str, Any]:
    """A file's mapping; {} where there is none or no good one."""
    try:
        found: Any = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}
