"""Checks that run without torch, before a stage starts or a job is submitted."""

import os
from pathlib import Path

from fvcore.common.config import CfgNode

from .common.config.keys import Effect, compare
from .common.config.yaml_io import flatten, get
from .common.errors import UserError, count_noun
from .common.files import check_file
from .config import SAME_STEPS, from_yaml_text
from .data import datasets
from .data.count import count_images
from .keys import list_keys
from .model.batch_split import check_batch_fits, check_multiple, count_configured_bn_groups
from .probe.data import find_held_out


def check_data_exists(cfg: CfgNode, train: str) -> None:
    """Raise UserError unless the images that a stage reads exist: ``train``, DATA.PROBE_TRAIN and DATA.VAL."""
    data = cfg.DATA
    for name in filter(None, [train, data.PROBE_TRAIN, data.VAL]):
        datasets.check_exists(name, data.ROOT, data.DOWNLOAD)


def check_weights_exist(path: str) -> None:
    """Raise UserError unless MODEL.WEIGHTS is a file or a folder; of a run folder, the newest checkpoint is read."""
    if path and not os.path.isdir(path):
        check_file(path, "weights file (MODEL.WEIGHTS)", "*.p*")


def check_batch_size(cfg: CfgNode, key: str, train: str, *, holds_out: bool = False) -> None:
    """Raise UserError if a batch is larger than the data set ``train``, if that is small enough to be counted.

    Args:
        key: the key of the batch size.
        holds_out: a tenth of the images selects the learning rate.
    """
    batch_size = get(cfg, key)
    images = count_images(train, cfg.DATA.ROOT, batch_size)
    if images and holds_out:
        images -= int(find_held_out(images).sum())
    if images is not None:
        check_batch_fits(key, batch_size, images)


def check_divisible(cfg: CfgNode, processes: int) -> None:
    """Raise UserError unless pretraining's batch divides evenly among processes, micro-batches and BN groups."""
    count_configured_bn_groups(cfg, processes)


def check_probe_divisible(cfg: CfgNode, processes: int) -> None:
    """Raise UserError unless a linear probe's batch divides evenly among processes."""
    reason = count_noun(processes, "process", "processes")
    check_multiple("LINEAR.IMS_PER_BATCH", cfg.LINEAR.IMS_PER_BATCH, processes, reason)


def check_same_run(cfg: CfgNode, earlier: str, description: str, folder: str | Path) -> list[str]:
    """Check that ``cfg`` is the config that the run in ``folder`` was started with, except for keys that may change.

    Args:
        earlier: the config that the run was started with, as YAML text.
        description: names that text in messages.

    Returns:
        The changes of learning rate, precision and imported modules that SOLVER.CHANGE_RECIPE allows, as
        ``SOLVER.AMP 'none' -> 'bf16'``.

    Raises:
        UserError: keys have other values, each of which is named, or the text is not a config of this version.
    """
    keys = list_keys()
    before = dict(flatten(from_yaml_text(earlier, description)))
    now = dict(flatten(cfg))
    changes = [str(change) for change in compare(keys, before, now, SAME_STEPS, is_resumed=True)]
    is_recipe_alone = not compare(keys, before, now, SAME_STEPS | {Effect.RECIPE}, is_resumed=True)
    if not changes or (cfg.SOLVER.CHANGE_RECIPE and is_recipe_alone):
        return changes
    remedy = "choose another OUTPUT_DIR"
    if is_recipe_alone:
        remedy += ", or continue with --change-recipe, which is recorded in the results"
    raise UserError(f"{folder} contains a run with a different config ({'; '.join(changes)}); {remedy}")


def check_same_images(recorded: str, current: str, name: str, folder: str | Path) -> None:
    """Raise UserError if a checkpoint in ``folder`` records another digest of the images in the data set ``name``."""
    if recorded != current:
        changed = f"names or labels of the images in {name} have changed since {folder} was started"
        raise UserError(f"{changed}; restore the original ones, or choose another OUTPUT_DIR")
