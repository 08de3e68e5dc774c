"""Test images that a backbone was pretrained on, without their labels."""

import contextlib
import logging
import os
import re
from collections.abc import Iterator, Mapping
from itertools import islice

from pretrain.common.config.yaml_io import parse_yaml
from pretrain.common.errors import shorten_list
from pretrain.common.files import expand
from pretrain.common.image_checks.equal_files import MOST_FILES, list_shared_files
from pretrain.common.split_folders import find_splits
from pretrain.common.weights.provenance import Provenance

log = logging.getLogger(__name__)


def list_pretraining_folders(provenance: Provenance | None) -> list[str]:
    """List the image folders of a backbone's pretraining that are on this machine under their recorded names."""
    folders: list[str] = []
    while provenance:
        with contextlib.suppress(LookupError, TypeError, ValueError):  # another project's config, or none
            names = str(parse_yaml(provenance.config or "")["DATA"]["TRAIN"])
            folders += [expand(path.strip()) for path in re.findall(r"folder:([^,'\"\]]+)", names)]
        provenance = provenance.earlier
    return [_choose_split(path) for path in dict.fromkeys(folders) if os.path.isdir(path)]


def _choose_split(folder: str) -> str:
    """Return the folder of the train split in ``folder``, or itself if it has none: all its images are read."""
    train = find_splits(sorted(os.listdir(folder)))["train"]
    return os.path.join(folder, train[0]) if train and os.path.isdir(os.path.join(folder, train[0])) else folder


def compare_with_pretraining(test: Mapping[str, int], provenance: Provenance | None) -> None:
    """Log the test images that are images of the pretraining, by their content.

    Args:
        test: sizes of the test images in bytes, by path.
        provenance: the record of the weights that training starts from.
    """
    for folder in list_pretraining_folders(provenance):
        sizes = dict(islice(_list_sizes(folder), MOST_FILES))
        if len(sizes) == MOST_FILES:
            log.info(f"the test images are compared with {MOST_FILES:,} files of the pretraining's {folder} only")
        shared = list_shared_files(sizes, test)
        if shared:
            what = f"{len(shared):,} of {len(test):,} test images are in {folder}: {shorten_list(shared)}"
            log.warning(f"the backbone was pretrained on test images, without their labels: {what}")


def _list_sizes(folder: str) -> Iterator[tuple[str, int]]:
    """Yield the files in a folder, at any depth, with their sizes in bytes."""
    for path, _, names in os.walk(folder, followlinks=True):
        parent = os.path.realpath(path)
        for name in names:
            file = os.path.join(parent, name)
            with contextlib.suppress(OSError):
                yield file, os.stat(file).st_size
