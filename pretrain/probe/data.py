"""The labeled images of a probe; the launcher opens them before it starts a job, so that nothing here imports torch."""

from __future__ import annotations

from typing import NamedTuple

from fvcore.common.config import CfgNode

from ..common.errors import UserError
from ..data import datasets
from .protocol import data_names


class MissingLabels(UserError):
    """The data have no labels, or no validation images: they cannot be probed."""


class ProbeData(NamedTuple):
    """Labeled images a probe learns from, and those it is scored on."""

    train: datasets.ImageData
    val: datasets.ImageData


def probe_data(cfg: CfgNode, opened: datasets.ImageData | None = None) -> ProbeData:
    """The labeled train and val images of DATA.PROBE_TRAIN and DATA.VAL (both default to DATA.TRAIN's own splits).

    Args:
        opened: the train split of DATA.TRAIN, if it is open already: listing a large one takes long.

    Raises:
        NotProbeable: there are no labels, or no val split.
        UserError: a data set is missing, or the two name different classes.
    """
    train_name, val_name = data_names(cfg)
    if opened is None or cfg.DATA.PROBE_TRAIN:
        opened = datasets.load(train_name, "train", cfg.DATA.ROOT, cfg.DATA.DOWNLOAD)
    train = _labeled(train_name, opened)  # before a missing val split, which unlabeled images do not need
    if train.class_count() == 1:
        raise MissingLabels(f"{train_name} has one class: nothing to score; make one folder per class")
    val = _labeled(val_name, datasets.load(val_name, "val", cfg.DATA.ROOT, cfg.DATA.DOWNLOAD))
    if train.image_name(0) == val.image_name(0) and len(train) == len(val):
        if cfg.DATA.VAL:  # named explicitly: a mistake
            raise UserError(
                f"DATA.VAL {val_name} holds the same images that probes learn from ({train_name}); name others"
            )
        raise MissingLabels(
            f"{train_name} has no val split: probes would be scored on what they learned from; name "
            "labeled images in DATA.VAL, or make train/ and val/ folders"
        )
    if train.classes != val.classes:
        raise UserError(f"{train_name} and {val_name} name different classes; probes need the same ones")
    return ProbeData(train.labeled(), val.labeled())


def _labeled(name: str, data: datasets.ImageData) -> datasets.ImageData:
    if not data.class_count():
        raise MissingLabels(f"{name} has no labels to probe with; name labeled data in DATA.PROBE_TRAIN and DATA.VAL")
    return data
