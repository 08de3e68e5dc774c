"""A map of frozen features: t-SNE of the validation images, one color per class."""

import logging
import warnings
from typing import Any

import numpy as np
from fvcore.common.config import CfgNode
from torch.nn import functional as F

from ..common.errors import UserError, count_noun, figure_text
from ..common.run.state import RunContext
from .features import extract, load_frozen
from .protocol import build_protocol
from .stage import open_probe

log = logging.getLogger(__name__)
_MAX_POINTS = 5000  # t-SNE's time grows faster than their number, and more cannot be told apart in a figure
_EQUAL = 1e-6  # differences of unit features up to here are rounding errors of float32


def main(cfg: CfgNode, weights: str, *, context: RunContext | None = None) -> dict[str, Any]:
    """Write embedding.png and embedding.csv (x, y, label) to OUTPUT_DIR for a run folder, checkpoint or ``random``.

    Features are L2-normalized, as for kNN; at most 5,000 images, evenly spaced. Returns the content of results.json.
    """
    from sklearn.manifold import TSNE  # slow to import

    with open_probe(cfg, "embedding", context) as run:
        backbone, source = load_frozen(weights, cfg, run.device)
        data = run.load_data()
        run.start()
        features = extract(backbone, data.val, cfg, run.stop, run.device, max_images=_MAX_POINTS)
        labels = features.labels_N.cpu().numpy()
        classes = data.val.classes
        unit = F.normalize(features.features_NF, dim=1).cpu().numpy()
        _check_features(unit)
        perplexity = min(30.0, (len(unit) - 1) / 3)
        points = TSNE(perplexity=perplexity, init="pca", random_state=cfg.SEED).fit_transform(unit)
        results = {"source": source, "images": len(points), "protocol": build_protocol(cfg, data)}
        log.info(f"{run.folder / 'embedding.png'}: {count_noun(len(points), 'image')}")
        rows = [[f"{x:.6g}", f"{y:.6g}", classes[label]] for (x, y), label in zip(points, labels, strict=True)]
        return run.finish(results, [["x", "y", "label"], *rows], draw(points, labels, classes))


def _check_features(unit_NF: np.ndarray) -> None:
    """Raise UserError for unit features of which t-SNE can draw no map; scikit-learn may crash on equal ones."""
    if len(unit_NF) < 4:
        raise UserError(f"a map needs at least 4 labeled validation images, not {len(unit_NF)}; add images")
    if np.ptp(unit_NF, axis=0).max() < _EQUAL:
        causes = "the encoder has collapsed (see feature_spread in metrics.json), or the images are all alike"
        problem = f"the features of all {len(unit_NF)} images are equal, so there is no map: {causes}"
        raise UserError(f"{problem}; use an earlier checkpoint, or other images")


def draw(points_N2: np.ndarray, labels_N: np.ndarray, classes: list[str]) -> Any:
    """Draw the map as a figure, with a legend for at most 20 classes."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    warnings.filterwarnings("ignore", "Glyph")  # one warning per character that the font lacks
    figure = Figure(figsize=(6.4, 5.6), layout="constrained")
    axis = figure.subplots()
    colors = colormaps["tab20" if len(classes) > 10 else "tab10"]
    for label in np.unique(labels_N):
        class_points = points_N2[labels_N == label]
        name = figure_text(classes[label])
        axis.scatter(class_points[:, 0], class_points[:, 1], s=9, color=colors(int(label) % colors.N), label=name)
    if len(classes) <= 20:
        axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    axis.set(xticks=[], yticks=[], title="t-SNE of frozen validation features")
    return figure
