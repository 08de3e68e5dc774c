"""How far the choice of validation scenes moves a study's differences in box AP: a bootstrap over the scenes.

    python -m studies.tools.scenes runs/studies/whole_labels random mocov2    # studies/whole_labels/scenes.json

The scenes are drawn with replacement, the same ones for every run; the seeds stay. The other intervals cover seeds.
"""

import copy
import sys
from pathlib import Path

import numpy as np
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from pretrain.common.files import read_json, write_json
from tools import ROOT
from tools.launcher.record_formats import PIPELINE_FILE

_DRAWS = 200


def main() -> None:
    folder = Path(sys.argv[1])
    base, ours = sys.argv[2:]
    seeds = read_json(folder / PIPELINE_FILE)["study"]["branches"][base]
    detectors = sorted(path.name for path in (folder / seeds[next(iter(seeds))]).glob("whole_*"))
    file = folder.parents[2] / "datasets/digits/coco/annotations/instances_val.json"  # the scenes of every detector
    truth = COCO(str(file))
    drawn = np.random.default_rng(0).integers(0, len(truth.imgs), size=(_DRAWS, len(truth.imgs)))
    rows = {}
    for detector in detectors:
        ap = {
            branch: np.mean([_aps(truth, folder / f"{branch}_seed={seed}" / detector, drawn) for seed in seeds], axis=0)
            for branch in (base, ours)
        }
        change = ap[ours] - ap[base]
        low, high = np.percentile(change[1:], [2.5, 97.5])
        rows[detector] = {"difference": float(change[0]), "low": float(low), "high": float(high)}
        print(f"{detector}: {change[0]:+.1f} ({low:+.1f} to {high:+.1f})")
    what = f"box AP, {ours} - {base}, mean over seeds {', '.join(seeds)}; 95% of {_DRAWS} draws of the scenes"
    write_json(ROOT / "studies" / folder.name / "scenes.json", {"what": what, "detectors": rows})


def _aps(truth: COCO, run: Path, drawn: np.ndarray) -> np.ndarray:
    """Return box AP, in percent, of all scenes and then of each draw."""
    predictions = next((run / "inference").glob("*/coco_instances_results.json"))
    evaluation = COCOeval(truth, truth.loadRes(str(predictions)), "bbox")
    evaluation.evaluate()
    whole = copy.copy(evaluation.evalImgs)
    images = len(truth.imgs)  # evalImgs is ordered by class, area, image
    table = np.array(whole, dtype=object).reshape(-1, images)
    results = []
    for order in (np.arange(images), *drawn):
        evaluation.evalImgs = list(table[:, order].reshape(-1))
        evaluation.accumulate(evaluation.params)
        precision = evaluation.eval["precision"][:, :, :, 0, 2]  # all areas, 100 detections
        results.append(100 * precision[precision > -1].mean())
    return np.array(results)


if __name__ == "__main__":
    main()
