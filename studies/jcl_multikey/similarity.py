"""Fig. 3 of JCL: how similar the views of one image are to a frozen encoder, one point per image.

    python -m studies.jcl_multikey.similarity runs/demo_quick/jcl/pretrain runs/demo_quick/mocov2/pretrain
    python -m studies.jcl_multikey.similarity --study runs/studies/jcl_multikey    # the study's scores.json

KEY VALUE pairs after the runs override the config of the first one, whose data and views all runs get. The paper does
not say whether its "features" are those after global average pooling or the embeddings after the projection head; here
they are the former.

Shape letters: B images at once, A augmentations per image, F features.
"""

import argparse
import logging
import sys
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from pretrain.common.command_line import run_program

    run_program("studies.jcl_multikey.similarity")

import numpy as np
import torch
from fvcore.common.config import CfgNode
from torch import Tensor
from torch.nn import functional as F
from torchvision.models import ResNet

from pretrain.common.command_line import Parser
from pretrain.common.errors import UserError, figure_text
from pretrain.common.files import check_file, read_json, write_json
from pretrain.common.ranks.agreement import AgreedStop
from pretrain.common.run import file_names
from pretrain.common.run.state import RunContext
from pretrain.config import load_config
from pretrain.data import datasets
from pretrain.data.augmentations import AUGMENTATIONS
from pretrain.data.loader import build_loader
from pretrain.probe.features import compute_features, load_frozen
from pretrain.probe.stage import open_probe
from tools.launcher.record_formats import PIPELINE_FILE

log = logging.getLogger(__name__)
_SCORES = Path(__file__).with_name("scores.json")
_COLUMNS = {"similarity_mean": "similarity of views", "variance_mean": "variance of views"}


def main(argv: Sequence[str] | None = None) -> None:
    """Draw one figure of several runs, or record the scores of every run of the study."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    text = "run folders, checkpoints or 'random' to compare in one figure, then KEY VALUE pairs"
    parser.add_argument("runs", nargs="*", metavar="RUN", help=text)
    parser.add_argument("--study", type=Path, metavar="FOLDER", help="measure each run of the study's pipeline folder")
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    if bool(args.runs) == bool(args.study):
        raise UserError("pass either runs to compare in one figure, or --study FOLDER")
    if args.study:
        record_study(args.study)
        return
    runs = list(takewhile(lambda word: not word.isupper() or Path(word).exists(), args.runs))  # up to a KEY
    words = ["OUTPUT_DIR", "runs/similarity", *args.runs[len(runs) :]]
    names = [_name_run(run) for run in runs]
    if len(set(names)) < len(runs):
        names = runs
    measure(load_run_config(runs[0], words), dict(zip(names, runs, strict=True)))


def record_study(folder: Path) -> None:
    """Measure every pretraining run in the folder of a pipeline with SEEDS, and add the scores to scores.json."""
    branches = read_json(check_file(folder / PIPELINE_FILE, "record of a pipeline"))["study"]["branches"]
    scores = read_json(_SCORES)
    for branch, names in branches.items():
        for seed, name in names.items():
            run = folder / name / "pretrain"
            output = ["OUTPUT_DIR", str(folder / name / "similarity")]
            row = measure(load_run_config(str(run), output), {branch: str(run)})["runs"][branch]
            for key, column in _COLUMNS.items():
                scores["scores"].setdefault(column, {}).setdefault(branch, {})[seed] = row[key]
    write_json(_SCORES, scores)


def load_run_config(run: str, overrides: Sequence[str]) -> CfgNode:
    """Load the config of a run folder, or the defaults for a checkpoint or ``random``, with overrides."""
    file = Path(run) / file_names.CONFIG
    return load_config(file if file.is_file() else None, overrides)


def measure(
    cfg: CfgNode,
    runs: Mapping[str, str],
    images: int = 32768,
    augmentations: int = 32,
    *,
    context: RunContext | None = None,
) -> dict[str, Any]:
    """Write similarity and variance of every run's features, as histograms in one figure and numbers in CSV.

    Args:
        cfg: DATA.TRAIN, VIEWS.KEY (the augmentation), VIEWS.IMAGE_SIZE, SEED, OUTPUT_DIR.
        runs: name in the legend -> run folder, checkpoint or ``random``.
        images: points in the histogram (JCL: 32,768); all images where the data set has fewer.
        augmentations: A views per image (JCL: 32).

    Returns:
        The content of results.json: mean and standard deviation of both measures for each run.
    """
    if augmentations < 2:
        raise UserError(f"the variance needs at least 2 augmentations per image, not {augmentations} (JCL uses 32)")
    with open_probe(cfg, "similarity", context) as run:
        data = datasets.load(cfg.DATA.TRAIN, "train", cfg.DATA.ROOT, cfg.DATA.DOWNLOAD)
        count = min(images, len(data))
        frozen = {name: load_frozen(weights, cfg, run.device) for name, weights in runs.items()}
        run.start()
        options = (data, cfg, run.stop, run.device, count, augmentations)
        points = {name: _compute_points(backbone, *options) for name, (backbone, _) in frozen.items()}
        protocol = {"data": cfg.DATA.TRAIN, "view": cfg.VIEWS.KEY, "image_size": cfg.VIEWS.IMAGE_SIZE, "seed": cfg.SEED}
        results = {
            "images": min(len(p) for p in points.values()),  # the last incomplete batch is dropped
            "augmentations": augmentations,
            "protocol": protocol,
            "sources": {name: source for name, (_, source) in frozen.items()},
            "runs": {name: _summarize(p) for name, p in points.items()},
        }
        for name, row in results["runs"].items():
            log.info(f"{name}: similarity {row['similarity_mean']:.4f}, variance {row['variance_mean']:.3g}")
        rows = [[name, f"{s:.8g}", f"{v:.8g}"] for name, p in points.items() for s, v in p]
        return run.finish(results, [["run", "similarity", "variance"], *rows], draw(points))


@torch.no_grad()
def _compute_points(
    backbone: ResNet,
    data: datasets.ImageData,
    cfg: CfgNode,
    stop: AgreedStop,
    device: torch.device,
    count: int,
    augmentations: int,
) -> np.ndarray:
    """Return similarity and variance of each image's views, (count, 2) float64."""
    batch_size = min(16, count)
    key_views = [AUGMENTATIONS[cfg.VIEWS.KEY]] * augmentations
    loader = build_loader(cfg, data, key_views, device, size=cfg.VIEWS.IMAGE_SIZE, batch_size=batch_size)
    rows: list[Tensor] = []
    for _, batch in loader.batches(0, min(len(loader), -(-count // batch_size)), stop.request):
        stop.raise_if_requested()
        features = compute_features(backbone, batch.views_VnCHW.flatten(0, 1), cfg, "none", device)
        features_BAF = features.unflatten(0, (augmentations, -1)).transpose(0, 1)
        rows.append(torch.stack(measure_similarity_and_variance(features_BAF), dim=1).cpu())
    return torch.cat(rows)[:count].double().numpy()


def measure_similarity_and_variance(features_BAF: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean cosine similarity of all A x A pairs and mean diagonal of the covariance, per image.

    These are the measures of JCL's supplement, Sec. 5.

    With unit vectors u_a and their mean m, the first is |m|^2 (self-pairs included, as in the paper) and the second
    (1 - |m|^2) / F with the covariance divided by A: the two histograms are mirror images of one another.

    Returns:
        similarity (B,) and variance (B,).
    """
    mean_BF = F.normalize(features_BAF.float(), dim=2).mean(dim=1)
    similarity = mean_BF.square().sum(dim=1)
    return similarity, (1 - similarity) / features_BAF.shape[2]


def draw(points: Mapping[str, np.ndarray]) -> Any:
    """Draw two histograms: similarity on the left, variance on the right, one color per run."""
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    titles = ("mean cosine similarity of an image's views", "mean variance of an image's views")
    for column, (axis, title) in enumerate(zip(figure.subplots(1, 2), titles, strict=True)):
        values = np.concatenate([p[:, column] for p in points.values()])
        bins = np.linspace(values.min(), values.max(), 60)
        for name, p in points.items():
            label = f"{figure_text(name)} (mean {p[:, column].mean():.3g})"
            axis.hist(p[:, column], bins=bins, alpha=0.55, label=label)
        axis.set(xlabel=title, ylabel="images")
        axis.legend()
    return figure


def _summarize(points_N2: np.ndarray) -> dict[str, float]:
    names = ("similarity_mean", "variance_mean", "similarity_std", "variance_std")
    return dict(zip(names, [*points_N2.mean(axis=0).tolist(), *points_N2.std(axis=0).tolist()], strict=True))


def _name_run(run: str) -> str:
    """Return the legend label of a run: the branch name in a pipeline, else the folder name."""
    path = Path(run).absolute()
    return path.parent.name if path.name == "pretrain" else path.stem
