"""What a stage is to the launcher: an importable entry point, its arguments as plain data, its run folder."""

from __future__ import annotations

import hashlib
import importlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Keys that change where or how fast a stage runs, not what it computes.
_FREE_KEYS = ("OUTPUT_DIR", "DEVICE", "DATA.ROOT", "DATA.DOWNLOAD", "DATALOADER.NUM_WORKERS", "SOLVER.LOG_PERIOD")


@dataclass(frozen=True)
class StageSpec:
    """One stage's work. It travels to the job by pickle and stands in launch.json, so that it can be started again.

    Attributes:
        stage: pretrain, linear, knn, convert, transfer, ... (names it to people; nothing else).
        folder: the run folder, absolute.
        entry: ``"package.module:function"``; imported in the job, never pickled.
        config: resolved config of `pretrain.config` as YAML text, the entry's first argument; empty: none.
        args: further arguments.
        produces: a file the stage leaves when it is done, relative to ``folder``.
        one_process: runs in a single process, whatever was asked for.
        gpu: has use for GPUs; False: gets none.
    """

    stage: str
    folder: str
    entry: str
    config: str = ""
    args: tuple[Any, ...] = ()
    produces: str = "results.json"
    one_process: bool = False
    gpu: bool = True

    def run(self) -> Any:
        """Calls the entry point in this process."""
        module, name = self.entry.split(":")
        function = getattr(importlib.import_module(module), name)
        if not self.config:
            return function(*self.args)
        from pretrain.config import from_yaml_text

        return function(from_yaml_text(self.config), *self.args)

    def fingerprint(self, parents: tuple[str, ...] = ()) -> str:
        """Identity of what this stage computes, with that of the stages it builds on; paths of output do not count.

        Keys at their default do not count either: a key that a later version adds leaves finished work finished.
        """
        lines = [line for line in _changed_lines(self.config) if not line.startswith(_FREE_KEYS)]
        args = [str(arg).replace(self.folder, "FOLDER") for arg in self.args]
        text = json.dumps([self.entry, lines, args, sorted(parents)])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> StageSpec:
        return cls(**{**data, "args": tuple(data["args"])})

    def mark_complete(self, fingerprint: str) -> None:
        """Says that the folder holds the finished work of ``fingerprint``."""
        from pretrain.common.run_folder import write_json

        write_json(Path(self.folder) / "launch" / "complete.json", {"fingerprint": fingerprint})

    def is_complete(self, fingerprint: str) -> bool:
        """True if this very work was finished in the folder before, and its product is still there."""
        found = read_json(Path(self.folder) / "launch" / "complete.json")
        return found.get("fingerprint") == fingerprint and (Path(self.folder) / self.produces).exists()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or an empty one where the file is missing or damaged."""
    try:
        return json.loads(path.read_text())
    except (OSError, json.JSONDecodeError):
        return {}


def _changed_lines(config: str) -> list[str]:
    if not config:
        return []
    from pretrain.common.config_io import flatten
    from pretrain.config import default_config, from_yaml_text

    defaults = dict(flatten(default_config()))
    found = sorted(flatten(from_yaml_text(config)))
    return [f"{key} {value!r}" for key, value in found if value != defaults[key]]
