"""The labeled images of a probe. Must not import torch: the launcher uses it before starting a job."""

import logging
from typing import NamedTuple

import numpy as np
from fvcore.common.config import CfgNode

from ..common.errors import UserError, shorten_list
from ..common.image_checks.equal_files import list_shared_files, read_sizes
from ..data import datasets

_MOST_COMPARED = 20_000  # files; more would take minutes on a file server, for which all ranks wait
log = logging.getLogger(__name__)


class MissingLabels(UserError):
    """Data without labels or without validation images, which cannot be probed."""


class ProbeData(NamedTuple):
    """Labeled images that a probe learns from, and those that it is scored on."""

    train: datasets.ImageData
    val: datasets.ImageData


def data_names(cfg: CfgNode) -> tuple[str, str]:
    """Return the names of the data that a probe learns from, and of the data that it is scored on."""
    train = cfg.DATA.PROBE_TRAIN or cfg.DATA.TRAIN
    return train, cfg.DATA.VAL or train


def find_held_out(count: int) -> np.ndarray:
    """Return which of ``count`` training images select the learning rate of a linear probe: every tenth, at least one.

    Returns:
        (count,) bool.
    """
    positions = np.arange(count)
    return positions % 10 == 9 if count > 9 else positions == 0


def load_probe_data(cfg: CfgNode, train: datasets.ImageData | None = None) -> ProbeData:
    """Load the labeled images of DATA.PROBE_TRAIN and DATA.VAL (both default to DATA.TRAIN's splits).

    Args:
        train: the train split of DATA.TRAIN, if it is open already, because listing a large one takes long.

    Raises:
        MissingLabels: there are no labels, or no val split.
        UserError: a data set is missing, or the two name different classes.
    """
    train_name, val_name = data_names(cfg)
    if train is None or cfg.DATA.PROBE_TRAIN:
        train = datasets.load(train_name, "train", cfg.DATA.ROOT, cfg.DATA.DOWNLOAD)
    _check_labels(train_name, train)  # before a missing val split, which unlabeled images do not need
    if train.count_classes() == 1:
        raise MissingLabels(f"{train_name} has only one class, so nothing to score; make one folder per class")
    val = train  # of a data set that serves as every split, and is not listed again
    if val_name != train_name or datasets.has_splits(val_name):
        val = datasets.load(val_name, "val", cfg.DATA.ROOT, cfg.DATA.DOWNLOAD)
    _check_labels(val_name, val)
    if train.image_name(0) == val.image_name(0) and len(train) == len(val):
        if cfg.DATA.VAL:  # named explicitly: a mistake
            raise UserError(f"DATA.VAL {val_name} has the training images of {train_name}; set it to other images")
        remedy = (
            "set DATA.VAL to labeled images, or make train/ and val/ folders: python tools/make_data.py split FOLDER"
        )
        raise MissingLabels(f"{train_name} has no val split to score probes on; {remedy}")
    unknown = sorted(set(val.classes) - set(train.classes))
    if unknown:
        problem = f"{train_name} has no class {shorten_list(unknown)} of {val_name}"
        raise UserError(f"{problem}; probes need the same classes in both")
    return ProbeData(train.select_labeled(), val.relabel(train.classes).select_labeled())


def warn_of_training_images(data: ProbeData) -> None:
    """Log the validation images that are training images, by their paths or the content of their files."""
    count = len(data.train) + len(data.val)
    if count > _MOST_COMPARED:
        log.info(f"{count:,} images are too many to look for training images among the validation images")
        return
    train = read_sizes(map(data.train.image_name, range(len(data.train))))
    shared = list_shared_files(train, read_sizes(map(data.val.image_name, range(len(data.val)))))
    if shared:
        problem = f"{len(shared):,} of {len(data.val):,} validation images are training images: {shorten_list(shared)}"
        log.warning(f"the score of {data.val.name} is too high: {problem}; remove them from one of the two")


def _check_labels(name: str, data: datasets.ImageData) -> None:
    if not data.count_classes():
        remedy = "set DATA.PROBE_TRAIN and DATA.VAL to labeled images; without any, read rankme in metrics.json"
        raise MissingLabels(f"{name} has no labels to probe with; {remedy}")
