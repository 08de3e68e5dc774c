"""A map of frozen features: t-SNE of the validation images, a colour a class."""

from __future__ import annotations

import csv
import io
from typing import Any

import numpy as np
from fvcore.common.config import CfgNode
from torch.nn import functional as F

from ..common.errors import UserError
from .features import extract, load_frozen, probe_data, protocol
from .run import probe_run

_MOST = 5000  # points: t-SNE's time grows faster than their number, and more cannot be told apart in a picture


def main(cfg: CfgNode, weights: str) -> dict[str, Any]:
    """Writes embedding.png and embedding.csv (x, y, label) to OUTPUT_DIR for a run folder, checkpoint or ``random``.

    Features are L2-normalised, as for kNN; at most 5,000 images, evenly spaced.

    Returns:
        What results.json holds: the number of images and scikit-learn's trustworthiness of the map (0 to 1).
    """
    from sklearn.manifold import TSNE, trustworthiness  # slow to import

    with probe_run(cfg, "embedding") as run:
        backbone, source = load_frozen(weights, cfg, run.device)
        data = probe_data(cfg)
        run.start("embedding.csv", "embedding.png")
        features = extract(backbone, data.val, cfg, run.device, most=_MOST)
        labels, classes = features.labels_N.cpu().numpy(), data.val.classes
        if len(labels) < 4:
            raise UserError(f"a map needs at least 4 labelled validation images; there are {len(labels)}")
        unit = F.normalize(features.features_NF, dim=1).cpu().numpy()
        perplexity = min(30.0, (len(unit) - 1) / 3)
        points = TSNE(perplexity=perplexity, init="pca", random_state=cfg.SEED).fit_transform(unit)
        trust = float(trustworthiness(unit, points, n_neighbors=min(5, len(unit) // 2 - 1)))
        results = {"stage": "embedding", "source": source, "images": len(points), "protocol": protocol(cfg, data),
                   "metrics": {"trustworthiness": trust}}  # fmt: skip
        run.log.info(f"{run.folder / 'embedding.png'}: {len(points)} images, trustworthiness {trust:.3f}")
        table = _csv(points, [classes[c] for c in labels])
        return run.finish(results, {"embedding.csv": table, "embedding.png": draw(points, labels, classes)})


def draw(points_N2: np.ndarray, labels_N: np.ndarray, classes: list[str]) -> bytes:
    """The map as PNG; a legend where there are at most 20 classes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(6.4, 5.6), constrained_layout=True)
    colours = plt.get_cmap("tab20" if len(classes) > 10 else "tab10")
    for c in np.unique(labels_N):
        mine = points_N2[labels_N == c]
        axis.scatter(mine[:, 0], mine[:, 1], s=9, color=colours(int(c) % colours.N), label=classes[c])
    if len(classes) <= 20:
        axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    axis.set_xticks([])
    axis.set_yticks([])
    axis.set_title("t-SNE of frozen validation features")
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=130)
    plt.close(figure)
    return file.getvalue()


def _csv(points_N2: np.ndarray, names: list[str]) -> str:
    file = io.StringIO()
    rows = csv.writer(file, lineterminator="\n")
    rows.writerow(["x", "y", "label"])
    rows.writerows([f"{x:.6g}", f"{y:.6g}", name] for (x, y), name in zip(points_N2, names, strict=True))
    return file.getvalue()
