"""What a stage is: options, config, run folder, checks, what it runs, and the scores that it leaves.

A stage runs again only if its work has changed. For example, the linear probe ``demo/jcl/linear`` has ``root`` demo,
``parents`` {"jcl/pretrain": "8a1f..."} and ``folders`` {"jcl/pretrain": "demo/jcl/pretrain"}. Its ``inputs`` are empty,
because another stage writes its weights; without a pipeline they would be {"run.pth": "sha256:..."}. Its ``identity``
contains the arguments, the keys that differ from their defaults, and ``parents``; its fingerprint is a hash of that,
which the stages that build on it record in turn. Moving demo changes neither.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pretrain import config as pretraining
from pretrain import keys
from pretrain.common.config.keys import SAME_RESULT, Effect, Key, Keys
from pretrain.common.config.yaml_io import dump
from pretrain.common.files import check_output_path
from pretrain.common.run import file_names
from pretrain.common.run.folder import find_checkpoints
from pretrain.common.run.state import RunContext, read_json_or_empty, read_working_folder
from pretrain.common.shell import find_working_folder
from pretrain.data.names import resolve

from .identity import compute_identity, parse_config

if TYPE_CHECKING:
    from tools.estimates.model import Estimate
    from tools.estimates.published import Gpu
    from tools.reporting.files import Run
    from tools.reporting.paper_tables import Candidate
    from tools.reporting.runs import Score


@dataclass(frozen=True)
class Stage:
    """The work of one run folder. A subclass is a kind of stage, whose attributes and methods say what it does.

    It is written to a file for the job, and recorded in launch.json so that it can be started again.

    Attributes:
        folder: the run folder, absolute.
        options: the stage's `Options`; paths are absolute.
        config: resolved config as YAML text, or empty if the stage has none.
        inputs: maps each weights file that the stage reads to its content (`inputs.hash_content`). The graph fills in
            the content, and removes weights that another of its stages writes.
        parents: fingerprints of the stages this one builds on, by name.
        folders: folders of the stages this one builds on, directly or not, by name.
        root: the folder that contains this stage and the ones it builds on (default: ``folder``).

        name: the name of the kind, in records, results and commands.
        gpu: whether the stage uses GPUs.
        one_process: whether it runs in a single process, whatever the resources are.
        most_minutes: time limit that suffices for it (`limit_minutes`); a stage that trains for hours has none.
        has_config: whether KEY VALUE pairs override its config.
        trains_backbone: whether others build on the checkpoint that it trains for hours.
        makes_data: whether stages that build on it may read images that do not exist yet.
        records_state: whether `run` writes state.json itself; otherwise `rank_main.run_stage` does on rank 0.
        probe: name of the probe that its scores are of, in a table; empty if they are of none.
        metrics: the metrics of its scores that a table shows.
        feature_map: the file with a map of features that it writes, if any.
        may_change: effects of keys that may change when the stage is resumed.
        without_effect: effects of keys that do not change what the stage computes.
        remedy: what to do if its weights do not exist.
    """

    @dataclass(frozen=True)
    class Options:
        """The options of the stage's command; each is an `options.option`."""

    folder: str
    options: Any = field(default_factory=Options)
    config: str = ""
    inputs: dict[str, str] = field(default_factory=dict)
    parents: dict[str, str] = field(default_factory=dict)
    folders: dict[str, str] = field(default_factory=dict)
    root: str = ""

    name: ClassVar[str]
    gpu: ClassVar[bool] = True
    one_process: ClassVar[bool] = False
    most_minutes: ClassVar[int] = sys.maxsize
    has_config: ClassVar[bool] = True
    trains_backbone: ClassVar[bool] = False
    makes_data: ClassVar[bool] = False
    records_state: ClassVar[bool] = False
    probe: ClassVar[str] = ""
    metrics: ClassVar[tuple[str, ...]] = ("top1",)
    feature_map: ClassVar[str] = ""
    may_change: ClassVar[frozenset[Effect]] = frozenset()
    without_effect: ClassVar[frozenset[Effect]] = SAME_RESULT
    remedy: ClassVar[str] = "put it there, or set another file"

    def __post_init__(self) -> None:
        check_output_path(self.folder, "OUTPUT_DIR")  # a line break would become a line of the sbatch script

    # What a kind of stage says about itself.

    @classmethod
    def load(cls, options: Any, overrides: Sequence[str] = ()) -> Self:
        """Build the stage of a command line: read its config, resolve paths, and check what can be checked here."""
        raise NotImplementedError

    @classmethod
    def load_command(cls, options: Any, overrides: Sequence[str] = ()) -> Stage:
        """Load the stage that a user started by its command; it may print what was chosen."""
        return cls.load(options, overrides)

    def run(self, context: RunContext) -> Any:
        """Do the work in this process, which may be one of several ranks."""
        raise NotImplementedError

    @property
    def product(self) -> str:
        """The file that exists when the stage is complete."""
        return str(Path(self.folder, file_names.RESULTS))

    @property
    def arguments(self) -> list[Any]:
        """What the identity contains besides config and parents: the name, and options that change the result.

        Its form never changes, or complete work would not be found again.
        """
        changed = {item.name: getattr(self.options, item.name) for item in fields(self.options)}
        changed = {name: value for name, value in changed.items() if value != getattr(type(self.options), name, None)}
        return [self.name, changed] if changed else [self.name]

    def describe_work(self, arguments: list[Any]) -> list[Any]:
        """Return the part of the identity's ``arguments`` that may not change when the stage is resumed."""
        return arguments

    @staticmethod
    def list_keys() -> Keys:
        return keys.list_keys()

    @staticmethod
    def describe_keys() -> list[Key]:
        return keys.describe_keys()

    @functools.cached_property
    def cfg(self) -> Any:
        """The config, parsed and frozen."""
        return pretraining.from_yaml_text(self.config)

    @classmethod
    def from_config(cls, cfg: Any, folder: str, options: Any, inputs: dict[str, str]) -> Self:
        """Build the stage of a config that has been parsed, with ``folder`` as its OUTPUT_DIR."""
        cfg.defrost()
        cfg.OUTPUT_DIR = folder
        cfg.freeze()
        stage = cls(folder, options, dump(cfg), inputs)
        vars(stage)["cfg"] = cfg  # where `cfg` caches what it would parse from the text
        return stage

    def check(self, world_size: int, *, starts_later: bool) -> None:
        """Raise UserError for what the stage would refuse with this number of processes, whatever the data are.

        Args:
            starts_later: it waits for SLURM or for other stages, so a check that takes long is worth its time.
        """

    def list_data(self) -> list[str]:
        """List the names of what `check_data` checks."""
        return []

    def list_relative_names(self) -> list[str]:
        """List the data and weights that are others if the stage works in another folder."""
        folder = find_working_folder()
        data = [name for name in filter(None, self.list_data()) if self.resolve_name(name, folder) != name]
        weights = self.inputs if self.reads_weights() else []
        return [*data, *(path for path in weights if not os.path.isabs(path))]

    @staticmethod
    def resolve_name(name: str, folder: str) -> str:
        """Return a name of `list_data` with the paths that are relative to ``folder`` made absolute."""
        return resolve(name, folder)

    def check_data(self, reads_weights: bool) -> None:
        """Raise UserError if data do not exist, or the weights that the config names although the stage reads them."""

    def check_counts(self) -> None:
        """Raise UserError if the data, which exist on this machine, do not suffice."""

    def estimate(self, gpu: Gpu, count: int) -> Estimate | None:
        """Estimate what the stage costs on ``count`` GPUs of a type; return None if nobody knows."""
        return None

    @property
    def weights_address(self) -> str:
        """The URL of the weights that are downloaded before the stage starts, if any."""
        return ""

    def reads_weights(self) -> bool:
        """Return whether the stage would read its ``inputs``; one that continues from its checkpoint does not."""
        return True

    def check_same_run(self) -> None:
        """Raise UserError if the run folder records another config, in words that name the keys."""

    def name_next_command(self, folder: str) -> str:
        """Return the command that usually follows, which is printed when the only stage of a command here is complete.

        It is empty if there is none; ``folder`` is the run folder, as displayed.
        """
        return ""

    @classmethod
    def find_final_checkpoint(cls, folder: Path) -> str | None:
        """Return the SHA-256 of the checkpoint that results of ``folder`` are made from, or None if any may be."""
        return None

    @classmethod
    def read_config(cls, folder: Path) -> str:
        """Return the config of a run as YAML text, which a probe of its weights starts from; "" if there is none.

        Names that are relative to the folder that the run was started in are found from this one, too.
        """
        file = folder / file_names.CONFIG
        if not file.is_file():
            return ""
        text = file.read_text(encoding="utf-8", errors="replace")
        started_in = read_working_folder(folder)
        return text if started_in in ("", find_working_folder()) else pretraining.resolve_paths(text, started_in)

    @classmethod
    def read_scores(cls, run: Run) -> list[Score]:
        """Return the scores of a run; KeyError, TypeError, AttributeError or ValueError if results.json is damaged."""
        return []

    @classmethod
    def compare_with_papers(cls, score: Score) -> Iterable[Candidate]:
        """Yield the rows of published tables that a score may be compared with."""
        return ()

    @classmethod
    def upgrade(cls, record: dict[str, Any]) -> dict[str, Any]:
        """Return a record whose arguments were a list as one with options."""
        names = {item.name for item in fields(Stage)} | {"stage"}
        values = {name: value for name, value in record.items() if name in names}
        return {**values, "options": cls.upgrade_arguments(*record["args"])}

    @classmethod
    def upgrade_arguments(cls, *arguments: Any) -> dict[str, Any]:
        """Return the options of which an earlier version recorded these ``arguments``."""
        return {}

    # What follows from it, for every kind.

    def limit_minutes(self, gpus: int) -> int:
        """Return a time limit that suffices on this number of GPUs in all; 0 is for CPUs."""
        return self.most_minutes

    @property
    def workers(self) -> int:
        """Number of loader workers per process of the stage."""
        return parse_config(self.config)["DATALOADER"]["NUM_WORKERS"] if self.config else 0

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """Identity of the stage's work, as JSON has it: arguments, config, and the stages it builds on."""
        return compute_identity(self)

    def fingerprint(self) -> str:
        """Return a hash of `identity`."""
        return hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        return {"stage": self.name, **asdict(self)}

    def read_results(self) -> dict[str, Any]:
        """Read the record of what the product was made from; it is empty if there is none."""
        return read_json_or_empty(Path(self.folder, file_names.RESULTS))

    def has_checkpoint(self) -> bool:
        """Return whether the run folder contains a checkpoint."""
        return bool(find_checkpoints(self.folder))
