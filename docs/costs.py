"""The page of costs, computed by tools/estimates: docs/costs.md, written by `make docs`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.config import load_config
from tools import ROOT
from tools.estimates import detection, model
from tools.estimates.model import Estimate, format_count
from tools.estimates.published import A100, DETECTION_RATES, RTX_3090, RUNS, SHOWN, SOURCES, SUPERVISED_RATES, ZOO_GB
from tools.estimates.recipes import estimate_recipe, is_detector, is_pretraining, load_detector

_BATCH = 128
_OWN_IMAGES = 20_000
_GPU_NAMES = [format_count(count, gpu) for gpu, count in SHOWN]
_INTRODUCTION = """\
# What will it cost?

Hours, memory, workers and learning rates of the recipes on common GPUs. **{basis}**

Published pretrainings took {fastest:.1f} to {slowest:.1f} times as long as this model says, and published detectors
{detectors} ([checks](#checks)): plan with twice the hours, and time your first hundred steps. Any launch with
`--dry-run` prints the hours of its stages on the GPUs of this machine, or on SLURM of those in `--gpus TYPE:NUMBER`;
`launch.py recipes NAME` prints those of one recipe."""
_COMPUTED = "All numbers on this page are computed; no recipe has been timed on a GPU yet."
_TIMED = "Hours with an asterisk follow from a step that `make gpu` has timed; all other numbers are computed."
_HOURS = """\
## Hours

In half precision, which you switch on: `SOLVER.AMP bf16`, or `SOLVER.AMP.ENABLED True` for detectors. Without probes
and evaluations.
RTX 3090 and 4090 have 24 GB; A100 and H100 are those of 80 GB with NVLink. `--gpus 8` uses 8 GPUs of a machine.
"-": the batch does not fit, or its groups of batch norm do not divide among so many GPUs."""
_MEMORY = """\
## Memory

GiB per GPU that tensors take in half precision, with the smallest `SOLVER.ACCUMULATE` (in parentheses) that fits
into nine tenths of the card; "fits" is the largest power of two of images per GPU that fits at once. Float32 takes
about twice as much. kNN and a linear probe with `LINEAR.AUGMENT none` keep the features of all images: 9.8 GiB for
ImageNet-1K and a ResNet-50, which kNN divides among the GPUs."""
_WORKERS = """\
## Workers

`DATALOADER.NUM_WORKERS` per GPU that keep up with its full speed, for views of 224 pixels from 500 x 375 JPEGs.
Each worker needs a core, and the training process one more; on fewer cores the GPU waits, and the log says so.
Decoding takes 2.5 ms of CPU time per image and each view 0.9 ms ([measured](benchmarks.md) on a CPU: 4.3 ms for two
views, 7.9 ms for six)."""
_RATES = """\
## Learning rates

With SGD and LARS, the learning rate is proportional to the batch: halve both or neither. `SOLVER.REFERENCE_BATCH`
applies this rule by itself: the rate is `BASE_LR` x `IMS_PER_BATCH` / `REFERENCE_BATCH`. The recipes marked with
"automatic" set it. For the others, set `SOLVER.BASE_LR` to the last column when you set `SOLVER.IMS_PER_BATCH 128`.
`SOLVER.ACCUMULATE` and the number of GPUs do not change the batch, and therefore not the rate. There is no such
rule for AdamW. For detectors, `SOLVER.REFERENCE_WORLD_SIZE` scales batch, rate and iterations with the number of
GPUs."""
_METHOD = """\
## How it is computed

- **FLOPs** follow from the layers in closed form; a test compares them with torch's counter. A pass with gradients
  takes three times a forward pass, less the first convolution's gradient of the image. MoCo, SCE and ReSSL train
  one view and encode one key; JCL trains one and encodes five; SimCLR and TCL train two.
- **Images/s** of pretraining = published images/s of supervised training of a ResNet-50 on that GPU x its FLOPs per
  image / the recipe's FLOPs per image x {efficiency:.2f}. The last factor is how much of that speed the published
  runs below reached, in the geometric mean; in the table, each is predicted by the others. A ResNet-18 makes 1.3
  times the FLOP/s of a ResNet-50, as timm published for one card. 8 GPUs reach the fraction of 8 times the speed
  that the source published.
- **Images/s of detectors** = those of the same kind in Detectron2's model zoo (8 V100) x its FLOPs / the recipe's
  FLOPs x the GPU's speed for Mask R-CNN. NVIDIA published 8 A100 at 2.46 times the speed of 8 V100 in float32; for
  the other cards, that is scaled by their speed for a ResNet-50, which nobody has checked.
- **Hours** = images x epochs / images/s, or images per iteration x iterations / images/s. Training images: ImageNet
  1,281,167, ImageNet-100 126,689, COCO 118,287.
- **Memory**: the activations that the backward pass needs, in closed form (a test compares them with what torch
  saves), the encoded keys, weights, gradients, momentum, queue and logits. That of detectors is multiplied by
  {overhead:.2f}, the geometric mean of published / counted memory in Detectron2's model zoo.
- **Short steps**: no step is taken to be shorter than 20 ms, because launching its kernels takes time, too. In
  lightly's runs on CIFAR-10, a step of 128 images takes 11 to 17 ms more than a quarter of a step of 512.
- **Not included**: slow file systems, and loaders that do not keep up."""

_CHECKS = """\
## Checks

Hours of published pretrainings, each predicted from the others. In the geometric mean, the model misses by a factor of
{error:.1f}. lightly's runs on ImageNet-100 and Imagenette take about as long for SimCLR as for MoCo, whose FLOPs are a
quarter more: their loaders, not their GPUs, seem to limit them. Our loader needs a [third of the CPU
time](benchmarks.md#compared-with-lightly) of lightly's."""
_CHECKED_BASIS = """\
Images/s of supervised training of a ResNet-50 on one GPU: those that the model uses (Lambda's, which cover all cards by
one code) and what other code reached."""
_CHECKED_RATES = """\
Images/s of Mask R-CNN (ResNet-50, FPN) by code other than Detectron2's. The ratio of the third to the first row is the
factor of an A100 in half precision."""
_CHECKED_MEMORY = (
    "GB of a V100 that trains on two images in Detectron2's model zoo, from which the factor of memory comes:"
)


@dataclass(frozen=True)
class Row:
    """A recipe with the overrides and the number of images that its row stands for."""

    label: str
    path: Path
    overrides: tuple[str, ...] = ()
    images: int | None = None

    def estimate(self) -> list[Estimate | None]:
        """Estimate the cost on each type and number of GPUs of the tables."""
        return [estimate_recipe(self.path, gpu, count, self.overrides, self.images) for gpu, count in SHOWN]


def markdown() -> str:
    """Return the whole page."""
    groups = list_rows()
    pretraining = [row for rows in list(groups.values())[:-1] for row in rows]
    ratios = [run.hours / model.predict_hours(run) for run in RUNS]
    detectors = [_predict_detection(rate) / rate.images_per_second for rate in DETECTION_RATES]
    estimates = [estimate for rows in groups.values() for row in rows for estimate in row.estimate() if estimate]
    introduction = _INTRODUCTION.format(
        basis=_TIMED if any(estimate.is_measured for estimate in estimates) else _COMPUTED,
        fastest=min(ratios),
        slowest=max(ratios),
        detectors=f"{min(detectors):.1f} to {max(detectors):.1f} times",
    )
    hours = [f"### {title}\n\n{_build_table(rows, _format_hours, _GPU_NAMES)}" for title, rows in groups.items()]
    memory_head = ["batch", "fits 24 GB", "fits 80 GB", "one of 24 GB", "one of 80 GB", "8 of 80 GB"]
    return "\n\n".join(
        [
            introduction,
            _HOURS,
            *hours,
            _MEMORY,
            _format_table(["recipe", *memory_head], [_format_memory(row) for rows in groups.values() for row in rows]),
            _WORKERS,
            _build_table(
                [row for row in pretraining if _get_config(row).VIEWS.IMAGE_SIZE == 224], _format_workers, _GPU_NAMES
            ),
            _RATES,
            _format_table(
                ["recipe", "optimizer", "batch", "learning rate", "at batch 128"],
                [_format_rate(row) for row in pretraining],
            ),
            _METHOD.format(efficiency=model.measure_efficiency(), overhead=detection.measure_overhead()),
            _format_checks(),
            _format_sources(),
        ]
    )


def list_rows() -> dict[str, list[Row]]:
    """List the rows by group; detectors are last."""
    folder = ROOT / "configs/pretrain"
    groups: dict[str, list[Row]] = {"ImageNet-1K": [], "ImageNet-100": [], "Other data sets": []}
    for path in sorted(folder.glob("*.yaml")):
        assert is_pretraining(path), path
        data = load_config(path).DATA.TRAIN
        group = {"imagenet": "ImageNet-1K", "imagenet100": "ImageNet-100"}.get(data, "Other data sets")
        overrides = ("SOLVER.IMS_PER_BATCH", "4096") if path.stem.startswith("simclr") else ()  # fits on 8 GPUs
        groups[group].append(_name_row(path, overrides))
    for method in ("mocov2", "jcl"):
        path = folder / f"{method}_R50_IN1k_200ep.yaml"
        overrides = ("DATA.TRAIN", "imagenet100", "SOLVER.EPOCHS", "100")
        groups["ImageNet-100"].append(_name_row(path, overrides))
    recipe = ROOT / "configs/examples/own_images_R50.yaml"
    smaller = ("MODEL.ARCH", "resnet18")
    groups[f"{_OWN_IMAGES:,} of your own images"] = [
        _name_row(recipe, smaller, _OWN_IMAGES),
        _name_row(recipe, (), _OWN_IMAGES),
    ]
    detectors = [*sorted((ROOT / "configs").glob("*.yaml")), ROOT / "configs/examples/own_faster_R50_FPN.yaml"]
    is_start = "_jcl"  # the same recipe from other weights
    groups["Detectors"] = [
        _name_row(path) for path in detectors if is_detector(path) and not path.stem.endswith(is_start)
    ]
    return groups


def _name_row(path: Path, overrides: tuple[str, ...] = (), images: int | None = None) -> Row:
    label = f"{path.stem} with {' '.join(overrides)}" if overrides else path.stem
    return Row(label, path, overrides, images)


def _get_config(row: Row) -> Any:
    if is_detector(row.path):
        return load_detector(row.path, row.overrides)
    return load_config(row.path, list(row.overrides))


def _build_table(rows: Sequence[Row], format_cell: Callable[[Estimate], str], head: Sequence[str]) -> str:
    """Return a table with one row per recipe and one column per type and number of GPUs."""
    cells = [[_link(row), *(format_cell(estimate) if estimate else "-" for estimate in row.estimate())] for row in rows]
    return _format_table(["recipe", *head], cells)


def _format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def _link(row: Row) -> str:
    name, _, details = row.label.partition(" ")
    return f"[{name}](../{row.path.relative_to(ROOT)}){f' {details}' if details else ''}"


def _format_hours(estimate: Estimate) -> str:
    if estimate.hours is None or estimate.gib is None:
        return "-"
    text = f"{max(0.1, estimate.hours):.1f}" if estimate.hours < 10 else f"{estimate.hours:,.0f}"
    return f"{text} *" if estimate.is_measured else text


def _format_workers(estimate: Estimate) -> str:
    return str(estimate.workers or "-")


def _format_memory(row: Row) -> list[str]:
    costs = {(gpu, count): estimate for (gpu, count), estimate in zip(SHOWN, row.estimate(), strict=True)}
    small = costs[RTX_3090, 1]
    large = costs[A100, 1]
    assert small and large
    several = costs[A100, 8]
    batch = _get_config(row).SOLVER.IMS_PER_BATCH
    needs = [_format_need(estimate) for estimate in (small, large, several)]
    return [_link(row), f"{batch:,}", f"{small.largest_batch:,}", f"{large.largest_batch:,}", *needs]


def _format_need(estimate: Estimate | None) -> str:
    if estimate is None or estimate.gib is None:
        return "-"
    accumulate = f" ({estimate.accumulate})" if (estimate.accumulate or 1) > 1 else ""
    return f"{estimate.gib:.1f}{accumulate}"


def _format_rate(row: Row) -> list[str]:
    solver = _get_config(row).SOLVER
    rate = solver.BASE_LR
    reference = ""
    if solver.REFERENCE_BATCH:
        rate *= solver.IMS_PER_BATCH / solver.REFERENCE_BATCH
        reference = " (automatic)"
    at_batch = f"{rate * _BATCH / solver.IMS_PER_BATCH:.3g}{reference}" if solver.OPTIMIZER != "adamw" else "no rule"
    return [_link(row), solver.OPTIMIZER, f"{solver.IMS_PER_BATCH:,}", f"{rate:.3g}", at_batch]


def _predict_detection(rate: Any) -> float:
    """Return the images/s of Detectron2's Mask R-CNN of the zoo that the model predicts."""
    return detection.predict_zoo_rate("mask FPN", rate.gpu, rate.count, rate.precision)


def _format_checks() -> str:
    runs = [
        [
            run.name,
            format_count(run.count, run.gpu),
            f"{model.predict_hours(run):.3g}",
            f"{run.hours:.3g}",
            f"{model.predict_hours(run) / run.hours:.2f}",
            f"{run.source.name}{f'; {run.note}' if run.note else ''}",
        ]
        for run in RUNS
    ]
    rates = [
        [
            rate.name,
            f"{_predict_detection(rate):.0f}",
            f"{rate.images_per_second:.0f}",
            f"{_predict_detection(rate) / rate.images_per_second:.2f}",
            rate.source.name,
        ]
        for rate in DETECTION_RATES
    ]
    basis = [
        [
            rate.name,
            f"{rate.gpu.supervised[rate.precision]:,.0f}",
            f"{rate.images_per_second:,.0f}",
            f"{rate.gpu.supervised[rate.precision] / rate.images_per_second:.2f}",
            rate.source.name,
        ]
        for rate in SUPERVISED_RATES
    ]
    memory = [
        [kind, f"{detection.predict_zoo_gb(kind):.1f}", f"{gb:.1f}", f"{detection.predict_zoo_gb(kind) / gb:.2f}"]
        for kind, gb in ZOO_GB.items()
    ]
    return "\n\n".join(
        [
            _CHECKS.format(error=model.measure_error()),
            _format_table(["run", "GPUs", "predicted", "published", "ratio", "source"], runs),
            _CHECKED_BASIS,
            _format_table(["GPU", "used", "published", "ratio", "source"], basis),
            _CHECKED_RATES,
            _format_table(["GPUs", "predicted", "published", "ratio", "source"], rates),
            _CHECKED_MEMORY,
            _format_table(["detector", "predicted", "published", "ratio"], memory),
        ]
    )


def _format_sources() -> str:
    lines = [f"- [{source.name}]({source.url}), {source.date}." for source in SOURCES]
    return "\n".join(["## Sources", "", "With the dates of what they describe:", "", *lines]) + "\n"


if __name__ == "__main__":
    (ROOT / "docs" / "costs.md").write_text(markdown(), encoding="utf-8")
