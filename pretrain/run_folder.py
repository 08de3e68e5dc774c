"""The run folder of a pretraining: its config, its environment and a picture of its views."""

from pathlib import Path

from fvcore.common.config import CfgNode

from .common.config import yaml_io
from .common.files import atomic_write, remove
from .common.run import file_names
from .common.run.folder import write_environment
from .common.weights import checkpoint
from .data import view_grid
from .data.loader import Loader
from .methods import METHODS

_ROWS = 6  # images in views.png
_MAX_COLUMNS = 8  # views in views.png


def prepare_folder(cfg: CfgNode, folder: Path, loader: Loader, checkpoint_path: Path | None, step: int) -> None:
    """Initialize the run folder, or prepare it for a run that resumes from ``checkpoint_path`` after ``step`` steps."""
    atomic_write(folder / file_names.CONFIG, yaml_io.dump(cfg))
    remove(folder / file_names.RESULTS)
    if checkpoint_path is None:
        for path in (folder / file_names.METRICS, *folder.glob(file_names.EVENTS)):  # from a run with no checkpoint
            remove(path)
        _draw_views(folder / file_names.VIEWS, cfg, loader)
    elif checkpoint_path.name == checkpoint.FINAL:
        # The run had ended at a smaller MAX_STEPS; later checkpoints must sort after this one.
        checkpoint_path.replace(checkpoint.path_of_step(folder, step))
    write_environment(folder)


def _draw_views(file: Path, cfg: CfgNode, loader: Loader) -> None:
    """Draw views of some images, titled as the query and its keys or, where every view is both, numbered."""
    augmentations = loader.augmentations[:_MAX_COLUMNS]
    numbers = range(1, len(augmentations) + 1)
    if METHODS[cfg.METHOD.NAME].kind == "queue":
        titles = ["query", *(f"key {n}" for n in numbers)][: len(augmentations)]
    else:
        titles = [f"view {n}" for n in numbers]
    columns = dict(zip(titles, augmentations, strict=True))
    view_grid.write(file, view_grid.draw(loader.data, columns, loader.size, _ROWS, cfg.SEED))
