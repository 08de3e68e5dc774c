"""What a stage of pretraining or probing refuses before it imports torch or starts a job."""

from __future__ import annotations

import os

from fvcore.common.config import CfgNode

from .common.batch_split import local_bn_groups
from .common.errors import UserError
from .common.files import existing_file
from .data import datasets
from .methods import METHODS
from .probe.data import probe_data
from .probe.protocol import data_names


def refuse_missing_data(cfg: CfgNode, stage: str, *, weights: bool) -> None:
    """Checks that the images that a stage reads and the weights that it starts from exist.

    Of images in folders, the first and the last are decoded, unless the config allows unreadable ones.

    Args:
        weights: check MODEL.WEIGHTS, too.

    Raises:
        UserError: one of them does not, or a probe's own images have no labels or no val split.
    """
    data = cfg.DATA
    train = data.TRAIN if stage in ("pretrain", "distributions") else data.PROBE_TRAIN or data.TRAIN
    others = () if stage == "distributions" else ((data.PROBE_TRAIN, "train"), (data.VAL, "val"))
    for name, split in ((train, "train"), *others):
        if name:
            datasets.refuse_missing(name, data.ROOT, data.DOWNLOAD)
            if cfg.DATALOADER.ON_CORRUPT == "error":
                datasets.refuse_unreadable(name, split, data.ROOT)
    if stage in ("linear", "knn", "embedding") and all(name.startswith("folder:") for name in data_names(cfg)):
        found = len(probe_data(cfg).train)  # of the user's own images; listing a named data set would take long
        if stage == "linear" and found < cfg.LINEAR.IMS_PER_BATCH:
            raise UserError(
                f"LINEAR.IMS_PER_BATCH is {cfg.LINEAR.IMS_PER_BATCH}, above the {found} labeled images; lower it"
            )
    path = cfg.MODEL.WEIGHTS if stage == "pretrain" else ""
    if weights and path and not os.path.isdir(path):  # of a run folder, the newest checkpoint is read
        existing_file(path, "file of MODEL.WEIGHTS", "*.p*")


def refuse_indivisible(cfg: CfgNode, processes: int, *, data: bool) -> None:
    """Checks that the data hold a batch, and that the batch can be divided among processes, parts and BN groups.

    Args:
        data: count the images in folders, too.

    Raises:
        UserError: they do not, or it cannot.
    """
    solver, name = cfg.SOLVER, cfg.DATA.TRAIN
    has_keys = METHODS[cfg.METHOD.NAME].kind == "queue"
    local_bn_groups(
        solver.IMS_PER_BATCH, cfg.MODEL.BN_GROUPS, has_keys, lambda _: None, solver.ACCUMULATE, ranks=processes
    )
    count = datasets.count_up_to(solver.IMS_PER_BATCH, name, "train", cfg.DATA.ROOT) if data else solver.IMS_PER_BATCH
    if not count:
        datasets.load(name, "train", cfg.DATA.ROOT)  # raises the error that shows the layout expected
    if count < solver.IMS_PER_BATCH:
        raise UserError(
            f"SOLVER.IMS_PER_BATCH is {solver.IMS_PER_BATCH}, but {name} holds only {count} images; set it to at most "
            f"{count}, or add images"
        )
