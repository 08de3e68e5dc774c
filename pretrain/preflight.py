"""What a stage of pretraining or probing refuses before it imports torch or starts a job."""

from __future__ import annotations

import os

from fvcore.common.config import CfgNode

from .common.batch_split import local_bn_groups
from .common.files import existing_file
from .data import datasets
from .methods import METHODS


def refuse_missing_data(cfg: CfgNode, stage: str, *, weights: bool) -> None:
    """Checks that the images that a stage reads and the weights that it starts from exist.

    Args:
        weights: check MODEL.WEIGHTS, too.

    Raises:
        UserError: one of them does not.
    """
    data = cfg.DATA
    train = data.TRAIN if stage in ("pretrain", "distributions") else data.PROBE_TRAIN or data.TRAIN
    others = () if stage == "distributions" else (data.PROBE_TRAIN, data.VAL)
    for name in filter(None, (train, *others)):
        datasets.refuse_missing(name, data.ROOT, data.DOWNLOAD)
    path = cfg.MODEL.WEIGHTS if stage == "pretrain" else ""
    if weights and path and not os.path.isdir(path):  # of a run folder, the newest checkpoint is read
        existing_file(path, "file of MODEL.WEIGHTS", "*.p*")


def refuse_indivisible(cfg: CfgNode, processes: int) -> None:
    """Checks that the batch can be divided among processes, micro-batches and BN groups.

    Raises:
        UserError: it cannot.
    """
    has_keys = METHODS[cfg.METHOD.NAME].kind == "queue"
    local_bn_groups(
        cfg.SOLVER.IMS_PER_BATCH, cfg.MODEL.BN_GROUPS, has_keys, lambda _: None, cfg.SOLVER.ACCUMULATE, ranks=processes
    )
