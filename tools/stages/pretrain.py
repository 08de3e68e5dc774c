"""Pretraining of an encoder without labels."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pretrain import config as pretraining
from pretrain.common.config import extensions
from pretrain.common.config.keys import Effect
from pretrain.common.errors import UserError
from pretrain.common.files import check_not_url
from pretrain.common.run import file_names
from pretrain.common.run.state import RunContext, read_json_or_empty
from pretrain.common.shell import shorten_path

from . import recipes
from .base import Stage
from .options import option
from .registry import register

if TYPE_CHECKING:
    from tools.estimates.model import Estimate
    from tools.estimates.published import Gpu
    from tools.reporting.files import Run
    from tools.reporting.runs import Score

_LARGE_TAR = 20_000  # images, which are not counted for an estimate


@register
class Pretrain(Stage):
    name = "pretrain"
    trains_backbone = True
    records_state = True
    probe = "kNN"  # at its end
    may_change = frozenset(Effect)  # `check_same_run` compares the keys
    without_effect = pretraining.SAME_TRAINING

    @dataclass(frozen=True)
    class Options:
        method: str = option(
            "use the default recipe of this method (mocov2, jcl, sce, ...) and print it", "", is_exclusive=True
        )
        config_file: str = option("use this recipe file", "", is_exclusive=True, metavar="FILE")
        change_recipe: bool = option(
            "allow the learning rate, precision or imports to differ when resuming (SOLVER.CHANGE_RECIPE True)", False
        )

    @classmethod
    def load(cls, options: Options, overrides: Sequence[str] = ()) -> Self:
        """Load the stage of a recipe, in OUTPUT_DIR or runs/<recipe>."""
        recipe, recipe_overrides = cls._find_recipe(options)
        words = [*recipe_overrides, *overrides]
        if options.change_recipe:
            words += ["SOLVER.CHANGE_RECIPE", "True"]
        cfg = pretraining.load_recipe(recipe, words)
        folder = str(Path(cfg.OUTPUT_DIR).absolute())
        inputs = {cfg.MODEL.WEIGHTS: ""} if cfg.MODEL.WEIGHTS and "://" not in cfg.MODEL.WEIGHTS else {}
        return cls.from_config(cfg, folder, options, inputs)

    @classmethod
    def load_command(cls, options: Options, overrides: Sequence[str] = ()) -> Stage:
        recipe, recipe_overrides = cls._find_recipe(options)
        shown = options.config_file or shorten_path(recipe)
        print(" ".join(["recipe:", shown, *recipe_overrides]), file=sys.stderr)
        return cls.load(options, overrides)

    @staticmethod
    def _find_recipe(options: Options) -> tuple[str, list[str]]:
        """Return the file of the recipe, and the overrides that turn it into the method's."""
        if not options.method:
            return options.config_file, []
        return str(recipes.find_recipe(options.method)), recipes.find_recipe_overrides(options.method)

    def run(self, context: RunContext) -> dict[str, Any]:
        from pretrain import train

        return train.main(self.cfg, context=context)

    @property
    def arguments(self) -> list[Any]:
        return [self.name]  # the config says it all

    def check(self, world_size: int, *, starts_later: bool) -> None:
        from pretrain import preflight  # imports OpenCV, which --help does not need

        preflight.check_divisible(self.cfg, world_size)
        extensions.check_unchanged(self.cfg.IMPORTED)  # since the start of a run that is resumed by its record
        if self.reads_weights():
            check_not_url(self.cfg.MODEL.WEIGHTS, "weights file (MODEL.WEIGHTS)")

    def list_data(self) -> list[str]:
        return list_data(self.cfg)

    def check_data(self, reads_weights: bool) -> None:
        from pretrain import preflight  # imports OpenCV, which --help does not need

        preflight.check_data_exists(self.cfg, self.cfg.DATA.TRAIN)

    def check_counts(self) -> None:
        from pretrain import preflight  # imports OpenCV, which --help does not need

        preflight.check_batch_size(self.cfg, "SOLVER.IMS_PER_BATCH", self.cfg.DATA.TRAIN)

    def estimate(self, gpu: Gpu, count: int) -> Estimate | None:
        from pretrain.data.count import count_images  # imports OpenCV, which --help does not need
        from tools.estimates import pretraining
        from tools.estimates.published import IMAGES

        images = IMAGES.get(self.cfg.DATA.TRAIN)
        if images is None:
            with contextlib.suppress(UserError):  # the data do not exist on this machine
                images = count_images(self.cfg.DATA.TRAIN, self.cfg.DATA.ROOT, _LARGE_TAR)
        return pretraining.estimate(self.cfg, gpu, count, images)

    def reads_weights(self) -> bool:
        return not self.has_checkpoint()

    def check_same_run(self) -> None:
        from pretrain import preflight

        earlier = self.read_config(Path(self.folder))
        if earlier:
            preflight.check_same_run(self.cfg, earlier, str(Path(self.folder, file_names.CONFIG)), self.folder)

    def name_next_command(self, folder: str) -> str:
        return shlex.join(["python", "tools/convert_to_d2.py", folder, f"weights/{Path(folder).name}.pth"])

    @classmethod
    def find_final_checkpoint(cls, folder: Path) -> str | None:
        return read_json_or_empty(folder / file_names.RESULTS).get("checkpoint_sha256", "none")

    @classmethod
    def read_scores(cls, run: Run) -> list[Score]:
        from tools.reporting.runs import read_pretraining

        return [read_pretraining(run)]


def list_data(cfg: Any) -> list[str]:
    """List the names of the images of pretraining and probes."""
    return [cfg.DATA.TRAIN, cfg.DATA.PROBE_TRAIN, cfg.DATA.VAL, cfg.DATA.ROOT]
