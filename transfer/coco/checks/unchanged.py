"""Check that a training set is the one that a run was started with: a resumed run continues in its stream of images."""

import json
from collections import Counter
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

from fvcore.common.config import CfgNode

from pretrain.common.errors import UserError

from ..reading import read_annotations


def check_unchanged(name: str, content: Mapping[str, Any], copy: Path, cfg: CfgNode) -> None:
    """Raise UserError if a set's good records are not those of the ``copy`` that the run's start has left.

    What the detector does not read, and the order of the records, may differ, as they do between versions.
    """
    if not copy.is_file():
        return
    earlier = _list_read(read_annotations(copy, needs_objects=False), cfg)
    current = _list_read(content, cfg)
    changed = [section for section in earlier if earlier[section] != current[section]]
    if changed:
        problem = f"the {' and '.join(changed)} of {name} have changed since {cfg.OUTPUT_DIR} was started"
        raise UserError(f"{problem}; restore the original ones, or choose another OUTPUT_DIR")


def _list_read(content: Mapping[str, Any], cfg: CfgNode) -> dict[str, Counter[Hashable]]:
    """Return the values of the records that the detector is trained on, by section."""
    fields = ["image_id", "category_id", "bbox", "iscrowd"]
    fields += ["segmentation"] * cfg.MODEL.MASK_ON + ["keypoints"] * cfg.MODEL.KEYPOINT_ON
    sections = {"images": ["id", "file_name", "width", "height"], "annotations": fields}
    return {
        section: Counter(json.dumps([record.get(name) for name in names]) for record in content[section])
        for section, names in sections.items()
    }
