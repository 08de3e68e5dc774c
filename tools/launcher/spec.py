"""A stage, as the launcher handles it: an importable entry point, its arguments as plain data, its run folder."""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from pretrain import config as pretraining
from pretrain.common.config.yaml_io import flatten
from pretrain.common.errors import UserError
from pretrain.common.files import check_name, empty_or_text, read_json, sha256, write_json
from pretrain.common.run.folder import stage_of
from transfer import config as fine_tuning

ROOT = Path(__file__).resolve().parents[2]
# What each stage calls. A record is only started again if it names one of these.
ENTRIES = {
    "pretrain": "pretrain.train:main",
    "linear": "pretrain.probe.linear:main",
    "knn": "pretrain.probe.knn:main",
    "embedding": "pretrain.probe.embedding:main",
    "distributions": "pretrain.probe.distributions:main",
    "convert": "tools.convert_to_d2:main",
    "transfer": "tools.launcher.stages:fine_tune",
    "data": "tools.make_data:main",
    "report": "tools.report:main",
}
_READ_BY = {"LINEAR.": "linear"}  # sections that a single stage reads
# Prefixes of keys with which a stage may go on; "": `check_same_run` compares them.
_MAY_CHANGE = {"pretrain": ("",), "transfer": ("SOLVER.MAX_ITER", "SOLVER.STEPS", "DATASETS.TEST", "TEST.")}


@dataclass(frozen=True)
class StageSpec:
    """One stage's work. It is pickled for the job, and recorded in launch.json so that it can be started again.

    Attributes:
        stage: a name in `ENTRIES`.
        folder: the run folder, absolute.
        entry: ``"package.module:function"``; imported in the job, never pickled.
        config: resolved config as YAML text, the entry's first argument; empty: none. A transfer's entry gets the text
            (Detectron2's keys), other entries the config that `pretrain.config` reads.
        args: further arguments.
        produces: a file that the stage leaves when it is complete, relative to ``folder``.
        one_process: runs in a single process, whatever the options are.
        gpu: uses GPUs; False: gets none.
        inputs: weights that are read, by path, and their content as `content_of` names it; empty until a graph has
            looked at those that no stage before this one makes.
        parents: fingerprints of the stages this one builds on, by name.
        folders: of the stages this one builds on, directly or not, by name.
        root: the folder that holds this stage and the ones it builds on; empty: ``folder``.
    """

    stage: str
    folder: str
    entry: str
    config: str = ""
    args: tuple[Any, ...] = ()
    produces: str = "results.json"
    one_process: bool = False
    gpu: bool = True
    inputs: dict[str, str] = field(default_factory=dict)
    parents: dict[str, str] = field(default_factory=dict)
    folders: dict[str, str] = field(default_factory=dict)
    root: str = ""

    def __post_init__(self) -> None:
        check_name(self.folder, "OUTPUT_DIR")  # a line break would become a line of the sbatch script

    @property
    def workers(self) -> int:
        """The processes that read images for each process of the stage."""
        return _parsed(self.config)["DATALOADER"]["NUM_WORKERS"] if self.config else 0

    def run(self) -> Any:
        """Calls the entry point in this process."""
        module, name = self.entry.split(":")
        function = getattr(importlib.import_module(module), name)
        if not self.config:
            return function(*self.args)
        if self.stage == "transfer":
            return function(self.config, *self.args)
        return function(pretraining.from_yaml_text(self.config), *self.args)

    @functools.cached_property
    def work(self) -> dict[str, Any]:
        """What this stage computes, as JSON has it: arguments, config, and the stages it builds on.

        It omits what does not change the result: keys at their default (so that a key which a later version adds leaves
        complete work complete), keys that only affect where and how fast a stage runs, the location of ``root``, and
        the paths of weights (their content counts).
        """
        config = {key: self._placeless(value) for key, value in self._changed_keys()}
        work = {"arguments": [self.stage, *self._placeless(self.args)], "config": config, "parents": self.parents}
        return json.loads(json.dumps(work))

    def fingerprint(self) -> str:
        """Identity of `work`."""
        return hashlib.sha256(json.dumps(self.work, sort_keys=True).encode()).hexdigest()[:16]

    def changes(self, then: dict[str, Any]) -> str:
        """How this work differs from an earlier one that it may continue: ``"SOLVER.BASE_LR 0.03 -> 0.05"``.

        Keys that a resumed stage may change are not named.
        """
        now, changes, defaults = self.work, [], _defaults(self.stage)
        for key in sorted({*then["config"], *now["config"]}):
            values = [work["config"].get(key, defaults.get(key)) for work in (then, now)]
            if values[0] != values[1] and not key.startswith(_MAY_CHANGE.get(self.stage, ())):
                changes.append(f"{key} {values[0]!r} -> {values[1]!r}")
        arguments = [then["arguments"], now["arguments"]]
        if self.stage == "transfer":  # which may get --visualize, but not another engine
            arguments = [words[:3] for _, words in arguments]
        if arguments[0] != arguments[1]:
            changes.append(f"arguments {arguments[0]} -> {arguments[1]}")
        parents = sorted({*then["parents"], *now["parents"]})
        changes += [f"{key} has changed" for key in parents if then["parents"].get(key) != now["parents"].get(key)]
        return "; ".join(changes)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> StageSpec:
        """The spec of a record."""
        try:
            return cls(**{**data, "args": tuple(data["args"])})
        except (TypeError, KeyError) as error:
            what = "the record of a stage is damaged, or of another version"
            raise UserError(f"{what} ({error}); start the stage by its own command") from error

    def check_entry(self) -> None:
        """Checks that a record's stage is one of this launcher, before it is started again."""
        if self.entry != ENTRIES.get(self.stage):
            raise UserError(f"{self.entry!r} is not a stage of this launcher; start the stage by its own command")

    def mark_complete(self) -> None:
        """Records that exactly this work was completed in the folder."""
        path = Path(self.folder) / "launch" / "complete.json"
        for unfinished in path.parent.glob(f".{path.name}.*.tmp*"):  # by one that was killed
            unfinished.unlink(missing_ok=True)
        write_json(path, {"fingerprint": self.fingerprint(), "work": self.work})

    def is_complete(self) -> bool:
        """True if exactly this work was completed here, with the present checkpoint, and its product still exists."""
        product = Path(self.folder) / self.produces
        if not os.path.exists(product) or _completed(self.folder) != self.fingerprint():
            return False
        # A conversion records its source next to the weights.
        results = read_record(
            Path(f"{product}.json") if self.stage == "convert" else Path(self.folder) / "results.json"
        )
        return all(is_made_from(results, Path(folder)) for folder in self.folders.values())

    def check_parents(self) -> None:
        """Checks that the stages this one builds on are complete, as they were when it was submitted."""
        for key, fingerprint in self.parents.items():
            if key in self.folders and _completed(self.folders[key]) != fingerprint:
                raise UserError(
                    f"{self.stage} builds on {key}, which is not complete in {self.folders[key]} (cancelled, failed or "
                    "changed); run the command that started them again"
                )

    def check_weights(self) -> None:
        """Checks that there are weights to read, without reading all of them."""
        if self.stage in ("pretrain", "transfer") and self.has_checkpoint():  # it goes on from its own
            return
        for path, content in self.inputs.items():
            if not content:
                remedy = "name another"
                if self.stage == "transfer":
                    remedy = "convert a run first (tools/convert_to_d2.py), or put the file there"
                raise UserError(f"no weights at {path}: neither a file nor a folder with a checkpoint; {remedy}")
            if Path(path).is_file() and (what := empty_or_text(Path(path))):
                raise UserError(f"{path} holds no weights: {what}; name a run folder or a checkpoint")

    def has_checkpoint(self) -> bool:
        """True if the stage would resume from a checkpoint."""
        return any(any(Path(self.folder).glob(pattern)) for pattern in ("checkpoint_*.pth", "model_*.pth"))

    def _changed_keys(self) -> list[tuple[str, Any]]:
        """The keys that are not at their default and may change the result."""
        if not self.config:
            return []
        of_stage = {"transfer": fine_tuning.FREE_ANYWHERE, "pretrain": pretraining.FREE_ON_RESUME}
        free = of_stage.get(self.stage, pretraining.FREE_ANYWHERE)
        others = tuple(prefix for prefix, stage in _READ_BY.items() if stage != self.stage)
        defaults, keys = _defaults(self.stage), flatten(_parsed(self.config))
        return [
            (key, value) for key, value in keys if value != defaults.get(key) and not key.startswith((*free, *others))
        ]

    def _placeless(self, value: Any) -> Any:
        if isinstance(value, str):
            root = re.escape(self.root or self.folder)
            return self.inputs.get(value) or re.sub(rf"{root}(?=[/:]|$)", ".", value)
        if isinstance(value, (list, tuple)):
            return [self._placeless(item) for item in value]
        if isinstance(value, dict):
            return {key: self._placeless(item) for key, item in value.items()}
        return value


def _completed(folder: str) -> str:
    """The fingerprint of the work that was completed in a folder; empty: none."""
    return read_record(Path(folder) / "launch" / "complete.json").get("fingerprint", "")


def is_made_from(results: dict[str, Any], pretraining: Path) -> bool:
    """False if ``results`` name the checkpoint that they were made from, and it is not the final one of a run folder.

    True where the folder is not that of a pretraining.
    """
    if stage_of(pretraining) != "pretrain":
        return True
    final = read_record(pretraining / "results.json").get("checkpoint_sha256", "none")
    text = json.dumps(results)
    return final in text or '"source_sha256": "' not in text


def read_record(path: Path) -> dict[str, Any]:
    """The JSON object in a file of the launcher, or {} if it is missing or damaged: it must not stop a job."""
    try:
        return read_json(path)
    except UserError:
        return {}


def content_of(weights: str) -> str:
    """``sha256:...`` of a weights file, or of the checkpoint that is read in a run folder; empty: there is none."""
    path = Path(weights)
    if os.path.isdir(path):  # pathlib's raise where the name is too long
        checkpoints = [*path.glob("checkpoint_*.pth"), *path.glob("model_*.pth")]
        if len(checkpoints) > 1:  # which is the newest good one is in the files; reading them takes torch
            from transfer.weights.convert import open_source

            checkpoints = [open_source(path).path]
        path = checkpoints[0] if checkpoints else path
    if not os.path.isfile(path):
        return ""
    stat = path.stat()
    return _sha256(path.absolute(), stat.st_size, stat.st_mtime_ns)


@functools.cache
def _sha256(path: Path, _size: int, _mtime_ns: int) -> str:
    return f"sha256:{sha256(path)}"


def _defaults(stage: str) -> dict[str, Any]:
    config = fine_tuning if stage == "transfer" else pretraining
    return dict(flatten(_parsed(config.default_config().dump())))


@functools.lru_cache(maxsize=32)
def _parsed(text: str) -> dict[str, Any]:
    """A config from its YAML text; a pipeline asks for the same ones again and again."""
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
