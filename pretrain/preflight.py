"""What a stage of pretraining or probing refuses before it imports torch or starts a job."""

from __future__ import annotations

import os
from pathlib import Path

from fvcore.common.config import CfgNode

from .common.config import extensions
from .common.config.yaml_io import flatten
from .common.errors import UserError
from .common.files import existing_file
from .config import FREE_ON_RESUME, from_yaml_text
from .data import datasets
from .methods import METHODS
from .model.batch_split import check_multiple, count_bn_groups

# Keys that a resumed run may change although they distinguish runs: the digest of the images, not their path, decides
# whether the data are the same; MAX_STEPS cuts the same schedule; the memory format changes only rounding.
MAY_CHANGE = (*FREE_ON_RESUME, "DATA.TRAIN", "DATALOADER.ON_CORRUPT", "SOLVER.MAX_STEPS", "SOLVER.CHANNELS_LAST",
               "SOLVER.CHANGE_RECIPE")  # fmt: skip

# Keys that errors advise to change; a resumed run does so only under SOLVER.CHANGE_RECIPE, and records it.
_RECIPE = {"IMPORTED", "SOLVER.AMP", "SOLVER.BASE_LR", "SOLVER.WARMUP_EPOCHS"}


def check_data_exists(cfg: CfgNode, stage: str, *, weights: bool) -> None:
    """Raises UserError unless the images that a stage reads exist, and with ``weights`` the file of MODEL.WEIGHTS."""
    data = cfg.DATA
    train = data.TRAIN if stage in ("pretrain", "distributions") else data.PROBE_TRAIN or data.TRAIN
    others = () if stage == "distributions" else (data.PROBE_TRAIN, data.VAL)
    for name in filter(None, (train, *others)):
        datasets.check_exists(name, data.ROOT, data.DOWNLOAD)
    path = cfg.MODEL.WEIGHTS if stage == "pretrain" else ""
    if weights and path and not os.path.isdir(path):  # of a run folder, the newest checkpoint is read
        existing_file(path, "file of MODEL.WEIGHTS", "*.p*")


def check_modules_unchanged(cfg: CfgNode) -> None:
    """Raises UserError if the user's own modules are not those with which a job was submitted."""
    if cfg.IMPORTED and (now := extensions.digest()) != cfg.IMPORTED:
        raise UserError(
            f"your modules have changed since the job was submitted ({cfg.IMPORTED} -> {now}); restore them, or submit "
            "it again"
        )


def check_divisible(cfg: CfgNode, stage: str, processes: int) -> None:
    """Raise UserError unless the stage's batch divides evenly among processes, micro-batches and BN groups."""
    if stage == "pretrain":
        count_bn_groups(
            cfg.SOLVER.IMS_PER_BATCH,
            cfg.MODEL.BN_GROUPS,
            processes=processes,
            accumulate=cfg.SOLVER.ACCUMULATE,
            has_keys=METHODS[cfg.METHOD.NAME].kind == "queue",
        )
    elif stage == "linear":
        check_multiple("LINEAR.IMS_PER_BATCH", cfg.LINEAR.IMS_PER_BATCH, processes, f"{processes} processes")


def check_same_run(cfg: CfgNode, earlier: str, what: str, folder: str | Path) -> list[str]:
    """Refuses to resume a pretraining under another config: its result would belong to neither.

    Args:
        earlier: the config that the run in ``folder`` was begun with, as YAML text.
        what: names that text in messages.

    Returns:
        The changes of learning rate, precision and own modules that SOLVER.CHANGE_RECIPE allows, as
        ``SOLVER.AMP 'none' -> 'bf16'``.

    Raises:
        UserError: keys have other values, each of which is named, or the text is not a config of this version.
    """
    before = dict(flatten(from_yaml_text(earlier, what)))
    changed = [
        f"{key} {before.get(key)!r} -> {value!r}"
        for key, value in flatten(cfg)
        if before.get(key) != value and not key.startswith(MAY_CHANGE)
    ]
    keys = {change.split()[0] for change in changed}
    if not changed or (cfg.SOLVER.CHANGE_RECIPE and keys <= _RECIPE):
        return changed
    remedy = "choose another OUTPUT_DIR"
    if keys <= _RECIPE:
        remedy += ", or continue with --change-recipe, which is recorded in the results"
    raise UserError(f"{folder} holds a run with a different config ({'; '.join(changed)}); {remedy}")
