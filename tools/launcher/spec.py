"""A stage as the launcher handles it: an importable entry point, its arguments as plain data, its run folder.

A stage runs again only if its work has changed. For example, the linear probe ``demo/jcl/linear`` has ``root`` demo,
``parents`` {"jcl/pretrain": "8a1f..."} and ``folders`` {"jcl/pretrain": "demo/jcl/pretrain"}. Its ``inputs`` are empty,
because another stage writes its weights; without a pipeline they would be {"run.pth": "sha256:..."}. Its ``identity``
contains the arguments, the keys that differ from their defaults, and ``parents``; its fingerprint is a hash of that,
which the stages that build on it record in turn. Moving demo changes neither.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import json
import os
import re
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pretrain import config as pretraining
from pretrain.common.config.keys import SAME_RESULT, Effect, Keys, compare
from pretrain.common.config.yaml_io import flatten, load_yaml
from pretrain.common.errors import UserError
from pretrain.common.files import check_name, describe_text, read_start, sha256
from pretrain.common.run.folder import read_stage
from pretrain.common.run.state import Job, read_record, read_state
from pretrain.common.weights import provenance
from pretrain.keys import list_keys
from transfer import config as fine_tuning
from transfer.keys import KEYS

from . import MOVED
from .arguments import TransferArguments

# The function that each stage calls. A record is only started again if it names one of these.
ENTRIES = {
    "pretrain": "pretrain.train:main",
    "linear": "pretrain.probe.linear:main",
    "knn": "pretrain.probe.knn:main",
    "embedding": "pretrain.probe.embedding:main",
    "convert": "tools.launcher.stages:run_conversion",
    "transfer": "tools.launcher.stages:run_fine_tuning",
    "data": "tools.make_data:main",
    "report": "tools.report:main",
}
# Effects of keys that may change when a stage is resumed; for pretraining, all: `check_same_run` compares its keys.
_MAY_CHANGE = {"pretrain": frozenset(Effect), "transfer": fine_tuning.SAME_STEPS}


@dataclass(frozen=True)
class StageSpec:
    """One stage. It is pickled for the job, and recorded in launch.json so that it can be started again.

    Attributes:
        stage: a name in `ENTRIES`.
        folder: the run folder, absolute.
        entry: ``"package.module:function"``; imported in the job, never pickled.
        config: resolved config as YAML text, or empty if the stage has none. It is the entry's first argument: as text
            for a transfer, else as the config that `pretrain.config` reads.
        args: further arguments.
        produces: a file that exists when the stage is complete, relative to ``folder``.
        one_process: True if the stage runs in a single process, whatever the options are.
        gpu: True if the stage uses GPUs.
        inputs: maps each weights file that the stage reads to its content (`hash_content`). The graph fills in the
            content, and removes weights that another of its stages writes.
        parents: fingerprints of the stages this one builds on, by name.
        folders: folders of the stages this one builds on, directly or not, by name.
        root: the folder that contains this stage and the ones it builds on (default: ``folder``).
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
        """Number of loader workers per process of the stage."""
        return _parse(self.config)["DATALOADER"]["NUM_WORKERS"] if self.config else 0

    def run(self, job: Job) -> Any:
        """Call the entry point in this process; one that can be stopped takes the ``job``."""
        module, name = self.entry.split(":")
        function = getattr(importlib.import_module(module), name)
        options = {"job": job} if "job" in inspect.signature(function).parameters else {}
        if not self.config:
            return function(*self.args, **options)
        if self.stage == "transfer":
            return function(self.config, *self.args, **options)
        return function(pretraining.from_yaml_text(self.config), *self.args, **options)

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """Identity of the stage's work, as JSON has it: arguments, config, and the stages it builds on.

        It omits what does not change the result: keys at their default (so that a key which a later version adds leaves
        complete work complete), keys that only affect where and how fast a stage runs, the location of ``root``, and
        the paths of weights (their content counts).
        """
        config = {key: self._make_relative(value) for key, value in self._list_changed_keys()}
        arguments = [self.stage, *self._make_relative(self.args)]
        return json.loads(json.dumps({"arguments": arguments, "config": config, "parents": self.parents}))

    def fingerprint(self) -> str:
        """Return a hash of `identity`."""
        return hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()[:16]

    def describe_changes(self, earlier: dict[str, Any], allowed: Collection[Effect] | None = None) -> str:
        """Describe how this stage differs from an ``earlier`` identity: ``"SOLVER.BASE_LR 0.03 -> 0.05"``.

        Args:
            allowed: effects of keys that are not named (default: of those that may change when a stage is resumed).
        """
        allowed = _MAY_CHANGE.get(self.stage, frozenset()) if allowed is None else allowed
        keys = _list_keys(self.stage)
        changes = [str(change) for change in compare(keys, earlier["config"], self.identity["config"], allowed)]
        arguments = [identity["arguments"] for identity in (earlier, self.identity)]
        if self.stage == "transfer":  # may get --visualize, but not another engine
            arguments = [TransferArguments.from_words(words[1]).describe_work() for words in arguments]
        if arguments[0] != arguments[1]:
            changes.append(f"arguments {arguments[0]} -> {arguments[1]}")
        parents = earlier["parents"]
        keys = sorted({*parents, *self.parents})
        changes += [f"{key} has changed" for key in keys if parents.get(key) != self.parents.get(key)]
        return "; ".join(changes)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> StageSpec:
        """Build the spec of a record."""
        try:
            return cls(**{**data, "args": tuple(data["args"])})
        except (TypeError, KeyError) as error:
            problem = "the stage record is damaged or from another version"
            raise UserError(f"{problem} ({error}); rerun the original command") from error

    def check_entry(self) -> None:
        """Check that a record's stage is one of this launcher, before it is started again."""
        if self.entry != ENTRIES.get(self.stage):
            remedy = f"run {MOVED[self.stage]}" if self.stage in MOVED else "rerun the original command"
            raise UserError(f"{self.entry!r} is not a known stage; {remedy}")

    def is_complete(self) -> bool:
        """Return whether exactly this work was completed, from the current checkpoint, and its product still exists."""
        product = Path(self.folder) / self.produces
        if not os.path.exists(product) or read_fingerprint(self.folder) != self.fingerprint():
            return False
        # A conversion records its source next to the weights.
        file = Path(f"{product}.json") if self.stage == "convert" else Path(self.folder) / "results.json"
        results = read_record(file)
        return all(is_made_from(results, Path(folder)) for folder in self.folders.values())

    def check_parents(self) -> None:
        """Check that the stages this one builds on are complete, as they were when it was submitted."""
        for key, fingerprint in self.parents.items():
            if key in self.folders and read_fingerprint(self.folders[key]) != fingerprint:
                state = f"not complete in {self.folders[key]} (cancelled, failed or changed)"
                raise UserError(f"{self.stage} builds on {key}, which is {state}; rerun the command that started both")

    def check_weights(self) -> None:
        """Check that there are weights to read, without reading all of them."""
        if self.stage in ("pretrain", "transfer") and self.has_checkpoint():  # resumes from its own checkpoint
            return
        for path, content in self.inputs.items():
            if not content:
                remedy = "set another file"
                if self.stage == "transfer":
                    remedy = "convert a run first (tools/convert_to_d2.py), or put the file there"
                raise UserError(f"no weights at {path}: neither a file nor a folder with a checkpoint; {remedy}")
            problem = describe_text(read_start(path)) if Path(path).is_file() else ""
            if problem:
                raise UserError(f"{path} contains no weights: {problem}; pass a run folder or a checkpoint")

    def has_checkpoint(self) -> bool:
        """Return whether the stage would resume from a checkpoint."""
        return any(any(Path(self.folder).glob(pattern)) for pattern in ("checkpoint_*.pth", "model_*.pth"))

    def _list_changed_keys(self) -> list[tuple[str, Any]]:
        """List the keys that are not at their default and may change the result."""
        if not self.config:
            return []
        keys = _list_keys(self.stage)
        free = pretraining.SAME_TRAINING if self.stage == "pretrain" else SAME_RESULT
        changes = compare(keys, {}, dict(flatten(_parse(self.config))), free)
        other_stages = {name for name, row in keys.items() if row.stage not in ("", self.stage)}
        return [(change.key, change.current) for change in changes if change.key not in other_stages]

    def _make_relative(self, value: Any) -> Any:
        """Replace paths of weights by their content, and ``root`` by a dot."""
        if isinstance(value, str):
            root = re.escape(self.root or self.folder)
            return self.inputs.get(value) or re.sub(rf"{root}(?=[/:]|$)", ".", value)
        if isinstance(value, (list, tuple)):
            return [self._make_relative(item) for item in value]
        if isinstance(value, dict):
            return {key: self._make_relative(item) for key, item in value.items()}
        return value


def read_fingerprint(folder: str | Path) -> str:
    """Read the fingerprint of the work that was completed in a folder; it is empty if there is none."""
    state = read_state(folder)
    return state.get("fingerprint", "") if state.get("state") == "complete" else ""


def is_made_from(results: dict[str, Any], run: Path) -> bool:
    """Return False if ``results`` name a checkpoint that is not the final one of the pretraining run folder ``run``.

    Every result counts as made from a folder that is not a pretraining run's.
    """
    if read_stage(run) != "pretrain":
        return True
    final = read_record(run / "results.json").get("checkpoint_sha256", "none")
    return provenance.is_made_from(results, final)


def hash_content(weights: str) -> str:
    """Return ``sha256:...`` of a weights file, or of the checkpoint of a run folder; it is empty if there is none."""
    path = Path(weights)
    if os.path.isdir(path):  # pathlib's functions raise if the name is too long
        checkpoints = [*path.glob("checkpoint_*.pth"), *path.glob("model_*.pth")]
        if len(checkpoints) > 1:  # finding the newest valid one means reading them, which needs torch
            from transfer.weights.convert import open_source

            checkpoints = [open_source(path).path]
        path = checkpoints[0] if checkpoints else path
    if not os.path.isfile(path):
        return ""
    stat = path.stat()
    return _hash_file(path.absolute(), stat.st_size, stat.st_mtime_ns)


@functools.cache
def _hash_file(path: Path, _size: int, _mtime_ns: int) -> str:
    return f"sha256:{sha256(path)}"


def _list_keys(stage: str) -> Keys:
    return KEYS if stage == "transfer" else list_keys()


@functools.lru_cache(maxsize=32)
def _parse(text: str) -> dict[str, Any]:
    """Parse a config. The result is cached, because a pipeline parses the same configs repeatedly."""
    return load_yaml(text)
