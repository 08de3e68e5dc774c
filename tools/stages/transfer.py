"""Fine-tuning of a detector."""

from __future__ import annotations

import functools
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pretrain.common.config import yaml_io
from pretrain.common.config.keys import Key, Keys
from pretrain.common.errors import UserError
from pretrain.common.run.state import RunContext
from transfer import api, keys, preflight, run_folder
from transfer import config as fine_tuning
from transfer.coco.names import resolve

from .base import Stage
from .options import option
from .registry import find_kind, register

if TYPE_CHECKING:
    from tools.estimates.model import Estimate
    from tools.estimates.published import Gpu
    from tools.reporting.files import Run
    from tools.reporting.paper_tables import Candidate
    from tools.reporting.runs import Score

_OPTIONS = {"--engine": "engine", "--visualize": "visualize", "OUTPUT_DIR": "output"}  # word of a record -> option


@register
class Transfer(Stage):
    name = run_folder.TRAINING
    records_state = True
    may_change = fine_tuning.SAME_STEPS
    remedy = "convert a run first (tools/convert_to_d2.py), or put the file there"
    mode: ClassVar[str] = "--resume"

    @dataclass(frozen=True)
    class Options:
        config_file: str = option("Detectron2 YAML", metavar="FILE")
        engine: str = option("detectron2 or torchvision (default: Detectron2 if it is installed)", "")
        eval_only: bool = option("evaluate MODEL.WEIGHTS, a fine-tuned detector", False)
        visualize: int = option("draw the predictions on N test images (default: 0)", 0, type=int, metavar="N")

    @classmethod
    def load(cls, options: Options, overrides: Sequence[str] = ()) -> Self:
        """Load the fine-tuning of a Detectron2 YAML, in OUTPUT_DIR or runs/<config file>.

        The YAML is read immediately, so that later edits do not change a queued job.
        """
        engine = _choose_installed_engine() if options.engine in ("", "auto") else options.engine
        preflight.check_engine_name(engine)
        cfg = fine_tuning.load_config(options.config_file, overrides)
        is_named = "OUTPUT_DIR" in overrides or cfg.OUTPUT_DIR != fine_tuning.default_config().OUTPUT_DIR
        output = Path(cfg.OUTPUT_DIR if is_named else f"runs/{Path(options.config_file).stem}").absolute()
        weights = cfg.MODEL.WEIGHTS
        inputs = {weights: ""} if weights and "://" not in weights else {}
        stage = cls(str(cls.place(output)), replace(options, engine=engine), fine_tuning.dump(cfg), inputs)
        yaml_io.copy_places(cfg, stage.cfg)
        return stage

    @classmethod
    def load_command(cls, options: Options, overrides: Sequence[str] = ()) -> Stage:
        return (find_kind("evaluation") if options.eval_only else cls).load(options, overrides)

    @staticmethod
    def list_keys() -> Keys:
        return keys.KEYS

    @staticmethod
    def describe_keys() -> list[Key]:
        return keys.describe_keys()

    @functools.cached_property
    def cfg(self) -> Any:
        return fine_tuning.from_yaml_text(self.config, ["OUTPUT_DIR", self.folder])

    @classmethod
    def place(cls, output: Path) -> Path:
        """Return the run folder for an OUTPUT_DIR."""
        return output

    def run(self, context: RunContext) -> None:
        api.start(self._prepare(), context)

    def _prepare(self, world_size: int | None = None) -> api.Run:
        options = {"eval_only": self.options.eval_only, "visualize": self.options.visualize}
        resume = not self.options.eval_only
        return api.prepare(self.cfg, self.options.engine, world_size, resume=resume, **options)

    def check(self, world_size: int, *, starts_later: bool) -> None:
        run = self._prepare(world_size)
        if starts_later:
            api.try_config(run)

    def list_data(self) -> list[str]:
        return [*self.cfg.DATASETS.TRAIN, *self.cfg.DATASETS.TEST]

    @staticmethod
    def resolve_name(name: str, folder: str) -> str:
        return resolve(name, folder)

    def check_data(self, reads_weights: bool) -> None:
        preflight.check_inputs(self.cfg, eval_only=self.options.eval_only, reads_weights=reads_weights)

    @property
    def weights_address(self) -> str:
        weights = self.cfg.MODEL.WEIGHTS
        return weights if "://" in weights else ""

    def estimate(self, gpu: Gpu, count: int) -> Estimate | None:
        from tools.estimates import detection

        return detection.estimate(self.cfg, gpu, count)

    def reads_weights(self) -> bool:
        return not self.has_checkpoint()

    def name_next_command(self, folder: str) -> str:
        return f"python tools/launch.py report {shlex.quote(folder)}"

    @classmethod
    def read_config(cls, folder: Path) -> str:
        return ""

    @classmethod
    def read_scores(cls, run: Run) -> list[Score]:
        from tools.reporting.runs import read_detections

        return list(read_detections(run))

    @classmethod
    def compare_with_papers(cls, score: Score) -> Iterable[Candidate]:
        from tools.reporting.paper_tables import compare_with_detection_rows
        from tools.reporting.runs import DetectorScore

        if not isinstance(score, DetectorScore) or score.evaluated_only:
            return ()
        return compare_with_detection_rows(score)

    @property
    def arguments(self) -> list[Any]:
        drawing = ["--visualize", str(self.options.visualize)] if self.options.visualize else []
        return ["transfer", [self.mode, "--engine", self.options.engine, *drawing, "OUTPUT_DIR", self.folder]]

    def describe_work(self, arguments: list[Any]) -> list[Any]:
        mode, *words = arguments[1]
        return [mode, "--engine", self.upgrade_arguments([mode, *words])["engine"]]  # --visualize may be added

    @classmethod
    def upgrade(cls, record: dict[str, Any]) -> dict[str, Any]:
        upgraded = super().upgrade(record)
        return {**upgraded, "stage": "evaluation" if upgraded["options"]["eval_only"] else cls.name}

    @classmethod
    def upgrade_arguments(cls, words: Sequence[str]) -> dict[str, Any]:
        try:
            mode, *rest = words
            values = {_OPTIONS[name]: value for name, value in zip(rest[::2], rest[1::2], strict=True)}
            is_evaluation = {"--eval-only": True, "--resume": False}[mode]
            visualize = int(values.get("visualize", 0))
            return {"config_file": "", "engine": values["engine"], "eval_only": is_evaluation, "visualize": visualize}
        except (TypeError, KeyError, ValueError) as error:
            problem = f"the stage record has the arguments {words!r}, which this version does not know"
            raise UserError(f"{problem}; rerun the original command") from error


@functools.cache  # print the note once for all detectors of a pipeline
def _choose_installed_engine() -> str:
    engine = preflight.choose_engine("auto")
    if engine == "torchvision":
        print(preflight.FALLBACK_NOTE, file=sys.stderr)
    return engine
